"""`Config`: all settings of a run, and `resolve`, which combines their sources.

The sources are presets, config files and flags. Each is a layer of settings; a
layer overrides those before it.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from reverie import config as configs
from reverie.agents import check_name
from reverie.agents.bc.agent import BCConfig
from reverie.agents.dreamer.agent import DreamerConfig
from reverie.agents.explore import ExploreConfig
from reverie.agents.iris.config import IrisConfig
from reverie.agents.random import RandomConfig
from reverie.agents.vta.agent import VTAAgentConfig
from reverie.api import UserError
from reverie.capabilities import AgentConfig
from reverie.config import ConfigError, Layer
from reverie.convert.dreamerv3 import config as dreamerv3
from reverie.convert.dreamerv3_torch import config as dreamerv3_torch
from reverie.convert.vta.config import from_vta_file, is_vta_file
from reverie.datasets.sequences import (
    SequenceConfig,
    find_sequence_class,
    is_sequence_task,
)
from reverie.datasets.sequences.episodes import EpisodeSequences
from reverie.envs import PYTHON_ENV, EnvConfig, split_task
from reverie.log.logger import LoggerConfig
from reverie.plugins import import_object, is_plugin, settings_name
from reverie.replay.config import ReplayConfig
from reverie.run.actors.config import ActorsConfig
from reverie.run.clock import INTERVALS, RunConfig
from reverie.run.imported import (
    check_importing_agent,
    encoder_importer,
    find_imported,
    infer_settings,
    missing_task,
)
from reverie.run.offline.datasets import OfflineConfig
from reverie.run.presets import NamedLayers, expand_presets, last_value
from reverie.run.size import choose_size
from reverie.run.trust import check_trusted

T = TypeVar("T")

CONFIG_FILE, ABOUT_FILE = "config.yaml", "about.json"
"""Files of a run folder: its settings, and commands and versions of each start."""
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    task: str = "catch"
    """Task: `SUITE_NAME` (`reverie envs` lists them), `gym_ID` for Gymnasium,
    `package.module:function` that makes an environment, `sequences_NAME` for a sequence
    dataset, or `recordings` for recorded episodes."""
    agent: str = "dreamer"
    """Agent: `dreamer`, `iris`, `vta`, `bc`, `random`, or `package.module:Class`."""
    size: str = ""
    """Preset of the network size that was chosen for the run. Set automatically if no
    preset, file or flag gives a size."""
    seed: int = 0
    """Random seed."""
    logdir: str = "~/logdir/{timestamp}"
    """Run folder. A run in an existing folder is resumed."""
    device: str = "auto"
    """`cuda`, `cpu` or `mps`; `auto` for the fastest available."""
    devices: int = 1
    """Number of processes that `reverie train` starts on this machine for data-parallel
    training: one per GPU, or all on the CPU. Leave it at 1 with `torchrun` or `srun`,
    which start the processes."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is `bfloat16` on a CUDA GPU (`float16` if its compute capability is below
    8.0) and `float32` elsewhere."""
    compile: Literal["auto", "none", "step", "graph"] = "auto"
    """Acceleration of updates and policy: `none`, fused kernels (`step`), or kernels
    captured as CUDA graphs (`graph`); `auto` is `graph` on a CUDA GPU and `step`
    elsewhere."""
    deterministic: bool = False
    """Make runs with the same seed bitwise identical, also after resuming."""
    run: RunConfig = field(default_factory=RunConfig)
    """Training loop: steps, train ratio, intervals, evaluation."""
    actors: ActorsConfig = field(default_factory=ActorsConfig)
    """Actors in other processes and on other machines."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """Environments: suites, wrappers, worker processes."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Replay buffer: capacity, storage, sampling."""
    sequences: SequenceConfig = field(default_factory=SequenceConfig)
    """Sequence datasets."""
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    """Training on recorded episodes."""
    explore: ExploreConfig = field(default_factory=ExploreConfig)
    """Exploration policy."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    """Logging: outputs and filters."""
    dreamer: DreamerConfig = field(default_factory=DreamerConfig)
    """DreamerV3 agent."""
    iris: IrisConfig = field(default_factory=IrisConfig)
    """Δ-IRIS agent."""
    bc: BCConfig = field(default_factory=BCConfig)
    """Behavior cloning agent."""
    random: RandomConfig = field(default_factory=RandomConfig)
    """Random agent."""
    vta: VTAAgentConfig = field(default_factory=VTAAgentConfig)
    """VTA agent (variational temporal abstraction)."""

    def __post_init__(self) -> None:
        check_name(self.agent)
        configs.check_minimum(self, seed=0, devices=1)
        if self.seed > MAX_SEED:
            raise UserError(f"seed must be at most {MAX_SEED}.\n  Fix: --seed 0")
        if self.deterministic and self.run.clock == "seconds":
            raise UserError(
                "The intervals of a deterministic run cannot be in seconds.\n"
                "  Fix: add `--run.clock steps`, or use `--configs deterministic`."
            )
        if self.deterministic and self.run.overlap == "on":
            raise UserError(
                "A deterministic run cannot overlap acting with training.\n"
                "  Fix: --run.overlap auto"
            )
        base = self.agent_config.base_agent
        settings = getattr(self, settings_name(base), None)
        if base and (base == self.agent or not isinstance(settings, AgentConfig)):
            raise UserError(
                f"The base agent of {self.agent!r} cannot be {base!r}: it is set "
                "automatically to the agent of the base run.\n  Fix: remove the "
                f"setting of the agent {self.agent!r} that has the value {base!r}."
            )
        if self.replay.fracs.priority > 0 and not self.agent_config.sets_priorities:
            raise UserError(
                f"replay.fracs.priority is above 0, but the agent {self.agent!r} sets "
                "no priorities.\n  Fix: remove the preset curious_replay, or add "
                "--replay.fracs.priority 0 --replay.fracs.uniform 1. DreamerV3 sets "
                "priorities with --dreamer.priosignal model."
            )

    @property
    def processes(self) -> int:
        """Number of processes to start on this machine."""
        return len(self.run.train_devices) or self.devices

    @property
    def agent_config(self) -> AgentConfig:
        """Settings of the chosen agent."""
        config: AgentConfig | None = getattr(self, settings_name(self.agent), None)
        if config is None:
            # `find_schema` adds settings of a plug-in only for the exact name `agent`
            flag = f"--agent {self.agent}"
            raise UserError(f"A pattern of names cannot set `agent`.\n  Fix: {flag}")
        return config


def resolve(
    presets: Sequence[str] = (),
    files: Sequence[str | Path] = (),
    flags: Sequence[tuple[str, Any]] | Mapping[str, Any] = (),
    saved: Config | None = None,
) -> Config:
    """Return the config of presets, files and flags; later ones override earlier ones.

    The preset of the task's suite (`atari100k` for `atari100k_pong`) is applied before
    all others, unless one of `presets` sets a task. `saved` is the config of the run to
    resume: the network size and replay capacity that were chosen for it are kept.
    """
    pairs = list(flags.items()) if isinstance(flags, Mapping) else list(flags)
    file_layers = [_file_layers(str(path)) for path in files]
    file_settings = [settings for _, settings in file_layers]
    given = [layer for _, layer in (*expand_presets(presets), *file_settings)]
    agent = last_value([*given, dict(pairs)], "agent", "")
    preset_layers = expand_presets(presets, str(agent))  # adds the `with_agent` layers
    stack = _combine(preset_layers, file_layers, pairs)
    _refuse_size(stack.flags)
    stack = _with_checkpoint(stack, preset_layers, file_layers, pairs)
    schema, layers, flag_layer = stack
    without_flags = configs.resolve(schema, layers)
    if unit := _changed_clock(flag_layer, without_flags):
        layers.append((f"run.clock {unit}", _intervals(unit)))
    layers.append(("the flags", flag_layer))
    user_layers = [*preset_layers, *file_settings, layers[-1]]
    layers = [*_size_layers(schema, layers, saved), *layers]
    if "replay.capacity" not in configs.names_in(schema, user_layers):
        # `fit`: the default capacity is reduced if it does not fit into memory
        replay = {"fit": True, **({"capacity": saved.replay.capacity} if saved else {})}
        layers.append(("the defaults", {"replay": replay}))
    config = configs.resolve(schema, layers)
    for_evaluation(config)  # raises if `run.eval_configs` does not apply
    return config


FileLayers = tuple[NamedLayers, tuple[str, Layer]]
"""Layers of a config file: layers that precede all presets, and its settings."""


class _Stack(NamedTuple):
    """Layers of settings, and the config class that they are settings of."""

    schema: type[Config]
    layers: NamedLayers
    """All layers except for the flags."""
    flags: Layer


def _combine(
    preset_layers: NamedLayers,
    file_layers: Sequence[FileLayers],
    pairs: Sequence[tuple[str, Any]],
) -> _Stack:
    """Return the layers of presets, files and flags, and those that the task implies.

    A task implies the preset of its suite, or the loss that fits a sequence dataset.
    """
    file_defaults = [layer for defaults, _ in file_layers for layer in defaults]
    layers = [
        *file_defaults,
        *preset_layers,
        *(settings for _, settings in file_layers),
    ]
    given = [*(layer for _, layer in layers), dict(pairs)]
    schema = find_schema(given)
    task = str(last_value(given, "task", "") or Config.task)
    agent = str(last_value(given, "agent", "") or Config.agent)
    if loss := _reconstruction_loss(schema, agent, task):
        layers = [(f"the task {task!r}", loss), *layers]
    presets_set_task = any("task" in preset for _, preset in preset_layers)
    if not is_sequence_task(task) and not presets_set_task:
        suite = split_task(task)[0]
        if suite in configs.presets():
            layers = [*expand_presets([suite]), *layers]
    flag_layer = configs.flag_layer(schema, pairs, configs.resolve(schema, layers))
    return _Stack(schema, layers, flag_layer)


def _with_checkpoint(
    stack: _Stack,
    preset_layers: NamedLayers,
    file_layers: Sequence[FileLayers],
    pairs: Sequence[tuple[str, Any]],
) -> _Stack:
    """Add the settings that a checkpoint of another implementation implies, if any.

    This is the checkpoint of the initial weights (`run.from_checkpoint`) or of the base
    run. If no setting selects an agent, the checkpoint's agent and config are used.
    """
    schema, flags = stack.schema, ("the flags", stack.flags)
    config = configs.resolve(schema, [*stack.layers, flags])
    initial = config.run.from_checkpoint
    path = initial or config.agent_config.base_run
    imported = find_imported(path, schema) if path else None
    if imported is None:
        return stack
    if not initial:
        encoder_importer(imported)  # raises if its encoder cannot be imported alone
    known_layers = [*(settings for _, settings in file_layers), flags]
    user_settings = configs.values_in(schema, [*preset_layers, *known_layers])
    importer, origin = imported.importer, f"the checkpoint {imported.path}"
    if initial and "agent" in user_settings:
        check_importing_agent(imported, settings_name(config.agent))
        known_layers = [*preset_layers, *known_layers]
    elif initial:
        config_file = None if file_layers else importer.find_config(imported.path)
        if config_file is not None:
            defaults, (_, settings) = _file_layers(str(config_file))
            settings = {k: v for k, v in settings.items() if k != "logdir"}
            known_layers = [(f"the file {config_file}", settings), *known_layers]
            preset_layers = [*defaults, known_layers[0], *preset_layers]
            user_settings |= settings
        if "task" not in user_settings and (task := importer.find_task(imported.path)):
            preset_layers = [(origin, {"task": task}), *preset_layers]
            user_settings |= {"task": task}
            config = dataclasses.replace(config, task=task)
        if "task" not in user_settings:
            raise missing_task(imported)
        if config_file is None:
            with imported.explain_import_errors():
                presets = importer.presets(config.task, imported.contents)
                defaults = [(origin, importer.defaults(imported.contents))]
            preset_layers = [*expand_presets(presets), *defaults, *preset_layers]
        stack = _combine(preset_layers, file_layers, pairs)
    values = configs.values_in(stack.schema, known_layers)
    # settings that the tensors of the checkpoint do not determine
    known = {name: values[name] for name in importer.undetermined if name in values}
    inferred: dict[str, Any] = {}
    if initial or config.agent_config.uses_base_world:
        inferred = infer_settings(imported, known, config.run.from_components)
    if not initial or not config.agent_config.trains_policy:
        inferred.pop("explore.policy", None)  # no policy is trained
    base = expand_presets(importer.base_presets)
    return stack._replace(layers=[*base, *stack.layers, (origin, inferred)])


def _size_layers(
    schema: type[Config], layers: Sequence[tuple[str, Layer]], saved: Config | None
) -> list[tuple[str, Layer]]:
    """Return the layers of the network size to use, if `layers` give no size."""
    config = configs.resolve(schema, layers)
    sizes = config.agent_config.sizes
    size_names = configs.names_in(schema, expand_presets(sizes))
    if not sizes or size_names & configs.names_in(schema, layers):
        return []

    def config_of(name: str) -> AgentConfig:
        return configs.resolve(schema, [*expand_presets([name]), *layers]).agent_config

    size = saved.size if saved else ""
    size = size or choose_size(sizes, config.device, config_of)
    return [*expand_presets([size]), ("the defaults", {"size": size})]


def _refuse_size(flags: Layer) -> None:
    """Raise if `size` is a flag: it only records the size that a run chose."""
    if size := flags.get("size"):
        text = size if isinstance(size, str) else " ".join(map(str, size))
        raise UserError(
            f"The flag --size {text} has no effect: `size` is set automatically.\n"
            f"  Fix: --configs {text if text in configs.presets() else 'size12m'}"
        )


def _changed_clock(flags: Layer, base: Config) -> str:
    """Return the new value of `run.clock` if flags change it, else an empty string."""
    unit = str(flags.get("run.clock", base.run.clock))
    return unit if unit in INTERVALS and unit != base.run.clock else ""


def _intervals(unit: str) -> Layer:
    """Return the default `run.*_every` settings in a unit."""
    return {f"run.{name}_every": value for name, value in INTERVALS[unit].items()}


def find_schema(layers: Sequence[Layer]) -> type[Config]:
    """Return the config class, with the settings of plug-ins that the layers name."""
    names = import_paths(layers)
    agent = names.pop("agent", Config.agent)
    names.pop("task", None)
    return _schema(agent, tuple(names.items()))


def import_paths(layers: Sequence[Layer]) -> dict[str, str]:
    """Return the import paths of users' code that layers name, by setting."""
    settings = ["task", "agent"]
    for field_ in dataclasses.fields(Config):
        default = getattr(field_, "default_factory", None)
        names = getattr(default, "plugin_settings", ())
        settings += [f"{field_.name}.{name}" for name in names]
    values = {name: str(last_value(layers, name, "")) for name in settings}
    return {k: v for k, v in values.items() if is_plugin(v) and v != PYTHON_ENV}


