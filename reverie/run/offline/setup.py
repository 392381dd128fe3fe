"""Prepares the config of offline training: settings of the base run, and epochs.

An agent with a base run (behavior cloning on the world model of another run) uses the
agent settings, observation keys and image crop of that run. If the recorded episodes
are the same, it also uses the reader settings of that run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.capabilities import ConfiguresBase, ImportedEncoder
from reverie.datasets.action_units import check_same_actions, check_same_units
from reverie.datasets.episodes import ReaderConfig
from reverie.datasets.images import ImageConfig, check_obs_space
from reverie.plugins import settings_name
from reverie.run.checkpoint import find_checkpoint
from reverie.run.clock import RunConfig
from reverie.run.config import Config
from reverie.run.folder import read_config, resolve_logdir, run_folder_of
from reverie.run.imported import encoder_importer, find_imported
from reverie.run.offline.datasets import OfflineEpisodes, as_paths, saved_image_crop
from reverie.storage.run_spaces import read_spaces


def epochs_to_updates(config: Config, env_steps: int) -> Config:
    """Convert `offline.epochs` to updates in `run.steps`; same for `report_epochs`.

    An epoch has `env_steps` environment steps. The values of `run.steps` and
    `run.report_every` in the config are upper limits.
    """
    offline = config.offline
    if not offline.epochs:
        return config
    rows = config.agent_config.rows_per_update
    if not rows:
        raise UserError(
            f"The training of agent {config.agent!r} is not counted in epochs.\n"
            "  Fix: remove offline.epochs, and set --run.steps."
        )
    updates = max(1, env_steps // rows)  # per epoch
    steps = min(config.run.steps, updates * offline.epochs)
    run = replace(config.run, clock="steps", steps=steps)
    if offline.report_epochs:
        every = min(config.run.report_every, updates * offline.report_epochs)
        run = replace(run, report_every=every)
    return replace(config, run=run)


def with_base_run(config: Config) -> Config:
    """Return the config with the settings of the base run (`AgentConfig.base_run`)."""
    agent_config, base_run = config.agent_config, config.agent_config.base_run
    if not base_run or not isinstance(agent_config, ConfiguresBase):
        return config
    if imported := find_imported(base_run, type(config)):
        importer = encoder_importer(imported)
        with imported.explain_import_errors():
            sizes = importer.infer_config(imported.contents)
        encoder = ImportedEncoder(importer.architecture, sizes, imported.agent)
        return replace(config, **{config.agent: agent_config.with_encoder(encoder)})
    path = find_checkpoint(Path(base_run))
    base = read_config(run_folder_of(path))
    if isinstance(base.agent_config, ConfiguresBase):
        world_model_run = base.agent_config.base_run
        flag = f"--{config.agent}.run"
        fix = f"{flag} {world_model_run}" if world_model_run else f"remove {flag}"
        raise UserError(
            f"{base_run} has no world model: its agent is {base.agent!r}, like that of "
            f"this run.\n  Fix: {fix}."
        )
    if base.agent_config.sequence_window is not None:
        raise UserError(
            f"The agent {base.agent!r} of {base_run} cannot be used as an encoder.\n"
            f"  Fix: set --{config.agent}.run to a run of dreamer or iris."
        )
    crop = config.offline.images.crop
    images = saved_image_crop(path)
    base_images = images.config if images else ImageConfig()
    if max(crop) and crop != base_images.crop:
        raise UserError(
            f"{base_run} was trained on images with the crop {base_images.crop}, but "
            f"offline.images.crop is {crop}.\n"
            "  Fix: --offline.images.crop 0 0, which uses the crop of that run."
        )
    offline = replace(
        config.offline,
        images=replace(config.offline.images, crop=base_images.crop),
        keys=config.offline.keys or (tuple(images.input_space) if images else ()),
    )
    if offline.read == ReaderConfig() and is_same_data(offline.data, base.offline.data):
        offline = replace(offline, read=base.offline.read)
    agents: dict[str, Any] = {
        base.agent: base.agent_config,
        config.agent: agent_config.with_base_agent(base.agent),
    }
    return replace(config, offline=offline, **agents)


def check_initial_weights(config: Config, dataset: OfflineEpisodes) -> None:
    """Raise if the base run or initial weights have other spaces than the dataset."""
    base_run = config.agent_config.base_run
    if base_run and not find_imported(base_run, type(config)):
        check_same_spaces(base_run, dataset)
    weights = config.run.from_checkpoint
    is_new = not (resolve_logdir(config.logdir) / "ckpt").exists()
    is_run = weights and not find_imported(weights, type(config))
    loads_all = config.run.from_components == RunConfig().from_components
    if is_run and is_new and loads_all:
        check_same_spaces(weights, dataset)


def check_action_range(config: Config, dataset: OfflineEpisodes) -> None:
    """Raise if a policy is trained in imagination, but the actions have no bounds.

    Such a policy outputs actions in [-1, 1]. Behavior cloning needs no bounds.
    """
    settings = config.agent_config
    if not (settings.policy_setting and settings.trains_policy):
        return
    for key, space in dataset.act_space.items():
        bounds = (space.low, space.high)
        if space.dtype.kind == "f" and not np.isfinite(bounds).all():
            setting = f"{settings_name(config.agent)}.{settings.policy_setting}"
            raise UserError(
                f"The action {key!r} of {dataset.training.origin} has no bounds, but "
                "the policy outputs actions between bounds.\n  Fix: give the bounds of "
                "the environment, such as --offline.read.action_bounds -2 2, or train "
                f"only the world model with --{setting} False."
            )


def check_same_spaces(run: str, dataset: OfflineEpisodes) -> None:
    """Raise unless a dataset has the observations and actions of a run."""
    path, data = find_checkpoint(Path(run)), dataset.training.origin
    if images := saved_image_crop(path):
        check_obs_space(images, dataset.images.input_space, data)
    for folder in list(path.parents)[:2]:
        if (folder / "spaces.json").is_file():
            act_space = read_spaces(folder).act_space
            check_same_actions(run, act_space, data, dataset.act_space)
            check_same_units(run, act_space, data, dataset.act_space)


def is_same_data(data: str | tuple[str, ...], other: str | tuple[str, ...]) -> bool:
    """True if two values of `offline.data` name the same recorded episodes."""

    def resolved(path: str) -> str:
        # dataset ids such as `minari:NAME` are not paths
        return path if ":" in path else str(Path(path).expanduser().resolve())

    return {*map(resolved, as_paths(data))} == {*map(resolved, as_paths(other))}
