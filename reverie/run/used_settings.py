"""Refuses flags and presets that have no effect in a run.

Which settings a run uses depends on its command, its agent (`AgentConfig.unused`), and
the suite of its task. Only flags and the arguments of `reverie.train` are checked one
by one; presets and files may contain settings that a run does not use. A preset is
refused if the run uses none of its settings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from reverie import config as configs
from reverie.api import UserError
from reverie.capabilities import AgentConfig, UnusedSetting
from reverie.config import ConfigError, UnknownSetting
from reverie.datasets.sequences import find_sequence_class, is_sequence_task
from reverie.datasets.sequences.episodes import EpisodeSequences
from reverie.distributed.launch import find_launch
from reverie.envs import SUITES, split_task
from reverie.plugins import settings_name
from reverie.run.config import Config, resolve, with_flags
from reverie.run.device import pick_overlap
from reverie.run.imported import importing_agent
from reverie.run.presets import expand_presets
from reverie.run.size import uses_cuda

# COLLECTS, NO_ENVS and NO_TRAINING are reasons (text), TRAINING_SETTINGS has names of
# settings, and all others are tuples of `UnusedSetting`.
from reverie.run.unused_by_command import (
    ACTORS,
    BENCH,
    COLLECTS,
    EVALUATION,
    IN_ENVIRONMENT,
    NO_ENVS,
    NO_TRAINING,
    OFFLINE,
    ONLINE,
    TRAINING_SETTINGS,
    WITHOUT_ENV,
    WITHOUT_EVALUATION,
    WITHOUT_RECORDINGS,
)

Flags = Sequence[tuple[str, Any]] | Mapping[str, Any]
"""Settings by dotted name, as pairs or as a mapping."""

OFFLINE_COMMANDS = ("offline", "bc")
"""Commands that train on recorded episodes."""


def resolve_for_command(
    command: str,
    presets: Sequence[str] = (),
    files: Sequence[str | Path] = (),
    flags: Flags = (),
    saved: Config | None = None,
    check: bool = True,
) -> Config:
    """Return the config of a command; with `check`, refuse unused flags and presets.

    `saved` is the config of the run to resume. For an unknown name, only settings that
    the command uses are suggested.
    """
    pairs = list(flags.items()) if isinstance(flags, Mapping) else list(flags)
    try:
        config = resolve(presets, files, pairs, saved)
    except UnknownSetting as error:
        valid = _config_of_known_names(presets, files, pairs)
        # An unknown name may be in a group that the command does not use, such as
        # `replay.` in `reverie offline`. Then no similar name is suggested.
        is_unused = find_unused(error.name, unused_settings(valid, command)) is not None
        options = [] if is_unused else used_names(valid, command)
        raise UnknownSetting(error.name, error.origin, options) from None
    if check:
        check_flags_used(config, command, flags)
        _check_presets_used(config, command, presets)
    return config


def unused_in_environment(config: Config) -> list[UnusedSetting]:
    """Return the settings that an evaluation in an environment does not use.

    If an imported checkpoint standardizes images with dataset statistics,
    `offline.stats` is used.
    """
    agent = settings_name(config.agent)
    training = [UnusedSetting(f"{agent}.{x}", NO_TRAINING) for x in TRAINING_SETTINGS]
    standard = configs.flatten(config.agent_config).get("enc.standard")
    if standard != "dataset" or not config.run.from_checkpoint:
        return [*IN_ENVIRONMENT, *training]
    # the first entry is the group `offline.`: list its settings without `offline.stats`
    offline, *others = IN_ENVIRONMENT
    names = (name for name in settings_of(config) if name.startswith(offline.name))
    named = [offline._replace(name=x) for x in names if x != "offline.stats"]
    return [*named, *others, *training]


def with_used_flags(
    config: Config,
    command: str,
    flags: Sequence[tuple[str, Any]],
    more_unused: Sequence[UnusedSetting] = (),
    options: Collection[str] = (),
) -> Config:
    """Return a saved config with some settings changed; refuse unused flags.

    `more_unused` are settings that this use of the command does not use, in addition to
    those of `unused_settings`. For an unknown name, only `options` and settings that
    the command uses are suggested. For `reverie eval`, settings of the agent are not
    suggested, because most of them are about training.
    """
    try:
        changed = with_flags(config, flags)
    except UnknownSetting as error:
        names = used_names(config, command)
        if command == "eval":
            agent = f"{settings_name(config.agent)}."
            names = [name for name in names if not name.startswith(agent)]
        names = [*options, *(n for n in names if not find_unused(n, more_unused))]
        raise UnknownSetting(error.name, error.origin, names) from None
    check_flags_used(changed, command, flags, more_unused)
    return changed


def check_flags_used(
    config: Config,
    command: str,
    flags: Flags,
    more_unused: Sequence[UnusedSetting] = (),
) -> None:
    """Raise if a flag has no effect in a run of a command with this config."""
    check_exploration(config)
    pairs = flags.items() if isinstance(flags, Mapping) else flags
    names = list(settings_of(config))
    unused = [*more_unused, *unused_settings(config, command)]
    for flag, value in pairs:
        matches = configs.matching_names(flag.rstrip("+"), names, f"the flag --{flag}")
        found = [find_unused(name, unused) for name in matches]
        if all(found):
            assert found[0] is not None
            words = value if isinstance(value, list | tuple) else [value]
            text = " ".join(str(word) for word in words if word is not None)
            instead = _used_instead(found[0], unused).replace("{value}", text)
            fix = instead or f"remove --{flag}."
            raise ConfigError(
                f"--{flag} has no effect in this run: {found[0].reason}.\n  Fix: {fix}"
            )


def _check_presets_used(config: Config, command: str, presets: Sequence[str]) -> None:
    """Raise if no setting of a preset has an effect in a run with this config."""
    unused = unused_settings(config, command)
    schema = cast(Any, type(config))
    for preset in presets:
        layers = expand_presets([preset], config.agent)
        reasons = [
            (name, setting.reason if setting else "")
            for name in sorted(configs.names_in(schema, layers))
            for setting in [find_unused(name, unused)]
        ]
        if reasons and all(reason for _, reason in reasons):
            name, reason = reasons[0]
            raise ConfigError(
                f"The preset {preset!r} has no effect in this run, which uses none of "
                f"its settings. For example, {name} is not used: {reason}.\n"
                f"  Fix: remove {preset} from --configs."
            )


def _used_instead(setting: UnusedSetting, unused: Sequence[UnusedSetting]) -> str:
    """Return what to type instead of a setting.

    If that is a flag that is unused, too, return what to type instead of that flag.
    """
    instead = setting.instead
    while (name := re.match(r"(?:add )?--([\w.]+)", instead)) is not None:
        replacement = find_unused(name[1], unused)
        if replacement is None:
            break
        instead = replacement.instead
    return instead


def check_exploration(config: Config) -> None:
    """Raise if the agent does not have or does not train the exploration policy."""
    policy, settings = config.explore.policy, config.agent_config
    if policy not in ("none", *settings.explore_policies):
        others = " or ".join(["none", *settings.explore_policies])
        raise UserError(
            f"The agent {config.agent!r} has no exploration policy {policy!r}.\n"
            f"  Fix: --explore.policy {others}"
        )
    if policy == "plan2explore" and not settings.trains_policy:
        name = f"{settings_name(config.agent)}.{settings.policy_setting}"
        raise UserError(
            "Plan2Explore trains an exploration policy and the task policy, but "
            f"{name} is False: only the world model is trained.\n"
            f"  Fix: --{name} True, or --explore.policy none"
        )


def used_names(config: Config, command: str) -> list[str]:
    """Return the names of the settings that a run of a command uses."""
    unused = {entry.name for entry in unused_settings(config, command)}
    groups = tuple(name for name in unused if name[-1] == ".")
    names = settings_of(config)
    return [x for x in names if x not in unused and not x.startswith(groups)]


def unused_settings(config: Config, command: str) -> list[UnusedSetting]:
    """Return the settings that have no effect in a run, most specific first."""
    if command in ("eval", "bench"):
        unused = [
            *(EVALUATION if command == "eval" else BENCH),
            *_settings_of_other_agents(config),
            *_unused_with_one_process(config),
        ]
        is_env = config.task != "recordings" and not is_sequence_task(config.task)
        return [*unused, *(_settings_of_other_suites(config) if is_env else ())]
    unused = [*config.agent_config.unused, *_settings_of_other_agents(config)]
    unused += _unused_with_one_process(config)
    on_sequences = config.agent_config.sequence_window is not None
    if on_sequences or command in OFFLINE_COMMANDS:
        unused += [*OFFLINE, *_priority_settings(config, NO_ENVS)]
        is_env = config.task != "recordings" and not is_sequence_task(config.task)
        if not is_env:
            unused += WITHOUT_ENV
        if on_sequences:
            unused += _unused_on_sequences(config)
        if is_sequence_task(config.task):
            unused += WITHOUT_RECORDINGS
        elif not on_sequences:
            unused.append(UnusedSetting("sequences.", "it trains on episodes"))
        unused += _unused_epoch_settings(config)
        # in offline training, an epoch is one pass over the data (`offline.epochs`)
        if not config.agent_config.rows_per_update:
            reason = f"training of the agent {config.agent!r} is not counted in epochs"
            steps = "--run.steps sets the number of updates."
            unused.append(UnusedSetting("offline.epochs", reason, steps))
            every = "--run.report_every sets the interval of evaluations."
            unused.append(UnusedSetting("offline.report_epochs", reason, every))
    else:
        unused += [*ONLINE, *_unused_online(config), *_unused_sampling(config)]
        unused += _unused_with_or_without_actors(config)
        unused += _unused_without_env_workers(config)
        is_env = True
        # in online training, an epoch collects data and then trains on it
        # (`AgentConfig.epochs`)
        if not config.agent_config.epochs:
            reason = f"the agent {config.agent!r} is not trained in epochs"
            fix = "--run.keep_every {value}"
            unused.append(UnusedSetting("run.keep_epochs", reason, fix))
        if command == "train":
            unused += WITHOUT_EVALUATION
    if is_env:
        unused += _settings_of_other_suites(config)
        if not any(config.env.resize):
            reason = "images are not resized"
            fix = "add --env.resize 64 64, or remove --env.resample."
            unused.append(UnusedSetting("env.resample", reason, fix))
    unused += _unused_exploration(config, command)
    if config.run.from_checkpoint:
        reason = "the run starts from a checkpoint"
        unused.append(UnusedSetting("run.pretrain", reason))
    else:
        reason = "no initial weights are loaded"
        fix = "add --run.from_checkpoint PATH."
        unused.append(UnusedSetting("run.from_components", reason, fix))
    return unused


def _unused_epoch_settings(config: Config) -> Iterator[UnusedSetting]:
    """Yield the settings of the agent's epochs, which offline training does not use.

    In online training, each of these epochs collects data and then trains on it
    (`AgentConfig.epochs`). They are not the epochs of `offline.epochs`.
    """
    if not config.agent_config.epochs:
        return
    group = f"{settings_name(config.agent)}."
    suffixes = ("steps", "first_steps", "start_after")
    fix = "--run.steps sets the number of updates."
    yield UnusedSetting(f"{group}schedule.", NO_ENVS, fix)
    for name in settings_of(config):
        if name.startswith(f"{group}training.") and name.endswith(suffixes):
            yield UnusedSetting(name, NO_ENVS, fix)


def _unused_with_one_process(config: Config) -> Iterator[UnusedSetting]:
    """Yield the settings that have no effect in a run of one process."""
    if max(config.processes, find_launch().world_size) == 1:
        for name in ("run.rank_timeout", "replay.ranks"):
            yield UnusedSetting(name, "one process trains", "add --devices 2")


def _unused_with_or_without_actors(config: Config) -> Iterator[UnusedSetting]:
    """Yield the settings that have no effect with actors, or without them."""
    if config.actors.count:
        yield from ACTORS
        return
    for name in settings_of(config):
        if name.startswith("actors.") and name != "actors.count":
            yield UnusedSetting(name, "it has no actors", "add --actors.count 8.")


def _unused_without_env_workers(config: Config) -> Iterator[UnusedSetting]:
    """Yield the timeouts of worker processes if environments are not stepped in them.

    `env.vector.workers` 0 means worker processes in runs that overlap acting with
    training (`parts.open_envs`), but not in actors.
    """
    if config.env.vector.workers or config.env.vector.native:
        return
    uses_gpu = bool(config.run.train_devices) or uses_cuda(config.device)
    device = torch.device("cuda" if uses_gpu else "cpu")
    overlap = pick_overlap(config.run.overlap, device, config.deterministic)
    if config.actors.count or not overlap:
        reason = "environments are not stepped in worker processes"
        for name in ("timeout", "start_timeout"):
            fix = "add --env.vector.workers 1"
            yield UnusedSetting(f"env.vector.{name}", reason, fix)


def _unused_online(config: Config) -> Iterator[UnusedSetting]:
    """Yield the settings of offline training that online training does not use."""
    for name in settings_of(config):
        if name.startswith("offline.") and not name.startswith("offline.read."):
            yield UnusedSetting(name, COLLECTS)
    if not config.run.episodes:
        reason, fix = "it reads no recorded episodes", "add --run.episodes PATH."
        yield UnusedSetting("offline.read.", reason, fix)


def _unused_sampling(config: Config) -> Iterator[UnusedSetting]:
    """Yield the settings of replay sampling strategies that are not used."""
    fracs = config.replay.fracs
    if not fracs.priority:
        reason = "replay.fracs.priority is 0"
        fix = "add --configs curious_replay, or set replay.fracs.priority."
        yield UnusedSetting("replay.prio.", reason, fix)
        yield from _priority_settings(config, reason, fix)
    if not config.replay.prio.visit_scale:
        reason = "replay.prio.visit_scale is 0"
        fix = "add --replay.prio.visit_scale 1e4"
        yield UnusedSetting("replay.prio.visit_decay", reason, fix)
    if not fracs.recency:
        reason = "replay.fracs.recency is 0"
        yield UnusedSetting("replay.recexp", reason, "set replay.fracs.recency.")


def _priority_settings(
    config: Config, reason: str, fix: str = ""
) -> Iterator[UnusedSetting]:
    """Yield the setting that selects the loss of replay priorities, if there is one."""
    name = f"{settings_name(config.agent)}.priosignal"
    if name in settings_of(config):
        yield UnusedSetting(name, reason, fix)


def _unused_exploration(config: Config, command: str) -> list[UnusedSetting]:
    """Return the settings of exploration that have no effect."""
    policy, is_online = config.explore.policy, command not in OFFLINE_COMMANDS
    settings = config.agent_config
    unused = [] if is_online else [UnusedSetting("explore.until", NO_ENVS)]
    if policy == "random" and not is_online:
        unused.append(UnusedSetting("explore.", NO_ENVS))
    used = {"none": [], "random": ["until"]}.get(policy)
    reason, fix = f"the exploration policy is {policy!r}", ""
    if used is None:
        used = ["until", *settings.explore_settings]
        reason = f"Plan2Explore of the agent {config.agent!r} does not use it"
    elif "plan2explore" in settings.explore_policies:
        fix = "add --explore.policy plan2explore."
    return unused + [
        UnusedSetting(name, reason, fix)
        for name in settings_of(config)
        if name.startswith("explore.")
        and not any(_is_in(name, f"explore.{x}") for x in ("policy", *used))
    ]


def settings_of(config: Config) -> dict[str, configs.Setting]:
    """Return all settings by name, including those of plug-ins."""
    return configs.settings_of(cast(Any, type(config)))


def find_unused(name: str, unused: Sequence[UnusedSetting]) -> UnusedSetting | None:
    """Return the first entry for a setting or its group."""
    return next((entry for entry in unused if _is_in(name, entry.name)), None)


def _is_in(name: str, group: str) -> bool:
    """True if a setting has this name, or belongs to this group `name.`."""
    return name == group or (group[-1] == "." and name.startswith(group))


@functools.lru_cache(maxsize=512)
def _names_in(schema: Any, prefix: str) -> list[str]:
    """Return the settings of a config class whose names have a prefix."""
    return [name for name in configs.settings_of(schema) if name.startswith(prefix)]


def _settings_of_other_agents(config: Config) -> Iterator[UnusedSetting]:
    """Yield the settings of other agents.

    If this agent has a setting of the same name, it is suggested instead. If this agent
    uses the world model of an imported checkpoint, the settings of that world model are
    not yielded, because the run uses them.
    """
    own, settings = settings_name(config.agent), config.agent_config
    names, schema = settings_of(config), cast(Any, type(config))
    # `base_run` is the run or checkpoint whose world model this agent uses, if any.
    # `base` is the agent that can load it, if another implementation saved it; it is
    # empty for a run of Reverie.
    path = settings.base_run if settings.uses_base_world else ""
    base = importing_agent(path, schema)
    for field in dataclasses.fields(config):
        group, prefix = field.name, f"{field.name}."
        if group == own or not isinstance(getattr(config, group), AgentConfig):
            continue
        reason = f"it is a setting of the agent {group!r}, not of {config.agent!r}"
        for name in _names_in(schema, prefix):
            own_name = name.removeprefix(prefix)
            is_used = group == base and not own_name.startswith(TRAINING_SETTINGS)
            if f"{own}.{own_name}" in names and not is_used:
                yield UnusedSetting(name, reason, f"--{own}.{own_name} {{value}}")
        if group != base:
            yield UnusedSetting(prefix, reason)


def _settings_of_other_suites(config: Config) -> Iterator[UnusedSetting]:
    """Yield the settings of other suites.

    If the suite of the task has a setting of the same name, it is suggested instead.
    """
    if is_sequence_task(config.task):
        # The task has no suite. If the agent does not train on sequences, the function
        # `trains_on_sequences` (run/offline/datasets.py) raises an error that says so.
        return
    own_suite = SUITES.get(split_task(config.task)[0])
    own = (own_suite.config_name or own_suite.name) if own_suite else ""
    names = settings_of(config)
    for suite in SUITES.values():
        group = suite.config_name or suite.name
        if suite.config is None or group == own:
            continue
        reason = f"the task {config.task!r} is not in the suite {group!r}"
        prefix = f"env.{group}."
        for name in _names_in(cast(Any, type(config)), prefix):
            same = f"env.{own}.{name.rpartition('.')[2]}"
            if same in names:
                yield UnusedSetting(name, reason, f"--{same} {{value}}")
        yield UnusedSetting(prefix, reason)


def _unused_on_sequences(config: Config) -> Iterator[UnusedSetting]:
    """Yield the settings that the sequence dataset of a run does not use."""
    dataset_class: type = EpisodeSequences
    if is_sequence_task(config.task):
        dataset_class = find_sequence_class(config.task)
    else:
        reason = f"the agent {config.agent!r} trains on sequences"
        memory = "--sequences.memory {value}"
        yield UnusedSetting("offline.cache.memory", reason, memory)
        for name in ("cache.", "eval.", "images.", "stats"):
            yield UnusedSetting(f"offline.{name}", reason)
    unused = getattr(dataset_class, "unused_settings", None)
    for name, reason in (unused(config.sequences) if unused else {}).items():
        yield UnusedSetting(f"sequences.{name}", reason)


def _config_of_known_names(
    presets: Sequence[str], files: Sequence[str | Path], flags: list[tuple[str, Any]]
) -> Config:
    """Return the config without unknown flags and invalid files."""
    names = configs.settings_of(Config)
    known = [flag for flag in flags if flag[0].replace("-", "_") in names]
    for some_files in (files, ()):
        with contextlib.suppress(UserError):
            return resolve(presets, some_files, known)
    return Config()
