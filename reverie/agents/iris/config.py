"""The options of Δ-IRIS. Defaults are those of the original for Crafter.

`tokenizer`, `world_model` and `actor_critic` are its three parts; `learn` says how each
of them is trained, `schedule` when, and `acting` how experience is collected.
"""

# ruff: noqa: RUF009 (the nested defaults are frozen, so sharing them is safe)
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from reverie.agents.iris.actor_critic import PixelActorCriticConfig
from reverie.agents.iris.schedule import EpochsConfig, Share
from reverie.api import UserError
from reverie.capabilities import AgentConfig
from reverie.nets.optim.adam import AdamConfig
from reverie.worlds.iris.config import DynamicsConfig, TokenizerConfig

PARTS = ("tokenizer", "world_model", "actor_critic")
LEAST = {
    "batch": 1,
    "accumulate": 1,
    "steps": 0,
    "first_steps": 0,
    "start_after": 0,
    "alpha": 0,
    "length": 2,  # a change is between two frames
}
"""What the settings of a part must not be below."""


@dataclass(frozen=True)
class PartConfig:
    """How one part is trained."""

    batch: int = 32
    """Sequences per batch."""
    accumulate: int = 1
    """Batches whose gradients make one update."""
    steps: int = 500
    """Updates per epoch."""
    first_steps: int = 0
    """Updates of the very first epoch, if the part trains then; 0 for as many."""
    start_after: int = 0
    """Epochs before the part begins to train."""
    alpha: float = 5.0
    """How strongly episodes it has often seen give way to others."""
    opt: AdamConfig = AdamConfig()
    """Optimizer."""

    def check(self, part: str) -> None:
        """Raise if something about this part cannot be."""
        for name, least in LEAST.items():
            if getattr(self, name, least) < least:
                raise UserError(
                    f"iris.learn.{part}.{name} is {getattr(self, name)}, but must be "
                    f"at least {least}.\n  Fix: --iris.learn.{part}.{name} {least}"
                )
        if not self.alpha < math.inf:
            raise UserError(
                f"With an alpha of {self.alpha} no episode could be chosen.\n"
                f"  Fix: --iris.learn.{part}.alpha 5"
            )

    @property
    def share(self) -> Share:
        return Share(self.steps, self.first_steps, self.start_after)


@dataclass(frozen=True)
class SequencePartConfig(PartConfig):
    """The same, of a part that chooses how long its sequences are."""

    length: int = 21
    """Frames per sequence."""


@dataclass(frozen=True)
class LearnConfig:
    """How each part is trained."""

    tokenizer: SequencePartConfig = SequencePartConfig(first_steps=5000)
    """Tokenizer."""
    world_model: SequencePartConfig = SequencePartConfig(first_steps=2500)
    """Transformer."""
    actor_critic: PartConfig = PartConfig(batch=86, opt=AdamConfig(wd=0.0))
    """Policy and critic; their sequences are the burn-in and the frame after it."""

    def __post_init__(self) -> None:
        for part in PARTS:
            getattr(self, part).check(part)


@dataclass(frozen=True)
class ActingConfig:
    """How actions are chosen."""

    epsilon: float = 0.01
    """Chance of a random action while collecting."""
    coin: Literal["vector", "each"] = "vector"
    """Toss for all environments together, as the original does, or for each."""
    temperature: float = 1.0
    """Of the policy while collecting."""
    sample: bool = True
    """Sample while collecting; otherwise the likeliest action."""
    eval_epsilon: float = 0.0
    """Chance of a random action in evaluation."""
    eval_temperature: float = 1.0
    """Of the policy in evaluation."""
    eval_sample: bool = True
    """Sample in evaluation."""

    def __post_init__(self) -> None:
        for prefix in ("", "eval_"):
            epsilon, heat = f"{prefix}epsilon", f"{prefix}temperature"
            if not 0 <= getattr(self, epsilon) <= 1:
                raise UserError(
                    f"iris.acting.{epsilon} is {getattr(self, epsilon)}, but it is a "
                    f"probability.\n  Fix: --iris.acting.{epsilon} 0.01"
                )
            if not getattr(self, heat) > 0:
                raise UserError(
                    f"iris.acting.{heat} must be above zero.\n  Fix: --iris.acting."
                    f"{heat} 1 --iris.acting.{prefix}sample False, which takes the "
                    "likeliest action"
                )


@dataclass(frozen=True)
class IrisConfig(AgentConfig):
    """Settings of Δ-IRIS; see the top of this file."""

    importer: ClassVar[str] = "reverie.convert.delta_iris.weights:import_state"
    resumable: ClassVar[tuple[str, ...]] = (
        "schedule.epochs",
        "schedule.collect_epochs",
    )

    image: str = ""
    """The image to see, where an environment shows several; by itself `image`."""
    ends: Literal["last", "terminal"] = "last"
    """What the world model learns as an end: every last row, as the original, which
    does not tell a time limit from the end of the task, or only terminal ones."""
    behaviour: bool = True
    """Learn to act as well; without, only the world is learnt."""
    schedule: EpochsConfig = EpochsConfig()
    """When what happens."""
    acting: ActingConfig = ActingConfig()
    """How actions are chosen."""
    learn: LearnConfig = LearnConfig()
    """How each part is trained."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Tokenizer."""
    world_model: DynamicsConfig = DynamicsConfig()
    """Transformer."""
    actor_critic: PixelActorCriticConfig = PixelActorCriticConfig()
    """Policy and critic."""
    save_memory: bool = True
    """On a GPU, let training make parts of the tokenizer's and the transformer's
    activations again instead of keeping them."""

    def __post_init__(self) -> None:
        blocks, dream = self.world_model.transformer.blocks, self.dreamt
        if dream > blocks:
            raise UserError(
                f"A dream of {self.actor_critic.burn_in} + 1 + "
                f"{self.actor_critic.horizon} frames is longer than the {blocks} the "
                "transformer looks at.\n"
                f"  Fix: --iris.world_model.transformer.blocks {dream} "
                f"--iris.learn.world_model.length {dream}"
            )
        if self.learn.world_model.length > blocks:
            raise UserError(
                f"Sequences of {self.learn.world_model.length} frames are longer than "
                f"the {blocks} the transformer looks at.\n"
                f"  Fix: --iris.learn.world_model.length {blocks}"
            )

    @property
    def dreamt(self) -> int:
        """Frames of a dream, those before it included."""
        return self.actor_critic.burn_in + self.actor_critic.horizon + 1
