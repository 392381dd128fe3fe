"""Recorded episodes of any format as a sequence dataset (`--offline.data PATH`).

One image key and the actions of each episode are used. If all episodes have rewards,
rows with a nonzero reward are the ground-truth events with which the evaluation
compares boundaries. NPZ files need no actions, rewards, or flags such as `is_first`.
"""

from __future__ import annotations

import functools
import warnings

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode, check_episode
from reverie.datasets.readers import Reader
from reverie.datasets.sequences import Loss, SequenceConfig
from reverie.datasets.sequences.windows import StoredEpisodes, WindowedEpisodes
from reverie.rows import Window
from reverie.spaces import EVENT, Arrays, Spaces


class EpisodeSequences(WindowedEpisodes):
    """Windows of recorded episodes, with their actions unless disabled."""

    loss: Loss = "gaussian"

    def __init__(
        self,
        reader: Reader,
        held_out: Reader,
        config: SequenceConfig,
        window: Window,
        seed: int,
    ):
        key = image_key(reader)
        if config.actions and not reader.act_space:
            raise UserError(
                f"{reader.origin} has no 'action'.\n"
                "  Fix: --sequences.actions False, to train without actions."
            )
        self.obs_space: Spaces = {key: reader.obs_space[key]}
        self.act_space: Spaces = dict(reader.act_space) if config.actions else {}
        self._readers = reader, held_out
        length = window.context + window.length
        episodes = StoredEpisodes(config.memory)
        train, test = (
            _add_all(episodes, part, key, length, config.actions, min_valid)
            for part, min_valid in ((reader, 2), (held_out, 1))
        )
        super().__init__(
            episodes, train, test, config, window, seed, common_events=True
        )

    @staticmethod
    def unused_settings(config: SequenceConfig) -> dict[str, str]:
        unused = {"folder": "the sequences are those of the recorded episodes"}
        return {**WindowedEpisodes.unused_settings(config), **unused}

    def close(self) -> None:
        super().close()
        for reader in self._readers:
            reader.close()


def image_key(reader: Reader) -> str:
    """Return the only image key, or `image` if there are several; else raise."""
    spaces = reader.obs_space.items()
    images = [key for key, s in spaces if s.is_image and 0 not in s.shape]
    if len(images) != 1 and "image" not in images:
        found = ", ".join(images) or "none"
        raise UserError(
            f"{reader.origin} must have one image key: uint8, shape (h, w, c) in every "
            f"row. Found: {found}.\n"
            "  Fix: select one with `reverie data convert --images NAME`."
        )
    return images[0] if len(images) == 1 else "image"


def _add_all(
    episodes: StoredEpisodes,
    reader: Reader,
    key: str,
    length: int,
    actions: bool,
    min_valid: int,
) -> list[int]:
    """Add all valid episodes and return their indices; warn about the others.

    Raises `UserError` if no episode is valid. If some episodes are invalid, at least
    `min_valid` others must be valid.
    """
    indices, errors = [], []
    for name in reader.names():
        read = functools.partial(_read, reader, name, key, length, actions)
        try:
            indices.append(episodes.add(f"{reader.origin}: {name}", read))
        except BadEpisode as error:
            errors.append(f"{name} {error}")
    if errors:
        message = f"{reader.origin}: {len(errors)} of {len(reader.names())} episodes"
        warnings.warn(
            f"{message} are skipped: {errors[0]}", RuntimeWarning, stacklevel=3
        )
    if len(indices) < (min_valid if errors else 1):
        reasons = "; ".join(errors[:3]) or "there are none"
        raise UserError(
            f"The episodes of {reader.origin} cannot be used: {reasons}.\n"
            "  Fix: repair or remove such episodes. Two or more are needed, with the "
            f"same shapes and at least {length} frames (the agent sets "
            "the length of its sequences)."
        )
    return indices


def _read(reader: Reader, name: str, key: str, length: int, actions: bool) -> Arrays:
    """Return image, actions and events of one episode."""
    episode = reader.read_keys(name, [key])
    frames = len(episode[key])
    no_reward = {"reward": np.zeros(frames, np.float32)}
    act_space = reader.act_space if actions else {}
    check_episode({**no_reward, **episode}, {key: reader.obs_space[key]}, act_space)
    if frames < length:
        raise BadEpisode(f"has {frames} frames, fewer than the window of {length}")
    rows = {key: episode[key], **{act: episode[act] for act in act_space}}
    if "reward" in episode:
        rows[EVENT] = episode["reward"] != 0
    return rows