def import_paths_of(config: Config) -> dict[str, str]:
    """Return the import paths of users' code that a run with a config imports."""
    paths = import_paths([dataclasses.asdict(config)])
    for field_ in dataclasses.fields(config):
        base = getattr(getattr(config, field_.name), "base_agent", "")
        if is_plugin(base):
            paths[f"the base agent of {field_.name}"] = base
    return paths


@functools.cache
def _schema(agent: str, components: tuple[tuple[str, str], ...]) -> type[Config]:
    """Return `Config`, extended by the settings of plug-ins.

    `components` are pairs of a setting that names a plug-in, and its import path.
    """
    groups: dict[str, type] = {}
    for setting, name in components:
        group = setting.partition(".")[0]
        base = typing.get_type_hints(Config)[group]
        settings = _settings_class(name, f"--{setting}")
        groups[group] = _extend(base, {settings_name(name): settings})
    if is_plugin(agent):
        settings = _settings_class(agent, "--agent")
        if not issubclass(settings, AgentConfig):
            raise UserError(
                f"--agent {agent}: its Config does not derive from "
                "reverie.capabilities.AgentConfig.\n  Fix: class Config(AgentConfig)"
            )
        key = settings_name(agent)
        if key in {each.name for each in dataclasses.fields(Config)}:
            raise UserError(
                f"--agent {agent}: its settings would be called {key!r}, which is "
                "taken.\n  Fix: give the class another name."
            )
        groups[key] = settings
    return _extend(Config, groups) if groups else Config


