"""What a sweep is to do, from a YAML file and the command line.

    command: bc
    metric: report/loss
    goal: min
    trials: 20
    settings:                 # the same for every run
      offline.data: reach
      configs: [bc_tiny]
    ranges:                   # what is searched, see `ranges.py`
      bc.opt.lr: {low: 1e-5, high: 1e-3, log: true}

A plan is checked before anything is started: every setting must exist, and take the
ends of its range and all of its choices.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from reverie import config as configs
from reverie.api import UserError
from reverie.run.config import Config
from reverie.sweep.objective import Take
from reverie.sweep.ranges import Range, as_words, parse_range

Resolve = Callable[[str, list[str]], Config]
"""The config of a command with these words after it."""

USUAL_TRIALS = 20
OWN_FOLDER = "logdir"
EVALUATION = ("episodes", "videos", "failures")
"""What `reverie eval` has besides the settings of runs."""


@dataclass(frozen=True)
class SweepConfig:
    command: str = "train"
    """What a trial runs: any command that trains into a run folder."""
    metric: str = ""
    """What a run is judged by: a name from its metrics, scores or evaluation."""
    goal: Literal["", "min", "max"] = ""
    take: Take = "last"
    """Of the values of the metric the last, the best, or the mean of the last ones."""
    last: int = 10
    """How many the mean is of."""
    sampler: Literal["bayes", "random", "grid"] = "bayes"
    trials: int = 0
    """How many in all; by itself 20, or as many as a grid has points."""
    seeds: int = 1
    """Runs per trial, with seeds one apart; their mean counts."""
    jobs: int = 1
    """Runs at a time."""
    prune: bool = False
    """End trials early that are worse than the median of others was at that step."""
    eval: str | None = None
    """Evaluate every run in the end, with these flags of `reverie eval`."""
    wandb: bool = False
    """Send the runs, and the sweep itself, to Weights & Biases."""
    logdir: str = "~/logdir/{timestamp}"

    def __post_init__(self) -> None:
        for name, least in {"last": 1, "trials": 0, "seeds": 1, "jobs": 1}.items():
            value = getattr(self, name)
            if value < least:
                raise UserError(
                    f"A sweep cannot have {value} as its {name}.\n"
                    f"  Fix: --{name} {max(least, 1)}"
                )


@dataclass(frozen=True)
class Plan:
    """A sweep that can be carried out."""

    config: SweepConfig
    ranges: dict[str, Range]
    settings: dict[str, list[str]]
    seed: int = 0
    """That of the first run of every trial."""

    def words(self, point: Mapping[str, Any]) -> list[str]:
        """The command line of a trial, after its command."""
        found = command_words(self.settings)
        for name, value in point.items():
            found += [f"--{name}", *self.ranges[name].words(value)]
        return found

    def dump(self) -> str:
        """A file that says the same."""
        data = asdict(self.config)
        data["settings"] = self.settings
        data["ranges"] = {name: r.plain() for name, r in self.ranges.items()}
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def make_plan(
    path: Path, command: str | None, words: Sequence[str], resolve: Resolve
) -> Plan:
    """The plan of a file, with what the command line says laid over it."""
    data = read_file(path)
    ranges = _mapping(path, data, "ranges")
    settings = {k: as_words(v) for k, v in _flat(_mapping(path, data, "settings"))}
    own = {field.name for field in fields(SweepConfig)}
    mine = []
    for name, value in configs.parse_flags(words):
        if name.replace("-", "_") in own:
            mine.append((name, value))
        else:
            _add(settings, name, ["True"] if value is None else as_words(value))
    for key in data:
        if key not in own:
            raise _unknown_key(path, key, [*own, "settings", "ranges"])
    if command:
        mine.append(("command", command))
    layer = configs.flag_layer(SweepConfig, mine, SweepConfig())
    config = configs.resolve(SweepConfig, [(str(path), data), ("the flags", layer)])
    if not config.metric or not config.goal:
        missing = "goal" if config.metric else "metric"
        example = "goal: min, or max" if config.metric else "metric: report/loss"
        raise UserError(f"{path} names no {missing}.\n  Fix: add `{example}`.")
    resolve(config.command, [])  # whether there is such a command
    _check_evaluation(path, config.eval)
    if not ranges:
        raise UserError(
            f"{path} has no ranges, so there is nothing to search.\n"
            "  Fix: ranges: {NAME: {low: 1, high: 10}}, or a list of choices for NAME"
        )
    found = {name: _range(path, name, ranges[name]) for name in ranges}
    _refuse_clashes(path, found, settings, config)
    for name in settings:
        _known(path, name, [*own, *configs.setting_names(Config)])
    plan = Plan(config, found, settings)
    base = resolve(config.command, plan.words({}))
    for name, choices in found.items():
        for value in choices.probes():
            resolve(config.command, plan.words({name: value}))
    if config.sampler == "grid":
        for name, choices in found.items():
            choices.grid(name)
    return Plan(config, found, settings, base.seed)


def read_file(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.expanduser().read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"The sweep {path} cannot be read: {reason}.\n"
            "  Fix: reverie sweep FILE, the path of a YAML file"
        ) from None
    except yaml.YAMLError as error:
        raise UserError(
            f"The sweep {path} is not valid YAML: {' '.join(str(error).split())}\n"
            "  Fix: mend the line it names."
        ) from None
    if not isinstance(data, dict):
        raise UserError(
            f"The sweep {path} holds no names with values.\n"
            "  Fix: give it a metric, a goal and ranges."
        )
    return {str(key): value for key, value in data.items()}


def command_words(settings: Mapping[str, list[str]]) -> list[str]:
    return [w for name, words in settings.items() for w in (f"--{name}", *words)]


def _check_evaluation(path: Path, flags: str | None) -> None:
    """Raise unless evaluations take these flags: they come when all is trained."""
    try:
        found = configs.parse_flags(shlex.split(flags or ""))
    except ValueError as error:  # a quote that does not end
        raise UserError(
            f"The flags for `eval` in {path} are not whole: {error}.\n"
            "  Fix: eval: --task TASK --episodes 50"
        ) from None
    for name, _ in found:
        _known(path, name, [*EVALUATION, *configs.setting_names(Config)])


def _mapping(path: Path, data: dict[str, Any], key: str) -> dict[str, Any]:
    found = data.pop(key, None)
    found = {} if found is None else found
    if not isinstance(found, dict):
        raise UserError(
            f"The {key} of {path} are a {type(found).__name__}, not names with values."
            f"\n  Fix: write one `name: value` a line below `{key}:`."
        )
    return {str(name): value for name, value in found.items()}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def _add(settings: dict[str, list[str]], name: str, words: list[str]) -> None:
    """Lay a flag over settings; blocks, files and appended values add up."""
    adds = name in ("configs", "config") or name.endswith("+")
    before = settings.get(name, []) if adds else []
    settings[name] = [*before, *words]


def _range(path: Path, name: str, data: Any) -> Range:
    kind = str if name == "configs" else _kind(path, name)
    return parse_range(name, data, kind)


def _kind(path: Path, name: str) -> Any:
    """The type of a setting; of a pattern, that of the first one it matches."""
    known = configs.setting_names(Config)
    return configs.setting_type(Config, _known(path, name, known) or known[0])


def _known(path: Path, name: str, known: list[str]) -> str | None:
    """The setting that is meant by a name, if there is one; else raise."""
    if name.rstrip("+") in ("configs", "config"):
        return None
    plain = name.rstrip("+")
    for candidate in (plain, plain.replace("-", "_")):
        if candidate in known:
            return candidate
    try:
        matches = [key for key in known if re.fullmatch(plain, key)]
    except re.error:
        matches = []
    if not matches:
        raise UserError(
            f"There is no setting {name!r} ({path}).{configs.suggest(plain, known)}\n"
            "  Fix: `reverie config` lists them all."
        )
    return matches[0]


def _unknown_key(path: Path, key: str, known: list[str]) -> UserError:
    if key.replace("-", "_") in configs.setting_names(Config) or "." in key:
        return UserError(
            f"{key!r} in {path} is a setting of runs.\n"
            "  Fix: put it below `settings:`, or below `ranges:`."
        )
    return UserError(
        f"A sweep has no {key!r} ({path}).{configs.suggest(key, known)}\n"
        f"  Fix: choose from {', '.join(sorted(known))}."
    )


def _refuse_clashes(
    path: Path,
    ranges: Mapping[str, Range],
    settings: Mapping[str, list[str]],
    config: SweepConfig,
) -> None:
    for name in (*ranges, *settings):
        if name.replace("-", "_") == OWN_FOLDER:
            raise UserError(
                f"{path} sets logdir, but runs get folders inside that of the sweep.\n"
                "  Fix: give the sweep itself a --logdir."
            )
    fixed = {name.replace("-", "_") for name in settings} - {"configs"}
    both = [name for name in ranges if name.replace("-", "_") in fixed]
    if both:
        raise UserError(
            f"{both[0]} has both a range and a fixed value.\n"
            f"  Fix: take it out of the ranges of {path}, or leave out --{both[0]}."
        )
    if "seed" in ranges and config.seeds > 1:
        raise UserError(
            f"{path} has a range of seeds and {config.seeds} seeds for every trial.\n"
            "  Fix: leave out one of them."
        )
