"""The specification of a sweep, from a YAML file and the command line.

    command: bc
    metric: report/loss
    goal: min
    trials: 20
    settings:                 # the same in all runs
      offline.data: reach
      configs: [bc_tiny]
    ranges:                   # the search space, see `search_space.py`
      bc.opt.lr: {low: 1e-5, high: 1e-3, log: true}

A specification is checked before the first run: all settings must exist, and both ends
of their ranges or all of their choices must be valid.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from reverie import config as configs
from reverie.api import UserError
from reverie.run.config import Config
from reverie.run.spec_file import (
    ResolveCommand,
    add_settings,
    pop_mapping,
    to_arguments,
    unknown_key,
)
from reverie.sweep.objective import Summary
from reverie.sweep.search_space import Range, parse_range

DEFAULT_TRIALS = 20
MAX_RUNS = 10_000
"""Maximum number of trials, of seeds per trial, and of runs at the same time."""
EVAL_OPTIONS = ("episodes", "videos", "failures")
"""Options of `reverie eval` that are not settings of a run."""


@dataclass(frozen=True)
class SweepConfig:
    """Options of `reverie sweep`."""

    command: str = "train"
    """Command of every trial: train, train_eval, offline or bc."""
    metric: str = ""
    """Objective: a name from the metrics, scores or evaluation results of a run."""
    goal: Literal["", "min", "max"] = ""
    """Minimize or maximize the metric."""
    summary: Summary = "last"
    """Value of the metric that counts: the last, the best, or the mean of the last
    `mean_over` values."""
    mean_over: int = 10
    """Number of values that the summary `mean` averages."""
    sampler: Literal["bayes", "random", "grid"] = "bayes"
    """How hyperparameters are proposed: Optuna's TPE, random search, or grid search."""
    trials: int = 0
    """Number of trials; 0 for 20, or for all points of a grid."""
    seeds: int = 1
    """Runs per trial with consecutive seeds; the objective is their mean."""
    jobs: int = 1
    """Number of runs at the same time."""
    prune: bool = False
    """Stop trials that are worse than the median of others at the same step."""
    eval: str | None = None
    """Flags of `reverie eval`; if set, every run is evaluated after training."""
    wandb: bool = False
    """Log the runs and the sweep to Weights & Biases."""
    logdir: str = "~/logdir/{timestamp}"
    """Folder of the sweep. A sweep in an existing folder is continued."""

    def __post_init__(self) -> None:
        configs.check_minimum(self, mean_over=1, trials=0, seeds=1, jobs=1)
        for name in ("trials", "seeds", "jobs"):
            if getattr(self, name) > MAX_RUNS:
                raise configs.ConfigError(
                    f"{name} must be at most {MAX_RUNS:,}, not {getattr(self, name)}.\n"
                    f"  Fix: --{name} {MAX_RUNS}"
                )


