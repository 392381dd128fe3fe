"""`Config`, all settings of a run, and how blocks, files and flags are combined."""

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
from reverie.convert.dreamerv3.config import (
    convert_options as convert_dreamerv3_options,
)
from reverie.convert.dreamerv3.config import is_config as is_dreamerv3_config
from reverie.convert.dreamerv3_torch.config import BLOCK as DREAMERV3_TORCH
from reverie.convert.dreamerv3_torch.config import convert_options, merge_blocks
from reverie.convert.dreamerv3_torch.config import (
    is_config as is_dreamerv3_torch_config,
)
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
from reverie.run.clock import INTERVALS, RunConfig
from reverie.run.imported import (
    check_agent,
    encoder_importer,
    find_imported,
    missing_task,
    settings_of_file,
)
from reverie.run.offline.datasets import OfflineConfig
from reverie.run.size import choose_size
from reverie.run.trust import check_trusted

T = TypeVar("T")

CONFIG_FILE, ABOUT_FILE = "config.yaml", "about.json"
"""Files of a run folder: its settings, and commands and versions of each start."""
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Config:
    task: str = "catch"
    """Task: `SUITE_NAME` (`reverie envs` lists them), `gym_ID` for Gymnasium,
    `package.module:function` that makes an environment, `sequences_NAME` for a sequence
    dataset, or `recordings` for recorded episodes."""
    agent: str = "dreamer"
    """`dreamer`, `iris`, `vta`, `bc`, `random`, or `package.module:Class`."""
    size: str = ""
    """Preset block with the size of the agent's networks, if the run chose one because
    no block, file or flag gives a size. Set automatically."""
    seed: int = 0
    """Random seed."""
    logdir: str = "~/logdir/{timestamp}"
    """Run folder. A run in an existing folder is resumed."""
    device: str = "auto"
    """`cuda`, `cpu` or `mps`; `auto` for the fastest available."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is `bfloat16` on a GPU and `float32` elsewhere."""
    compile: Literal["auto", "none", "step", "graph"] = "auto"
    """Acceleration of updates and policy: `none`, fused kernels (`step`), or kernels
    captured as CUDA graphs (`graph`); `auto` is `graph` on a CUDA GPU and `step`
    elsewhere."""
    deterministic: bool = False
    """Make runs with the same seed bitwise identical, also after resuming."""
    run: RunConfig = field(default_factory=RunConfig)
    """Training loop: steps, train ratio, intervals, evaluation."""
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
        configs.check_minimum(self, seed=0)
        if self.seed > MAX_SEED:
            raise UserError(f"seed must be at most {MAX_SEED}.\n  Fix: --seed 0")
        if self.deterministic and self.run.clock == "seconds":
            raise UserError(
                "A deterministic run cannot log, report and save at times in seconds.\n"
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
                f"The agent {self.agent!r} cannot be based on the agent {base!r}; the "
                "base agent is that of the base run and set automatically.\n"
                f"  Fix: remove the setting of the agent {self.agent!r} that has the "
                f"value {base!r}."
            )
        if self.replay.fracs.priority > 0 and not self.agent_config.gives_priorities:
            raise UserError(
                "replay.fracs.priority is above zero, but the agent "
                f"{self.agent!r} sets no priorities.\n  Fix: --replay.fracs.priority "
                "0; DreamerV3 sets them with --dreamer.priosignal model."
            )

    @property
    def agent_config(self) -> AgentConfig:
        """Settings of the chosen agent."""
        config: AgentConfig = getattr(self, settings_name(self.agent))
        return config


def resolve(
    names: Sequence[str] = (),
    files: Sequence[str | Path] = (),
    flags: Sequence[tuple[str, Any]] | Mapping[str, Any] = (),
    saved: Config | None = None,
) -> Config:
    """Return the config of blocks, files and flags; later ones override earlier ones.

    The block of the task's suite (`atari100k` for `atari100k_pong`) is applied before
    all others, unless one of the named blocks sets a task. `saved` is the config of the
    run to resume: network size and replay capacity that it chose are kept.
    """
    pairs = list(flags.items()) if isinstance(flags, Mapping) else list(flags)
    named = _expand(names)
    read = [_file_layers(str(path)) for path in files]
    stack = _combine(named, read, pairs)
    _refuse_size(stack.flags)
    stack = _with_checkpoint(stack, named, read, pairs)
    schema, layers, flag_layer = stack
    without_flags = configs.resolve(schema, layers)
    if unit := _changed_clock(flag_layer, without_flags):
        layers.append((f"run.clock {unit}", _intervals(unit)))
    layers.append(("the flags", flag_layer))
    user_settings = [*named, *(settings for _, settings in read), layers[-1]]
    layers = [*_size_layers(schema, layers, saved), *layers]
    if "replay.capacity" not in configs.names_in(schema, user_settings):
        replay = {"fit": True, **({"capacity": saved.replay.capacity} if saved else {})}
        layers.append(("the defaults", {"replay": replay}))
    config = configs.resolve(schema, layers)
    for_evaluation(config)  # raises if `run.eval_configs` does not apply
    return config


