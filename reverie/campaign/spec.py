"""The specification of a campaign, from a YAML file and the command line.

    tasks: [atari100k, crafter_reward]   # tasks, or suites for all tasks of a benchmark
    seeds: 5                             # seeds 0 to 4, or a list of seeds
    configs: [size12m, size50m]          # one method per entry
    settings:                            # the same in all runs
      run.log_every: 30

All combinations of task, method and seed are runs. Their settings are checked before
the first run starts.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from reverie import config as configs
from reverie.api import UserError
from reverie.campaign import config_files
from reverie.campaign.queue import QueuedRun, RunStatus
from reverie.envs import action_repeat, benchmark_tasks, check_available
from reverie.run.config import Config
from reverie.run.folder import resolve_logdir
from reverie.run.ranks import check_processes
from reverie.run.spec_file import (
    ResolveCommand,
    add_settings,
    pop_mapping,
    to_arguments,
    unknown_key,
)

COMMAND = "train"
"""Command of `reverie` that executes a run."""
SPEC_FILE = "campaign.yaml"
"""File in the folder of a campaign."""
MAX_SEEDS = 10_000
PER_RUN_SETTINGS = {"task": "tasks", "seed": "seeds", "logdir": "logdir"}
"""Settings of `train` that differ between runs, and the options of the campaign that
are used instead of them."""

SAVED_OPTIONS = ("retries", "stale_seconds")
"""Options that are saved in the file, unless they have their default."""
MACHINE_OPTIONS = ("per_gpu", "mps", "workers", "slurm", "ray")
"""Options that are not saved, because they depend on the machine."""
CHECKSUMS = "config_sha256"
"""Key of the checksums of the config files."""
MIN_STALE_SECONDS = 20.0
"""Four times the time between two heartbeats (`worker.py`), which may be late."""
OPTION_SIMILARITY = 0.65
"""Minimum similarity (`difflib`, 0 to 1) for suggesting an option of the campaign."""

FILE_EXAMPLES = {"tasks": "tasks: [catch, memory]", "seeds": "seeds: 3"}
"""Lines of a YAML file, for error messages."""


@dataclass(frozen=True)
class CampaignConfig:
    """Options of `reverie campaign`."""

    tasks: tuple[str, ...] = ()
    """Tasks, or names of suites for all tasks of their benchmark (atari100k: 26
    games)."""
    seeds: str = "1"
    """Number of seeds (`5` for seeds 0 to 4), or a list (`3,5,8`; `3,` for seed 3)."""
    per_gpu: str = "auto"
    """Number of runs at the same time on each GPU; auto: chosen from the memory and
    utilization of the first run."""
    mps: bool = True
    """Use NVIDIA MPS, if it is installed, for several runs on a GPU, so that their
    kernels run at the same time."""
    workers: int = 0
    """Number of runs at the same time on a machine without GPUs; 0 means 1."""
    retries: int = 2
    """Maximum number of times that a failed run is restarted."""
    stale_seconds: float = 60.0
    """Time without a heartbeat after which a run of another machine is taken over; at
    least 20."""
    slurm: str = ""
    """Submit SLURM jobs as workers, with these options: jobs=4,partition=gpu,time=240.
    Needs submitit."""
    ray: str = ""
    """Start workers as tasks of a Ray cluster, with these options:
    address=auto,jobs=4,num_gpus=1,num_cpus=4. Needs Ray."""
    logdir: str = "~/logdir/{timestamp}"
    """Folder of the campaign. A campaign in an existing folder is resumed."""
    status: bool = False
    """Print the state of all runs and exit."""

    def __post_init__(self) -> None:
        configs.check_minimum(self, workers=0, retries=0)
        if not self.stale_seconds >= MIN_STALE_SECONDS:
            raise UserError(
                f"stale_seconds must be at least {MIN_STALE_SECONDS:g}, not "
                f"{self.stale_seconds:g}, because a late heartbeat would otherwise let "
                "other workers take over a healthy run.\n"
                f"  Fix: --stale-seconds {MIN_STALE_SECONDS:g}"
            )
        if self.slurm and self.ray:
            raise UserError(
                "--slurm and --ray cannot be used together.\n  Fix: remove one of them."
            )
        if self.per_gpu != "auto" and not re.fullmatch(r"[1-9]\d*", self.per_gpu):
            raise UserError(
                f"per_gpu cannot be {self.per_gpu!r}.\n  Fix: --per-gpu auto, or a "
                "number of runs such as --per-gpu 3"
            )


@dataclass(frozen=True)
class CampaignSpec:
    """A checked campaign: options, methods, settings and all runs."""

    config: CampaignConfig
    methods: tuple[tuple[str, ...], ...]
    """Presets of each method."""
    settings: dict[str, list[str]]
    """Settings of all runs, as command-line arguments by name."""
    size: str = ""
    """Size preset of methods without a size, chosen when the campaign was created."""
    runs: tuple[QueuedRun, ...] = ()
    processes: int = 1
    """Largest number of processes of any run (`--devices`)."""
    gpus_per_run: int = 1
    """Largest number of GPUs of any run, one per process; 1 if all runs use a CPU."""
    device: str = "auto"
    """The setting `device` of all runs; auto if they differ."""
    config_sha256: dict[str, str] = field(default_factory=dict)
    """Checksums of the config files, by path."""
    is_saved: bool = False
    """True if the file in the campaign folder defines the runs, without flags."""

    def to_yaml(self) -> str:
        """Return the YAML file of everything that defines the runs."""
        data: dict[str, Any] = {
            "tasks": list(self.config.tasks),
            "seeds": parse_seeds(self.config.seeds),
            "configs": [list(presets) for presets in self.methods],
            **non_default_options(self.config, SAVED_OPTIONS),
            "settings": self.settings,
        }
        if self.config_sha256:
            data[CHECKSUMS] = self.config_sha256
        if self.size:
            data["size"] = self.size
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)

    def with_folder(self, path: Path) -> CampaignSpec:
        return replace(self, config=replace(self.config, logdir=str(path)))


def load_spec(
    file: Path | None, arguments: Sequence[str], resolve: ResolveCommand
) -> CampaignSpec:
    """Read and check a campaign; command-line arguments override the file."""
    data = configs.read_config_file(file) if file else {}
    origin = str(file) if file else "the command line"
    settings = {
        name: to_arguments(value)
        for name, value in configs.flatten(
            pop_mapping(Path(origin), data, "settings")
        ).items()
    }
    in_file = set(settings)
    methods = _parse_methods(origin, data.pop("configs", None))
    saved_checksums = pop_mapping(Path(origin), data, CHECKSUMS)
    size = str(data.pop("size", "") or "")
    _convert_values(origin, data)
    options = {field.name for field in fields(CampaignConfig)}
    _check_keys(origin, data, options)
    parsed = configs.parse_flags(arguments)
    flags: list[tuple[str, Any]] = []
    new_methods = []
    for name, value in parsed:
        if name == "configs":  # each occurrence is a method
            new_methods.append(value)
        elif name == "seeds" and isinstance(value, list):
            flags.append((name, ",".join(value) + ","))
        elif name == "tasks" and value is not None:
            flags.append((name, _split_words(value)))
        else:  # an option of the campaign is returned, a setting is added to `settings`
            flags += add_settings(settings, [(name, value)], options)
    if "config" in settings:  # workers may run in other folders
        settings["config"] = config_files.absolute_paths(settings["config"])
    methods = _parse_methods("the flags", new_methods) or methods or ((),)
    layer = configs.flag_layer(CampaignConfig, flags, CampaignConfig())
    config = configs.resolve(CampaignConfig, [(origin, data), ("the flags", layer)])
    for name in settings:
        if name in PER_RUN_SETTINGS:
            source = origin if name in in_file else "the command line"
            raise UserError(
                f"{source} sets {name}, which differs between the runs of a campaign.\n"
                f"  Fix: --{PER_RUN_SETTINGS[name]}"
            )
    is_saved = is_file_of_campaign(file, config)
    if is_saved:
        config_files.check_unchanged(saved_checksums)
    spec = plan_runs(CampaignSpec(config, methods, settings, size), resolve)
    other_options = options - {"tasks", "seeds"}
    return replace(
        spec,
        config_sha256=config_files.checksums(settings.get("config", [])),
        is_saved=is_saved
        and all(name.replace("-", "_") in other_options for name, _ in parsed),
    )


def is_file_of_campaign(file: Path | None, config: CampaignConfig) -> bool:
    """True if this is the file in the folder of the campaign."""
    saved = resolve_logdir(config.logdir) / SPEC_FILE
    return file is not None and file.expanduser().resolve() == saved.resolve()


def read_saved_options(file: Path) -> CampaignConfig:
    """Return the options that are saved in the file of a campaign, and defaults."""
    data = configs.read_config_file(file)
    saved = {name: data[name] for name in SAVED_OPTIONS if name in data}
    return configs.resolve(CampaignConfig, [(str(file), saved)])


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums in the folder of a campaign; empty for a new one."""
    file = folder / SPEC_FILE
    data = configs.read_config_file(file) if file.exists() else {}
    return pop_mapping(file, data, CHECKSUMS)


