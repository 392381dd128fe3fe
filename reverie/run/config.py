"""Every setting of a run in one tree, and the order in which its layers are laid."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from reverie import config as configs
from reverie.agents.bc.agent import BCConfig
from reverie.agents.dreamer.agent import DreamerConfig
from reverie.agents.iris.config import IrisConfig
from reverie.agents.random import RandomConfig
from reverie.agents.vta.agent import VTAAgentConfig
from reverie.api import UserError
from reverie.config import ConfigError, Layer
from reverie.convert.vta.config import from_vta_file, is_vta_file
from reverie.datasets.sequences import (
    SequenceConfig,
    find_sequence_class,
    is_sequence_task,
)
from reverie.envs import EnvConfig, split_task
from reverie.log.logger import LoggerConfig
from reverie.replay.config import ReplayConfig
from reverie.run.clock import RunConfig
from reverie.run.offline_data import OfflineConfig


@dataclass(frozen=True)
class Config:
    task: str = "catch"
    """Task: `suite_name`, `gym_<id>`, `package.module:factory`, a sequence dataset
    `sequences_<name>`, or `recordings`."""
    agent: Literal["bc", "dreamer", "iris", "random", "vta"] = "dreamer"
    """Which agent to train."""
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
        if self.seed < 0:
            raise UserError(f"The seed {self.seed} is negative.\n  Fix: --seed 0")
        if self.deterministic and self.run.clock == "seconds":
            raise UserError(
                "A deterministic run cannot log, report and save by the wall clock.\n"
                "  Fix: add `--run.clock steps` and give the `run.*_every` settings "
                "in agent steps, for example `--configs deterministic`."
            )

        if self.deterministic and self.run.overlap == "on":
            raise UserError(
                "A deterministic run cannot act while it trains.\n"
                "  Fix: --run.overlap auto"
            )

        # Only an agent that can give priorities has this setting.
        silent = getattr(self.of_agent, "priosignal", None) == ""
        if self.replay.fracs.priority > 0 and silent:
            raise UserError(
                "replay.fracs.priority is above zero, but nothing gives priorities.\n"
                f"  Fix: add `--{self.agent}.priosignal model`."
            )

    @property
    def of_agent(self) -> Any:
        """The settings of the chosen agent."""
        return getattr(self, self.agent)


def resolve(
    names: Sequence[str] = (),
    files: Sequence[str | Path] = (),
    flags: Sequence[tuple[str, Any]] | Mapping[str, Any] = (),
) -> Config:
    """Defaults, then blocks, then files, then flags.

    A task brings the block of its suite along (`atari100k_pong` the block `atari100k`),
    beneath everything else, unless a named block chooses a task itself.
    """
    pairs = list(flags.items()) if isinstance(flags, Mapping) else list(flags)
    named = _expand(names)
    read = [_file_layers(Path(path)) for path in files]
    usual = [layer for below, _ in read for layer in below]
    layers = [*usual, *named, *(above for _, above in read)]
    given = [layer["task"] for _, layer in layers if "task" in layer]
    usually = given[-1] if given else Config().task
    task = str(dict(pairs).get("task") or usually)
    if is_sequence_task(task):
        layers = [(f"the task {task!r}", _source_layer(task)), *layers]
    elif not any("task" in block for _, block in named):
        layers = [*_suite_layers(task), *layers]
    below = configs.resolve(Config, layers)
    flag_layer = configs.flag_layer(Config, pairs, below)
    found = configs.resolve(Config, [*layers, ("the flags", flag_layer)])
    for_evaluation(found)  # what cannot be laid over it is said at once
    return found


def for_evaluation(config: Config) -> Config:
    """The config with the environments that a policy is measured in."""
    if not config.run.eval_configs:
        return config
    saved = ("the config", dataclasses.asdict(config))
    blocks = _expand(config.run.eval_configs)
    return dataclasses.replace(
        config, env=configs.resolve(Config, [saved, *blocks]).env
    )


def with_flags(config: Config, flags: Sequence[tuple[str, Any]]) -> Config:
    """A finished config with some settings changed."""
    layer = configs.flag_layer(Config, flags, config)
    saved = ("the saved config", dataclasses.asdict(config))
    return configs.resolve(Config, [saved, ("the flags", layer)])


def _file_layers(
    path: Path,
) -> tuple[list[tuple[str, Layer]], tuple[str, Layer]]:
    """What lies beneath all that was named, and the settings of a file.

    A file of another program brings what that program does by itself, and its task.
    """
    origin, data = f"the file {path}", configs.read_config_file(path)
    if not is_vta_file(data):
        return [], (origin, data)
    found = from_vta_file(data)
    if found.unknown:
        warnings.warn(
            f"{path} has settings that mean nothing here: {', '.join(found.unknown)}",
            stacklevel=2,
        )
    block = configs.get_block(found.block)
    task = {key: block[key] for key in ("agent", "task")}
    below = [*_expand([found.block]), (origin, found.defaults)]
    return below, (origin, {**task, **found.settings})


def _source_layer(task: str) -> Layer:
    """How images of its sequences are compared, unless somebody says otherwise."""
    return {"vta.world.loss": find_sequence_class(task).loss}  # type: ignore[attr-defined]


def _suite_layers(task: Any) -> list[tuple[str, Layer]]:
    suite = split_task(str(task))[0]
    return _expand([suite]) if suite in configs.blocks() else []


def _expand(
    names: Sequence[str], seen: tuple[str, ...] = ()
) -> list[tuple[str, Layer]]:
    """Blocks by name; one that lists others under `configs` is laid over them."""
    layers: list[tuple[str, Layer]] = []
    for name in names:
        if name in seen:
            raise ConfigError(
                f"The config block {name!r} stands on itself.\n"
                "  Fix: take it out of the `configs` of the blocks it names."
            )
        block = dict(configs.get_block(name))
        layers += _expand(block.pop("configs", ()), (*seen, name))
        layers.append((f"the block {name!r}", block))
    return layers