NamedLayers = list[tuple[str, Layer]]
"""Layers with their origins; later layers override earlier ones."""
FileLayers = tuple[NamedLayers, tuple[str, Layer]]
"""Layers of a config file: layers that precede all blocks, and its settings."""


class _Stack(NamedTuple):
    schema: type[Config]
    layers: NamedLayers
    """All layers except for the flags."""
    flags: Layer


def _combine(
    named: NamedLayers, read: Sequence[FileLayers], pairs: Sequence[tuple[str, Any]]
) -> _Stack:
    """Return the layers of blocks, files and flags, with those that the task implies.

    That is the block of its suite, and the loss that fits a sequence dataset.
    """
    file_defaults = [layer for defaults, _ in read for layer in defaults]
    layers = [*file_defaults, *named, *(settings for _, settings in read)]
    schema = find_schema([*(layer for _, layer in layers), dict(pairs)])
    task, agent = (
        str(_last([*(layer for _, layer in layers), dict(pairs)], name, "") or default)
        for name, default in (("task", Config.task), ("agent", Config.agent))
    )
    if loss := _reconstruction_loss(schema, agent, task):
        layers = [(f"the task {task!r}", loss), *layers]
    if not is_sequence_task(task) and not any("task" in block for _, block in named):
        suite = split_task(task)[0]
        layers = [*(_expand([suite]) if suite in configs.blocks() else ()), *layers]
    flag_layer = configs.flag_layer(schema, pairs, configs.resolve(schema, layers))
    return _Stack(schema, layers, flag_layer)


def _with_checkpoint(
    stack: _Stack,
    named: NamedLayers,
    read: Sequence[FileLayers],
    pairs: Sequence[tuple[str, Any]],
) -> _Stack:
    """Return the stack with the settings that a checkpoint file implies, if any.

    It is the file of initial weights or of the base run. If no setting selects the
    agent, that of the file is used, with the config that was saved with the file.
    """
    schema, flags = stack.schema, ("the flags", stack.flags)
    config = configs.resolve(schema, [*stack.layers, flags])
    start = config.run.from_checkpoint
    path = start or config.agent_config.base_run
    imported = find_imported(path, schema) if path else None
    if imported is None:
        return stack
    if not start:
        encoder_importer(imported)  # raises if the file cannot be a base run
    given = [*(settings for _, settings in read), flags]
    user_settings = configs.values_in(schema, [*named, *given])
    importer, origin = imported.importer, f"the checkpoint {imported.path}"
    if start and "agent" in user_settings:
        check_agent(imported, settings_name(config.agent))
        given = [*named, *given]
    elif start:
        saved = None if read else importer.find_config(imported.path)
        if saved is not None:
            defaults, (_, settings) = _file_layers(str(saved))
            own = {k: v for k, v in settings.items() if k != "logdir"}
            given = [(f"the file {saved}", own), *given]
            named = [*defaults, given[0], *named]
            user_settings |= own
        if "task" not in user_settings and (task := importer.find_task(imported.path)):
            named = [(origin, {"task": task}), *named]
            user_settings |= {"task": task}
            config = dataclasses.replace(config, task=task)
        if "task" not in user_settings:
            raise missing_task(imported)
        if saved is None:
            with imported.explain_contents():
                presets = importer.presets(config.task, imported.contents)
                fitting = (origin, importer.defaults(imported.contents))
            named = [*_expand(presets), fitting, *named]
        stack = _combine(named, read, pairs)
    values = configs.values_in(stack.schema, given)
    known = {name: values[name] for name in importer.undetermined if name in values}
    inferred: dict[str, Any] = {}
    if start or config.agent_config.uses_base_world:
        inferred = settings_of_file(imported, known, config.run.from_components)
    if not start or not config.agent_config.trains_policy:
        inferred.pop("explore.policy", None)  # nothing acts or explores
    layers = [*_expand(importer.algorithm), *stack.layers, (origin, inferred)]
    return stack._replace(layers=layers)


def _size_layers(
    schema: type[Config], layers: Sequence[tuple[str, Layer]], saved: Config | None
) -> list[tuple[str, Layer]]:
    """Return the network size to use if the layers give none."""
    config = configs.resolve(schema, layers)
    sizes = config.agent_config.sizes
    size_names = configs.names_in(schema, _expand(sizes))
    if not sizes or size_names & configs.names_in(schema, layers):
        return []

    def config_of(name: str) -> AgentConfig:
        return configs.resolve(schema, [*_expand([name]), *layers]).agent_config

    size = saved.size if saved else ""
    size = size or choose_size(sizes, config.device, config_of)
    return [*_expand([size]), ("the defaults", {"size": size})]