def non_default_options(config: CampaignConfig, names: Sequence[str]) -> dict[str, Any]:
    """Return those of the named options that do not have their default."""
    default = CampaignConfig()
    values = {name: getattr(config, name) for name in names}
    return {name: x for name, x in values.items() if x != getattr(default, name)}


def plan_runs(spec: CampaignSpec, resolve: ResolveCommand) -> CampaignSpec:
    """Check the settings of every task with every method; add the list of all runs."""
    tasks = _expand_tasks(spec.config.tasks)
    seeds, size = parse_seeds(spec.config.seeds), spec.size
    runs: list[QueuedRun] = []
    processes, gpus_per_run, devices, uses_size = 1, 1, set(), False
    for task in tasks:
        check_available(task)
        for presets in spec.methods:
            label = "+".join(presets)
            arguments = _train_arguments(task, presets, spec.settings)
            try:
                config = resolve(COMMAND, arguments)
                # If no setting gives a network size, `config.size` is the size preset
                # that `resolve` has chosen. The first choice is saved, so that all
                # machines use the same size.
                if config.size:
                    size, uses_size = size or config.size, True
                    with_size = (size, *presets)
                    arguments = _train_arguments(task, with_size, spec.settings)
                    config = resolve(COMMAND, arguments)
                check_processes(config)
            except UserError as error:
                method = f" with {label}" if label else ""
                text = _suggest_option(error) or str(error)  # includes the fix
                message = f"Task {task}{method}: {text}"
                raise UserError(message) from None
            frames = _total_frames(task, config)
            processes = max(processes, config.processes)
            if config.device != "cpu":
                gpus_per_run = max(gpus_per_run, config.processes)
            devices.add(config.device)
            for seed in seeds:
                parts = [_file_name(task), _file_name(label), f"seed{seed}"]
                name = "-".join(filter(None, parts))
                command = [COMMAND, *arguments, "--seed", str(seed)]
                runs.append(QueuedRun(name, task, label, seed, command, frames))
    if size and not uses_size:
        raise UserError(
            f"size: {size} has no effect, because presets or settings set the network "
            "size.\n  Fix: remove it from the file of the campaign."
        )
    for name, count in Counter(run.name for run in runs).items():
        if count > 1:
            raise UserError(
                f"Two runs of the campaign would be named {name}.\n"
                "  Fix: give each task, seed and method once."
            )
    device = devices.pop() if len(devices) == 1 else "auto"
    return replace(
        spec,
        size=size,
        runs=tuple(runs),
        processes=processes,
        gpus_per_run=gpus_per_run,
        device=device,
    )


