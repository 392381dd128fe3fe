"""Reader of the replay buffer of danijar/dreamerv3: a folder of chunks.

A chunk is an NPZ file `<time>-<id>-<id of the next chunk>-<rows>.npz`. A chain of
chunks holds the steps of one environment, with episodes one after another, so an
episode may span chunks. Rows are as in Reverie: the action of row t was chosen
after its observation. Continuous actions are scaled to [-1, 1], discrete ones are
indices (one-hot vectors in old versions). Latents of the agent, such as `dyn/deter`,
and `stepid` are not observations. Only complete episodes are read.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np

from reverie.datasets.episode_format import BadEpisode, Episode, from_steps
from reverie.datasets.readers import Reader, infer_spaces
from reverie.datasets.readers.npz import (
    decode_one_hot,
    is_one_hot,
    load_arrays,
    scaled_space_of_unknown_bounds,
)
from reverie.datasets.readers.replay import complete_episodes
from reverie.spaces import RESERVED, STEP_KEYS, Arrays, Space, Spaces

_NAME = re.compile(r"\d{8}T\d{6}\w*-(\w+)-(\w+)-(\d+)")
"""File name of a chunk without its suffix."""
_AGENT_KEYS = ("enc/", "dyn/", "dec/", "rep/", "finite")
"""Prefixes of the keys that the agent stores: latents, and checks for finite values."""
_TRANSITION_KEYS = ("action", "reward", "is_terminal")
"""Keys that `from_steps` takes in addition to observations."""
_MAX_CACHED = 4  # chunks in memory: short episodes are often in the same chunk


def find_chunks(path: str | Path) -> list[Path]:
    """Return the chunks of a folder or of its subfolder `replay`, in order of time."""
    for folder in (Path(path), Path(path) / "replay"):
        files = sorted(folder.glob("*.npz"))
        if files and all(_NAME.fullmatch(file.stem) for file in files):
            return files
    return []


class DreamerV3ReplayReader(Reader):
    """Reads complete episodes, named by environment and step."""

    def __init__(self, path: str | Path):
        self.origin = str(path)
        self.masks: dict[str, list[str]] = {}
        self._load = functools.lru_cache(maxsize=_MAX_CACHED)(_load_chunk)
        flags: dict[Path, Arrays] = {}
        self._damaged: list[str] = []
        for file in find_chunks(path):
            try:
                arrays = load_arrays(file, lambda key: key in ("is_first", "is_last"))
                flags[file] = _read_flags(arrays)
            except (BadEpisode, KeyError):
                self._damaged.append(file.name)
        self._pieces: dict[str, list[tuple[Path, slice]]] = {}  # rows of each episode
        self._lengths: dict[str, int] = {}
        for env, chain in enumerate(_chains(list(flags))):
            self._find_episodes(env, {file: flags[file] for file in chain})
        self._names = list(self._pieces)

    @property
    def metadata(self) -> dict[str, str]:
        return {"damaged": ", ".join(self._damaged)} if self._damaged else {}

    def rows(self, name: str) -> int:
        return self._lengths[name]

    def read(self, name: str) -> Episode:
        episode = self._read_raw(name)
        if episode["action"].dtype.kind != "f":
            return episode
        space = self.act_space["action"]
        if space.is_discrete:
            action = decode_one_hot(episode["action"][:-1], "action", space)
            episode["action"] = np.concatenate([action, space.zeros(1)])
        return episode

    @functools.cached_property
    def _spaces(self) -> tuple[Spaces, Spaces]:
        obs, act = infer_spaces(self.origin, self._names, self._read_raw, ["action"])
        space = act["action"]
        if space.is_discrete:
            return obs, self._extend_discrete_bounds(act)
        if is_one_hot(space, self._names, self._read_raw):
            return obs, {"action": Space(np.int32, (), 0, space.shape[0])}
        # actions are stored before they are clipped, so they may exceed the bounds
        return obs, {"action": scaled_space_of_unknown_bounds(space)}

    def _find_episodes(self, env: int, chain: dict[Path, Arrays]) -> None:
        """Add the complete episodes in a chain of chunks, given the flags of each."""
        is_first, is_last = (
            np.concatenate([flags[key] for flags in chain.values()])
            for key in ("is_first", "is_last")
        )
        files, edges = list(chain), [0]  # edges: first row of each file in the chain
        for flags in chain.values():
            edges.append(edges[-1] + len(flags["is_first"]))
        # a chain has no gaps, so only `is_first` starts a new sequence of rows
        for start, stop in complete_episodes(is_first, is_first, is_last):
            rows = [start, stop - 1]  # first and last
            first, last = np.searchsorted(edges, rows, "right") - 1  # their files
            name = f"env{env}_step{start}"
            self._lengths[name] = stop - start
            self._pieces[name] = [
                (files[i], slice(max(0, start - edges[i]), stop - edges[i]))
                for i in range(first, last + 1)
            ]

    def _read_raw(self, name: str) -> Episode:
        """Read an episode with actions as they are stored."""
        parts = []
        for file, part in self._pieces[name]:
            arrays = {k: v for k, v in self._load(file).items() if v.ndim}
            parts.append({key: value[part] for key, value in arrays.items()})
        try:
            rows = {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
            action, reward, terminal = (rows.pop(key) for key in _TRANSITION_KEYS)
        except KeyError as error:
            raise BadEpisode(f"has no {error}") from error
        except ValueError as error:
            raise BadEpisode(f"has chunks of different shapes ({error})") from error
        return from_steps(rows, {"action": action[:-1]}, reward[1:], terminal[1:])


def _read_flags(arrays: Arrays) -> Arrays:
    """Return `is_first` and `is_last` of a chunk as booleans."""
    first, last = arrays["is_first"], arrays["is_last"]
    kinds = first.dtype.kind + last.dtype.kind
    if first.ndim != 1 or first.shape != last.shape or {*kinds} - {*"biuf"}:
        raise BadEpisode("has flags that are not one per row")
    return {"is_first": first.astype(bool), "is_last": last.astype(bool)}


def _load_chunk(file: Path) -> Arrays:
    """Return observations, actions, rewards and terminal flags of a chunk."""
    skipped = (*_AGENT_KEYS, "log_", "log/")
    unused = {*RESERVED, *STEP_KEYS} - {*_TRANSITION_KEYS}
    return load_arrays(file, lambda k: k not in unused and not k.startswith(skipped))


def _chains(files: list[Path]) -> list[list[Path]]:
    """Group chunks by environment; the name of a chunk contains the id of the next."""
    by_id = {file.stem.split("-")[1]: file for file in files}
    following = {file: by_id.get(file.stem.split("-")[2]) for file in files}
    not_first = set(following.values())
    chains: list[list[Path]] = []
    used: set[Path] = set()
    # the chunks of a damaged dataset may form a cycle, which has no first chunk
    for start in sorted(files, key=lambda file: file in not_first):
        if start in used:
            continue
        chains.append([])
        file: Path | None = start
        while file is not None and file not in used:
            used.add(file)
            chains[-1].append(file)
            file = following[file]
    return chains