@dataclass(frozen=True)
class SweepSpec:
    """A checked sweep: options, search space, and settings that all runs share."""

    config: SweepConfig
    ranges: dict[str, Range]
    settings: dict[str, list[str]]
    """Settings of all runs, as command-line arguments by name."""
    seed: int = 0
    """Seed of the first run of every trial."""

    def arguments(self, params: Mapping[str, Any]) -> list[str]:
        """Return the arguments of the command for a trial with these parameters."""
        items = self.settings.items()
        words = [word for name, value in items for word in (f"--{name}", *value)]
        for name, value in params.items():
            words += [f"--{name}", *self.ranges[name].to_arguments(value)]
        return words

    def to_yaml(self) -> str:
        data = asdict(self.config)
        data["settings"] = self.settings
        data["ranges"] = {name: r.to_yaml() for name, r in self.ranges.items()}
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def load_spec(
    path: Path, command: str | None, words: Sequence[str], resolve: ResolveCommand
) -> SweepSpec:
    """Read and check a sweep file; `command` and the flags in `words` override it."""
    data = configs.read_config_file(path)
    ranges = pop_mapping(path, data, "ranges")
    fixed = configs.flatten(pop_mapping(path, data, "settings"))
    settings = {name: to_arguments(value) for name, value in fixed.items()}
    options = {field.name for field in fields(SweepConfig)}
    flags = add_settings(settings, configs.parse_flags(words), options)
    for key in data:
        if key not in options:
            keys = [*options, "settings", "ranges"]
            raise unknown_key(path, key, keys, "sweep", "`settings:` or `ranges:`")
    if command:
        flags.append(("command", command))
    layer = configs.flag_layer(SweepConfig, flags, SweepConfig())
    config = configs.resolve(SweepConfig, [(str(path), data), ("the flags", layer)])
    if not config.metric or not config.goal:
        missing = "goal" if config.metric else "metric"
        example = "goal: min" if config.metric else "metric: report/loss"
        raise UserError(f"{path} has no {missing}.\n  Fix: add `{example}`.")
    resolve(config.command, [])  # raises an error if the command does not exist
    _check_eval_flags(path, config.eval)
    if not ranges:
        raise UserError(
            f"{path} has no ranges, so there is nothing to search.\n"
            "  Fix: ranges: {NAME: {low: 1, high: 10}}, or a list of choices for NAME"
        )
    known = configs.settings_of(Config)
    space: dict[str, Range] = {}
    for name, value in ranges.items():
        setting = _find_setting(path, name, known)
        # `configs` and `config` are no settings of `Config`
        type_ = known[setting].type if setting in known else str
        space[name] = parse_range(name, value, type_)
    _check_conflicts(path, space, settings, config)
    for name in settings:
        _find_setting(path, name, [*options, *known])
    spec = SweepSpec(config, space, settings)
    base = resolve(config.command, spec.arguments({}))
    # If no setting gives a network size, `base.size` is the size preset that `resolve`
    # has chosen. It becomes a setting, so that all trials have the same size.
    if base.size:
        settings["configs"] = [base.size, *settings.get("configs", [])]
    points = 1
    for name, range_ in space.items():
        for value in range_.validation_values():
            resolve(config.command, spec.arguments({name: value}))
        if config.sampler == "grid":
            points *= len(range_.grid(name))
    if points > MAX_RUNS and not config.trials:
        raise UserError(
            f"The grid has {points:,} points, and a sweep has at most {MAX_RUNS:,} "
            "trials.\n  Fix: --trials 100, or fewer values in the ranges."
        )
    return SweepSpec(config, space, settings, base.seed)


def _check_eval_flags(path: Path, text: str | None) -> None:
    """Raise an error if `reverie eval` would not accept these flags."""
    try:
        flags = configs.parse_flags(shlex.split(text or ""))
    except ValueError as error:  # a quote that is not closed
        raise UserError(
            f"Cannot parse the flags in `eval` of {path}: {error}.\n"
            "  Fix: eval: --task TASK --episodes 50"
        ) from None
    for name, _ in flags:
        _find_setting(path, name, [*EVAL_OPTIONS, *configs.settings_of(Config)])


def _find_setting(path: Path, name: str, names: Collection[str]) -> str:
    """Return the setting `name`, or the first one that matches it as a pattern.

    Raise if there is none. A `+` at the end, which appends to a list, is ignored.
    """
    plain = name.rstrip("+")
    if plain in ("configs", "config"):
        return plain
    return configs.matching_names(plain, names, str(path))[0]


def _check_conflicts(
    path: Path,
    ranges: Mapping[str, Range],
    settings: Mapping[str, list[str]],
    config: SweepConfig,
) -> None:
    """Raise if settings, ranges and options contradict each other."""
    if "logdir" in (*ranges, *settings):
        raise UserError(
            f"{path} sets logdir, but runs are stored in the folder of the sweep.\n"
            "  Fix: give the sweep a --logdir."
        )
    fixed = {name.replace("-", "_") for name in settings} - {"configs"}
    both = [name for name in ranges if name.replace("-", "_") in fixed]
    if both:
        raise UserError(
            f"{both[0]} has both a range and a fixed value.\n"
            f"  Fix: remove it from the ranges of {path}, or remove --{both[0]}."
        )
    if "seed" in ranges and config.seeds > 1:
        raise UserError(
            f"{path} has a range of seeds and {config.seeds} seeds per trial.\n"
            "  Fix: remove one of them."
        )