def _settings_class(name: str, flag: str) -> type:
    """Return the dataclass of a plug-in's settings: its attribute `Config`."""
    settings = getattr(import_object(name, flag), "Config", None)
    if not (isinstance(settings, type) and dataclasses.is_dataclass(settings)):
        raise UserError(
            f"{flag} {name} has no attribute `Config`.\n  Fix: add it, a frozen "
            "dataclass; it may be empty."
        )
    return settings


def _extend(base: type[T], groups: Mapping[str, type]) -> type[T]:
    """Return a subclass of a config dataclass with these groups of settings."""
    fields = [(k, cls, field(default_factory=cls)) for k, cls in groups.items()]
    return dataclasses.make_dataclass(
        base.__name__,
        fields,
        bases=(base,),
        frozen=True,
        namespace={"__module__": __name__},
    )


def for_evaluation(config: Config) -> Config:
    """Return the config with the environment settings of `run.eval_configs`."""
    if not config.run.eval_configs:
        return config
    saved = ("the config", dataclasses.asdict(config))
    presets = expand_presets(config.run.eval_configs)
    return dataclasses.replace(
        config, env=configs.resolve(type(config), [saved, *presets]).env
    )


def with_flags(config: Config, flags: Sequence[tuple[str, Any]]) -> Config:
    """Return a config with some settings changed."""
    saved = dataclasses.asdict(config)
    schema = find_schema([saved, dict(flags)])
    layer = configs.flag_layer(schema, flags, config)
    return configs.resolve(schema, [("the saved config", saved), ("the flags", layer)])


