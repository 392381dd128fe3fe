"""Settings of Δ-IRIS. The defaults are those of the original for Crafter.

`tokenizer`, `world_model` and `actor_critic` are its three components; `training`
configures the updates of each, `schedule` the epochs, and `acting` exploration.
"""

# ruff: noqa: RUF009 (the nested defaults are frozen, so sharing them is safe)
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from reverie.agents.iris.actor_critic import PixelActorCriticConfig
from reverie.api import StateDict, UserError
from reverie.capabilities import AgentConfig, UnusedSetting
from reverie.config import check_minimum
from reverie.nets.optim.adam import AdamConfig
from reverie.worlds.iris.config import DynamicsConfig, TokenizerConfig

COMPONENTS = ("tokenizer", "world_model", "actor_critic")
WORLD_COMPONENTS = COMPONENTS[:2]
"""Components of the world model."""


@dataclass(frozen=True)
class ComponentTrainingConfig:
    """Training of one component."""

    batch: int = 32
    """Sequences per batch."""
    accumulate: int = 1
    """Batches per update, whose gradients are averaged."""
    opt: AdamConfig = AdamConfig()
    """Optimizer."""
    steps: int = 500
    """Updates per epoch."""
    first_steps: int = 0
    """Updates in the first epoch, if the component trains in it; 0 for `steps`."""
    start_after: int = 0
    """Number of epochs before the component starts to train."""
    alpha: float = 5.0
    """Preference for rarely used episodes: an episode is sampled with probability
    proportional to (1 + n) ** -alpha after n uses; 0 for uniform sampling."""

    def check(self, component: str) -> None:
        """Raise if a setting is invalid; `component` is named in the message."""
        prefix = f"iris.training.{component}."
        check_minimum(self, prefix, batch=1, accumulate=1, steps=0, first_steps=0)
        check_minimum(self, prefix, start_after=0, alpha=0)
        if self.alpha == math.inf:
            raise UserError(
                f"{prefix}alpha is {self.alpha}, but must be finite.\n"
                f"  Fix: --{prefix}alpha 5"
            )

    def updates_in(self, epoch: int) -> int:
        """Return the number of updates in an epoch, counted from 1."""
        if epoch <= self.start_after:
            return 0
        return self.first_steps if epoch == 1 and self.first_steps else self.steps


@dataclass(frozen=True)
class SequenceTrainingConfig(ComponentTrainingConfig):
    """Training of a component on sequences of configurable length."""

    length: int = 21
    """Frames per sequence."""

    def check(self, component: str) -> None:
        super().check(component)
        check_minimum(self, f"iris.training.{component}.", length=2)  # one transition


@dataclass(frozen=True)
class TrainingConfig:
    """Training of the three components."""

    tokenizer: SequenceTrainingConfig = SequenceTrainingConfig(first_steps=5000)
    """Tokenizer."""
    world_model: SequenceTrainingConfig = SequenceTrainingConfig(first_steps=2500)
    """Transformer."""
    actor_critic: ComponentTrainingConfig = ComponentTrainingConfig(
        batch=86, opt=AdamConfig(wd=0.0)
    )
    """Actor and critic; the length of their sequences is the burn-in plus one frame."""

    def __post_init__(self) -> None:
        for component in COMPONENTS:
            getattr(self, component).check(component)


@dataclass(frozen=True)
class EpochScheduleConfig:
    """Epochs and environment steps. The defaults are those for Crafter."""

    epochs: int = 1000
    """Total number of epochs."""
    collect_epochs: int = 991
    """Number of epochs that collect data; later ones only train."""
    first_steps: int = 100_000
    """Environment steps of the first epoch, with random actions; 0 for the same number
    as in other epochs, with the policy."""
    steps: int = 10_000
    """Environment steps of every other epoch."""

    def __post_init__(self) -> None:
        minima = {"epochs": 1, "collect_epochs": 1, "first_steps": 0, "steps": 1}
        check_minimum(self, "iris.schedule.", **minima)