def parse_seeds(text: str) -> list[int]:
    """Return the seeds: `3` are 0, 1 and 2; `3,5` are 3 and 5; `3,` is 3."""
    words = [word for word in re.split(r"[,\s]+", text.strip()) if word]
    if not words or not all(re.fullmatch(r"\d{1,18}", word) for word in words):
        raise UserError(
            f"seeds cannot be {text!r}.\n"
            "  Fix: --seeds 5 for seeds 0 to 4, or --seeds 3,5,8"
        )
    numbers = [int(word) for word in words]
    is_list = len(numbers) > 1 or "," in text
    if max(len(numbers), 0 if is_list else numbers[0]) > MAX_SEEDS:
        raise UserError(
            f"seeds is {text[:40]}, but a campaign has at most {MAX_SEEDS:,} seeds.\n"
            "  Fix: --seeds 5 for seeds 0 to 4, or a list with a comma (--seeds 12345,)"
        )
    if is_list:
        return numbers
    if not numbers[0]:
        raise UserError("seeds is 0, so there are no runs.\n  Fix: --seeds 1")
    return list(range(numbers[0]))


def check_extends(
    folder: Path,
    runs: Sequence[QueuedRun],
    old: Sequence[RunStatus],
    is_saved: bool = False,
) -> None:
    """Raise unless the runs in a folder are part of the campaign.

    `runs` are those of the campaign; `old` has the status of each run in the folder.
    Tasks, seeds and methods can be added; settings of existing runs cannot change. With
    `is_saved`, a difference means that the file in the folder was edited.
    """
    new = {run.name: run for run in runs}
    for status in old:
        name, before = status.run.name, _shell_command(status.run)
        if name in new and new[name].command == status.run.command:
            continue
        if not is_saved:
            raise UserError(
                f"{folder} is the folder of another campaign: its run {name} is "
                f"`{before}`.\n  Fix: reverie campaign {shlex.quote(str(folder))} to "
                "resume it, or choose another --logdir."
            )
        after = f"now is `{_shell_command(new[name])}`" if name in new else "is missing"
        raise UserError(
            f"{folder / SPEC_FILE} differs from the runs that the campaign already "
            f"has: the run {name} was `{before}` and {after}.\n"
            "  Fix: undo the change of the file. To change settings, or to remove a "
            "task or seed, start another campaign with another --logdir."
        )


