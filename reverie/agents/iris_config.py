"""The options of Δ-IRIS. Defaults are those of the original for Crafter.

`tokenizer`, `world_model` and `actor_critic` are its three parts; `learn` says how each
of them is trained, `schedule` when, and `acting` how experience is collected.
"""

# ruff: noqa: RUF009 (the nested defaults are frozen, so sharing them is safe)
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from reverie.agents.epochs import EpochsConfig, Share
from reverie.agents.pixel_actor_critic import PixelActorCriticConfig
from reverie.api import UserError
from reverie.nets.adam import AdamConfig
from reverie.worlds.iris.world import DynamicsConfig, TokenizerConfig

PARTS = ("tokenizer", "world_model", "actor_critic")


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

    def __post_init__(self) -> None:
        if min(self.batch, self.accumulate) < 1:
            raise UserError(
                "Each part of iris.learn needs at least one sequence per batch and one "
                "batch per update.\n  Fix: --iris.learn.tokenizer.batch 32"
            )
        if min(self.steps, self.first_steps, self.start_after) < 0:
            raise UserError(
                "The steps, first_steps and start_after of a part of iris.learn must "
                "not be negative.\n  Fix: --iris.learn.tokenizer.steps 500"
            )
        if not 0 <= self.alpha < math.inf:
            raise UserError(
                f"An alpha of {self.alpha} in iris.learn would not make episodes give "
                "way to others.\n  Fix: --iris.learn.tokenizer.alpha 5"
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
    """The same three in evaluation."""
    eval_temperature: float = 1.0
    """Of the policy in evaluation."""
    eval_sample: bool = True
    """Sample in evaluation."""

    def __post_init__(self) -> None:
        if not (0 <= self.epsilon <= 1 and 0 <= self.eval_epsilon <= 1):
            raise UserError(
                "iris.acting.epsilon is a probability.\n"
                "  Fix: --iris.acting.epsilon 0.01"
            )
        if not (self.temperature > 0 and self.eval_temperature > 0):
            raise UserError(
                "iris.acting.temperature and eval_temperature must be above zero.\n"
                "  Fix: --iris.acting.sample False for the likeliest action, or in "
                "evaluation --iris.acting.eval_sample False."
            )


@dataclass(frozen=True)
class IrisConfig:
    """See the top of this file."""

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
        blocks = self.world_model.transformer.blocks
        dream = self.actor_critic.burn_in + self.actor_critic.horizon + 1
        if dream > blocks:
            raise UserError(
                f"A dream of {self.actor_critic.burn_in} + 1 + "
                f"{self.actor_critic.horizon} frames is longer than the {blocks} the "
                "transformer looks at.\n"
                f"  Fix: --iris.world_model.transformer.blocks {dream}"
            )
        if self.learn.world_model.length > blocks:
            raise UserError(
                f"Sequences of {self.learn.world_model.length} frames are longer than "
                f"the {blocks} the transformer looks at.\n"
                f"  Fix: --iris.learn.world_model.length {blocks}"
            )
        if min(self.learn.tokenizer.length, self.learn.world_model.length) < 2:
            raise UserError(
                "A sequence needs two frames for a change between them.\n"
                "  Fix: --iris.learn.tokenizer.length 21"
            )
