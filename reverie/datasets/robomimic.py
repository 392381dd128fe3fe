"""Writer of HDF5 files in robomimic's layout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from reverie.datasets.episode_format import LOG, MODEL, STATE, Episode, to_steps
from reverie.datasets.readers.hdf5_file import import_h5py
from reverie.spaces import Spaces
from reverie.storage.atomic import atomic_write, make_parent


def write_robomimic(
    path: Path,
    episodes: Iterable[tuple[str, Episode]],
    act_space: Spaces,
    *,
    masks: Mapping[str, list[str]] | None = None,
    env_args: Mapping[str, Any] | None = None,
) -> int:
    """Write episodes atomically to a file that robomimic can read.

    Actions are written in the environment's own units, and their bounds are added to
    `env_args`. `dones` are the terminal flags. Of the keys under `log/`, only simulator
    states and models are written. `masks` are named subsets of the episodes
    (robomimic's filter keys); names without an episode are left out. Returns the total
    number of steps.
    """
    ((action_key, action_space),) = act_space.items()  # a single array of actions
    settings = dict(env_args or {})
    if action_space.native is not None:
        bounds = action_space.native_bounds
        settings["action_bounds"] = [bound.tolist() for bound in bounds]
    h5py = import_h5py()
    make_parent(path)
    total = 0
    with atomic_write(path) as temporary, h5py.File(temporary, "w") as file:
        data = file.create_group("data")
        for name, episode in episodes:
            obs, action, reward, terminal = to_steps(episode, act_space)
            group = data.create_group(name)
            group.attrs["num_samples"] = steps = len(reward)
            group["actions"] = action_space.to_native(action[action_key])
            group["rewards"] = reward
            group["dones"] = terminal.astype(np.int64)
            if STATE in episode:
                group["states"] = episode[STATE][:-1]
            if MODEL in episode:
                group.attrs["model_file"] = episode[MODEL].tobytes().decode()
            for key, value in obs.items():
                if key.startswith(LOG):
                    continue
                compression: dict[str, Any] = {}
                if value.dtype == np.uint8:
                    chunk = (1, *value.shape[1:])
                    compression = {"compression": "gzip", "chunks": chunk}
                for part, rows in (("obs", value[:-1]), ("next_obs", value[1:])):
                    group.create_dataset(f"{part}/{key}", data=rows, **compression)
            total += steps
        data.attrs["total"] = total
        data.attrs["env_args"] = json.dumps(settings)
        for name, members in (masks or {}).items():
            file[f"mask/{name}"] = np.array(
                [x for x in members if x in data], dtype="S"
            )
    return total