@dataclass(frozen=True)
class ActingConfig:
    """Choice of actions."""

    epsilon: float = 0.01
    """Probability of a random action in training."""
    epsilon_draw: Literal["shared", "per_env"] = "shared"
    """Draw whether to take random actions once for all environments (`shared`), as the
    original does, or separately for each environment (`per_env`)."""
    temperature: float = 1.0
    """Softmax temperature of the policy in training."""
    sample: bool = True
    """Sample actions in training; False for the most probable action."""
    eval_epsilon: float = 0.0
    """Probability of a random action in evaluation."""
    eval_temperature: float = 1.0
    """Softmax temperature of the policy in evaluation."""
    eval_sample: bool = True
    """Sample actions in evaluation; False for the most probable action."""

    def __post_init__(self) -> None:
        for prefix in ("", "eval_"):
            epsilon, temperature = f"{prefix}epsilon", f"{prefix}temperature"
            if not 0 <= getattr(self, epsilon) <= 1:
                raise UserError(
                    f"iris.acting.{epsilon} is {getattr(self, epsilon)}, but must be a "
                    f"probability.\n  Fix: --iris.acting.{epsilon} 0.01"
                )
            if not getattr(self, temperature) > 0:
                raise UserError(
                    f"iris.acting.{temperature} must be above zero.\n"
                    f"  Fix: --iris.acting.{temperature} 1 --iris.acting.{prefix}"
                    "sample False, which selects the most probable action"
                )


@dataclass(frozen=True)
class IrisConfig(AgentConfig):
    """Settings of Δ-IRIS."""

    # the class variables are documented in `AgentConfig`
    importers: ClassVar[tuple[str, ...]] = (
        "reverie.convert.delta_iris.importer:IMPORTER",
    )
    policy_setting: ClassVar[str] = "behaviour"
    explore_policies: ClassVar[tuple[str, ...]] = ("random", "plan2explore")
    explore_settings: ClassVar[tuple[str, ...]] = (
        *("intrinsic", "extrinsic", "heads.", "retnorm."),
    )
    batch_settings: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("training.tokenizer.batch", "training.tokenizer.length"),
        ("training.world_model.batch", "training.world_model.length"),
        ("training.actor_critic.batch", "actor_critic.horizon"),
    )
    changeable_on_resume: ClassVar[tuple[str, ...]] = (
        "schedule.epochs",
        "schedule.collect_epochs",
    )

    image: str = ""
    """Image key to use; empty for the only one, or `image`."""
    ends: Literal["last", "terminal"] = "last"
    """Rows that the world model predicts as the end of an episode: every last row
    (`last`), as the original does, or only terminal rows, not time limits (`terminal`).
    """
    behaviour: bool = True
    """Train actor and critic; False trains the world model only."""
    schedule: EpochScheduleConfig = EpochScheduleConfig()
    """Epochs and environment steps."""
    acting: ActingConfig = ActingConfig()
    """Choice of actions."""
    training: TrainingConfig = TrainingConfig()
    """Training of each component."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Tokenizer."""
    world_model: DynamicsConfig = DynamicsConfig()
    """Transformer."""
    actor_critic: PixelActorCriticConfig = PixelActorCriticConfig()
    """Actor and critic."""
    save_memory: bool = True
    """On a GPU, recompute some activations of tokenizer and transformer in the backward
    pass instead of storing them."""

    def __post_init__(self) -> None:
        max_frames, frames = self.world_model.transformer.blocks, self.rollout_frames
        if frames > max_frames:
            raise UserError(
                f"An imagined rollout of {self.actor_critic.burn_in} + 1 + "
                f"{self.actor_critic.horizon} frames is longer than the context of the "
                f"transformer, {max_frames} frames.\n"
                f"  Fix: --iris.world_model.transformer.blocks {frames} "
                f"--iris.training.world_model.length {frames}"
            )
        if self.training.world_model.length > max_frames:
            raise UserError(
                f"Sequences of {self.training.world_model.length} frames are longer "
                f"than the context of the transformer, {max_frames} frames.\n"
                f"  Fix: --iris.training.world_model.length {max_frames}"
            )

    def is_policy_trained(self, state: StateDict, updates: int) -> bool:
        return int(state["opt"]["actor_critic"]["step"]) > 0

    @property
    def epochs(self) -> int:
        return self.schedule.epochs

    @property
    def unused(self) -> tuple[UnusedSetting, ...]:
        reason = "the agent 'iris' alternates between acting and training in epochs"
        fix = (
            "--iris.schedule.steps sets the environment steps per epoch, and "
            "--iris.training.world_model.steps the updates of a component."
        )
        unused = [UnusedSetting("run.train_ratio", reason, fix)]
        fix = "--iris.training.world_model.first_steps sets the updates of epoch 1."
        unused.append(UnusedSetting("run.pretrain", reason, fix))
        if not self.behaviour:
            reason = "only the world model is trained"
            fix = "add --iris.behaviour True."
            groups = ("acting.", "training.actor_critic.")
            unused += [UnusedSetting(f"iris.{name}", reason, fix) for name in groups]
        return tuple(unused)

    @property
    def rollout_frames(self) -> int:
        """Frames of an imagined rollout, including the burn-in."""
        return self.actor_critic.burn_in + self.actor_critic.horizon + 1