def _refuse_size(flags: Layer) -> None:
    """Raise if `size` is a flag: it only records the size that a run chose."""
    if size := flags.get("size"):
        known = size if size in configs.blocks() else "size12m"
        raise UserError(
            f"The flag --size {size} has no effect: `size` is set automatically.\n"
            f"  Fix: --configs {known}"
        )


def _changed_clock(flags: Layer, base: Config) -> str:
    """Return the unit of the intervals if flags change it, else an empty string."""
    unit = str(flags.get("run.clock", base.run.clock))
    return unit if unit in INTERVALS and unit != base.run.clock else ""


def _intervals(unit: str) -> Layer:
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
        plugins = getattr(default, "plugins", ())
        settings += [f"{field_.name}.{name}" for name in plugins]
    values = {name: str(_last(layers, name, "")) for name in settings}
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
            f"{flag} {name}: the class has no settings.\n  Fix: add an attribute "
            "`Config`, a frozen dataclass; it may be empty."
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


def _last(layers: Sequence[Layer], name: str, default: Any) -> Any:
    """Return the last value of a setting, given by dotted name or in nested dicts."""
    group, _, setting = name.partition(".")
    for layer in reversed(layers):
        if name in layer:
            return layer[name]
        inner = layer.get(group)
        if setting and isinstance(inner, Mapping) and setting in inner:
            return inner[setting]
    return default


def for_evaluation(config: Config) -> Config:
    """Return the config with the environment settings of `run.eval_configs`."""
    if not config.run.eval_configs:
        return config
    saved = ("the config", dataclasses.asdict(config))
    blocks = _expand(config.run.eval_configs)
    return dataclasses.replace(
        config, env=configs.resolve(type(config), [saved, *blocks]).env
    )


def with_flags(config: Config, flags: Sequence[tuple[str, Any]]) -> Config:
    """Return a config with some settings changed."""
    saved = dataclasses.asdict(config)
    schema = find_schema([saved, dict(flags)])
    layer = configs.flag_layer(schema, flags, config)
    return configs.resolve(schema, [("the saved config", saved), ("the flags", layer)])


def _file_layers(file: str) -> FileLayers:
    """Return layers to apply before all blocks, and the settings of a file.

    Only config files of other programs have such layers: the defaults of that program.
    The name of a file of dreamerv3-torch may be followed by blocks of it, as in
    `configs.yaml:crafter`.
    """
    name, *names = [file] if Path(file).expanduser().exists() else file.split(":")
    origin, data = f"the file {name}", configs.read_config_file(Path(name))
    if is_dreamerv3_torch_config(data):
        options = convert_options(merge_blocks(data, names, name))
        _warn_of_unknown(name, options.unknown)
        return _expand([DREAMERV3_TORCH]), (origin, options.settings)
    folder = Path(name).expanduser().absolute().parent
    if Path(name).name == CONFIG_FILE and (folder / ABOUT_FILE).exists():
        check_trusted(folder, import_paths([data]).items())
    if is_dreamerv3_config(data):
        known = configs.settings_of(Config)
        return [], (origin, convert_dreamerv3_options(data, known))
    if names:
        raise ConfigError(
            f"{name} is not a configs.yaml of dreamerv3-torch, so it has no blocks."
            f"\n  Fix: --config {name}"
        )
    if not is_vta_file(data):
        return [], (origin, data)
    converted = from_vta_file(data)
    _warn_of_unknown(name, converted.unknown)
    block = _expand([converted.block])
    task = {k: _last([x for _, x in block], k, "") for k in ("agent", "task")}
    defaults = [*block, (origin, converted.defaults)]
    return defaults, (origin, {**task, **converted.settings})


def _warn_of_unknown(file: str, unknown: Sequence[str]) -> None:
    if unknown:
        names = ", ".join(unknown)
        warnings.warn(f"{file} has settings that are ignored: {names}", stacklevel=3)


def _reconstruction_loss(schema: type[Config], agent: str, task: str) -> Layer:
    """Return the reconstruction loss of the sequence dataset, for agents that have one.

    Without a sequence dataset, such agents train on recorded episodes.
    """
    check_name(agent)
    group = settings_name(agent)
    setting = typing.get_type_hints(schema)[group].reconstruction_setting
    if is_sequence_task(task):
        loss = find_sequence_class(task).loss  # type: ignore[attr-defined]
    else:
        loss = EpisodeSequences.loss
    return {f"{group}.{setting}": loss} if setting else {}


def _expand(
    names: Sequence[str], seen: tuple[str, ...] = ()
) -> list[tuple[str, Layer]]:
    """Return the layers of blocks; those listed under `configs` come before a block."""
    layers: list[tuple[str, Layer]] = []
    for name in names:
        if name in seen:
            raise ConfigError(
                f"The config block {name!r} includes itself.\n"
                "  Fix: remove it from the `configs` of the blocks it includes."
            )
        block = dict(configs.get_block(name))
        layers += _expand(block.pop("configs", ()), (*seen, name))
        layers.append((f"the block {name!r}", block))
    return layers