def _file_layers(file: str) -> FileLayers:
    """Return layers to apply before all presets, and the settings of a file.

    Only config files of other implementations have layers to apply before all presets:
    the defaults of that implementation. The name of a file of dreamerv3-torch may be
    followed by names of its presets, as in `configs.yaml:crafter`.
    """
    name, *names = [file] if Path(file).expanduser().exists() else file.split(":")
    origin, data = f"the file {name}", configs.read_config_file(Path(name))
    if dreamerv3_torch.is_config(data):
        merged = dreamerv3_torch.merge_presets(data, names, name)
        options = dreamerv3_torch.convert_options(merged)
        _warn_of_unknown(name, options.unknown)
        return expand_presets([dreamerv3_torch.PRESET]), (origin, options.settings)
    folder = Path(name).expanduser().absolute().parent
    if Path(name).name == CONFIG_FILE and (folder / ABOUT_FILE).exists():
        check_trusted(folder, import_paths([data]).items())
    if dreamerv3.is_config(data):
        known = configs.settings_of(Config)
        return [], (origin, dreamerv3.convert_options(data, known))
    if names:
        raise ConfigError(
            f"{name} is not a configs.yaml of dreamerv3-torch, so it has no presets."
            f"\n  Fix: --config {name}"
        )
    if not is_vta_file(data):
        return [], (origin, data)
    converted = from_vta_file(data)
    _warn_of_unknown(name, converted.unknown)
    preset = expand_presets([converted.preset])
    layers = [layer for _, layer in preset]
    selected = {k: last_value(layers, k, "") for k in ("agent", "task")}
    defaults = [*preset, (origin, converted.defaults)]
    return defaults, (origin, {**selected, **converted.settings})


def _warn_of_unknown(file: str, unknown: Sequence[str]) -> None:
    if unknown:
        names = ", ".join(unknown)
        warnings.warn(f"{file} has settings that are ignored: {names}", stacklevel=3)


def _reconstruction_loss(schema: type[Config], agent: str, task: str) -> Layer:
    """Return the reconstruction loss for the task, if the agent has a setting for it.

    If the task is not a sequence dataset, such an agent trains on recorded episodes.
    """
    check_name(agent)
    group = settings_name(agent)
    setting = typing.get_type_hints(schema)[group].reconstruction_setting
    if is_sequence_task(task):
        loss = find_sequence_class(task).loss  # type: ignore[attr-defined]
    else:
        loss = EpisodeSequences.loss
    return {f"{group}.{setting}": loss} if setting else {}
