"""Learn from recordings: a world, or a policy that does what was done in them.

The loop is that of `watch.py`; its material are episodes (`recordings.py`). A clone on
the world of another run takes over what that run knows: the settings of its agent, its
weights, the keys it sees, how images are prepared for it and, of the same recordings,
how they are read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from reverie.api import UserError
from reverie.capabilities import ConfiguresBase
from reverie.convert.dreamerv3_torch import is_torch_file, read_encoder, sizes_of
from reverie.datasets.episodes import ReaderConfig
from reverie.datasets.images import ImageConfig, check_obs_space
from reverie.run import checkpoint
from reverie.run.clock import RunConfig
from reverie.run.config import Config
from reverie.run.folder import read_config, resolve_logdir, run_folder_of
from reverie.run.offline_data import Recordings, images_of, same_actions
from reverie.run.sequences import learn
from reverie.storage.run_spaces import read_spaces


def offline(config: Config) -> Path:
    """Train until `run.steps` updates, resuming if the folder has a checkpoint.

    Returns the run folder.
    """
    if config.offline.data and config.of_agent.sequence_window is not None:
        raise UserError(
            f"The agent {config.agent!r} looks at recordings as sequences to watch.\n"
            "  Fix: reverie train --configs vta_episodes --sequences.folder "
            f"{config.offline.data}"
        )
    config = settle(config)
    run = config.of_agent.base_run
    material = Recordings(config.offline, config.seed, run)
    if run and not is_torch_file(run):
        check_alike(run, material)
    start, everything = config.run.from_checkpoint, RunConfig().from_components
    is_new = not (resolve_logdir(config.logdir) / "ckpt").exists()
    ours = start and not Path(start).expanduser().is_file()
    if ours and is_new and config.run.from_components == everything:
        check_alike(start, material)
    return learn(in_updates(config, material.steps), material)


def in_updates(config: Config, steps: int) -> Config:
    """The config with passes over so many steps counted in updates.

    They end at `run.steps` updates at the latest, and are judged at least as often as
    `run.report_every` says.
    """
    offline = config.offline
    if not offline.passes:
        return config
    rows = config.of_agent.rows_per_update
    if not rows:
        raise UserError(
            f"The agent {config.agent!r} does not count passes over recordings.\n"
            "  Fix: leave out offline.passes, and give --run.steps."
        )
    once = max(1, steps // rows)
    steps = min(config.run.steps, once * offline.passes)
    run = replace(config.run, clock="steps", steps=steps)
    if offline.report_passes:
        every = min(config.run.report_every, once * offline.report_passes)
        run = replace(run, report_every=every)
    return replace(config, run=run)


def check_alike(run: str, material: Recordings) -> None:
    """Raise unless recordings show and do what a run was trained on."""
    path, data = checkpoint.find_checkpoint(Path(run)), material.config.data
    if images := images_of(path):
        check_obs_space(images, material.images.input_space, data)
    for home in list(path.parents)[:2]:
        if (home / "spaces.json").is_file():
            learnt = read_spaces(home).act_space
            same_actions(run, learnt, data, material.act_space)


def settle(config: Config) -> Config:
    """The config with all that the run it looks through has to say."""
    agent_config, run = config.of_agent, config.of_agent.base_run
    if not run or not isinstance(agent_config, ConfiguresBase):
        return config
    if is_torch_file(run):
        mine = agent_config.with_encoder(sizes_of(read_encoder(run)))
        return replace(config, **{config.agent: mine})
    path = checkpoint.find_checkpoint(Path(run))
    other = read_config(run_folder_of(path))
    if isinstance(other.of_agent, ConfiguresBase):
        through = other.of_agent.base_run
        better = f"--{config.agent}.run {through}" if through else "leave it out"
        raise UserError(
            f"{run} has no world to look through: its agent is {other.agent!r}, as "
            f"that of this run.\n  Fix: {better}."
        )
    if other.of_agent.sequence_window is not None:
        raise UserError(
            f"{run} only watched, and a clone cannot see by its world.\n"
            f"  Fix: give --{config.agent}.run a run of dreamer or iris."
        )
    mine = agent_config.with_base_agent(other.agent)
    crop = config.offline.images.crop
    images = images_of(path)
    wanted = images.config if images else ImageConfig()
    if max(crop) and crop != wanted.crop:
        raise UserError(
            f"{run} was trained on images of {wanted.crop}, offline.images.crop says "
            f"{crop}.\n  Fix: --offline.images.crop 0 0, for that of the run."
        )
    prepared = replace(config.offline.images, crop=wanted.crop)
    keys = config.offline.keys or (tuple(images.input_space) if images else ())
    read = config.offline.read
    if read == ReaderConfig() and same_place(config.offline.data, other.offline.data):
        read = other.offline.read
    settled = replace(config.offline, images=prepared, keys=keys, read=read)
    changes: dict[str, Any] = {other.agent: other.of_agent, config.agent: mine}
    return replace(config, offline=settled, **changes)


def same_place(one: str, other: str) -> bool:
    """Whether two names are of the same recordings."""
    if ":" in one or ":" in other:
        return one == other
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()