def _shell_command(run: QueuedRun) -> str:
    return shlex.join(["reverie", *run.command])


def _check_keys(origin: str, data: dict[str, Any], options: set[str]) -> None:
    """Raise if a YAML file has keys that are not options of the campaign."""
    for key in data:
        if key in ("task", "seed"):
            raise UserError(
                f"Unknown key {key!r} in {origin}.\n"
                f"  Fix: {FILE_EXAMPLES[PER_RUN_SETTINGS[key]]}"
            )
        if key == "status":
            raise UserError(
                f"status in {origin} has no effect.\n"
                "  Fix: remove it, and use reverie campaign FOLDER --status"
            )
        if key not in options:
            known = [*sorted(options - {"status"}), "configs", "settings"]
            raise unknown_key(origin, key, known, "campaign", "`settings:`")


def _suggest_option(error: UserError) -> str:
    """Return the message for an unknown flag that is similar to a campaign option.

    It is empty for other errors, and if the flag is the last part of a setting's name,
    because the error already suggests that setting.
    """
    if not isinstance(error, configs.UnknownSetting):
        return ""
    name = error.name[-100:].replace("-", "_")  # the time to compare is quadratic
    names = [*(field.name for field in fields(CampaignConfig)), "configs"]
    last_parts = {x.rpartition(".")[2] for x in configs.settings_of(Config)}
    is_flag = error.origin.startswith("the flag ") and "." not in name
    if not is_flag or name in last_parts:
        return ""
    close = difflib.get_close_matches(name, names, n=1, cutoff=OPTION_SIMILARITY)
    if not close:
        return ""
    return (
        f"There is no setting {error.name!r:.200} ({error.origin}). Did you mean "
        f"--{close[0].replace('_', '-')}, an option of the campaign?\n"
        "  Fix: `reverie campaign --help` lists all options."
    )


def _train_arguments(
    task: str, presets: Sequence[str], settings: dict[str, list[str]]
) -> list[str]:
    """Return the arguments of `reverie train` for a task and a method."""
    arguments = ["--configs", *presets] if presets else []
    for name, values in settings.items():
        arguments += [f"--{name}", *values]
    return [*arguments, "--task", task]


def _convert_values(origin: str, data: dict[str, Any]) -> None:
    """Convert values of a YAML file, in place, to the form of the command line."""
    for name, fix in FILE_EXAMPLES.items():
        if name in data and not _is_list_of_scalars(data[name]):
            raise UserError(
                f"{name} in {origin} cannot be {data[name]!r:.200}.\n  Fix: {fix}"
            )
    for name in ("seeds", "per_gpu"):
        value = data.get(name, "")
        if isinstance(value, list):
            data[name] = ",".join(map(str, value)) + ","
        elif value != "":
            data[name] = str(value)
    if "tasks" in data:
        data["tasks"] = _split_words(data["tasks"])
    for name in ("slurm", "ray"):
        if isinstance(data.get(name), dict):
            data[name] = ",".join(f"{k}={v}" for k, v in data[name].items())


def _is_list_of_scalars(value: Any) -> bool:
    """True for a value from a YAML file, or a list of values, but no mappings."""
    items = value if isinstance(value, list) else [value]
    return bool(items) and not any(
        x is None or isinstance(x, dict | list) for x in items
    )


def _expand_tasks(names: Sequence[str]) -> list[str]:
    """Return the tasks without repetition; a suite becomes its benchmark tasks."""
    if not names:
        raise UserError(
            "A campaign needs tasks.\n"
            "  Fix: --tasks catch,gym_CartPole-v1, or a suite such as --tasks atari100k"
        )
    return list(dict.fromkeys(task for name in names for task in benchmark_tasks(name)))


def _parse_methods(origin: str, entries: Any) -> tuple[tuple[str, ...], ...]:
    """Return the presets of each method, given as a list or a string of names."""
    if entries is None:
        return ()
    valid = isinstance(entries, list) and all(
        _is_list_of_scalars(entry) for entry in entries if entry != []
    )
    if not valid:
        raise UserError(
            f"configs in {origin} must list the presets of each method.\n"
            "  Fix: configs: [size12m, size50m], or --configs size12m --configs size50m"
        )
    return tuple(tuple(_split_words(entry)) for entry in entries)


def _split_words(value: Any) -> list[str]:
    """Split a string, or each string of a list, at commas and spaces."""
    words = [str(x) for x in value] if isinstance(value, list) else [str(value)]
    return [part for word in words for part in re.split(r"[,\s]+", word) if part]


def _total_frames(task: str, config: Config) -> int:
    return int(config.run.steps) * action_repeat(task, config.env)


def _file_name(text: str) -> str:
    """Replace characters that are not portable in file names."""
    return re.sub(r"[^\w.+-]+", "-", text)
