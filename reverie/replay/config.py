"""Settings of the replay buffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from reverie.api import UserError

Storage = Literal["auto", "ram", "disk"]


@dataclass(frozen=True)
class SelectorFractions:
    """Fraction of sequences chosen by each sampling strategy; they add up to 1."""

    uniform: float = 1.0
    """Fraction of sequences that are sampled uniformly."""

    priority: float = 0.0
    """Fraction sampled in proportion to priorities, which the agent computes."""

    recency: float = 0.0
    """Fraction sampled with a preference for recent sequences (see `recexp`)."""

    def __post_init__(self) -> None:
        fractions = (self.uniform, self.priority, self.recency)
        if min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
            raise UserError(
                f"The replay fractions {fractions} must be positive and add up to 1.\n"
                "  Fix: e.g. --replay.fracs.uniform 0.5 --replay.fracs.priority 0.5"
            )


@dataclass(frozen=True)
class PriorityConfig:
    """How priorities of steps are combined into priorities of sequences."""

    exponent: float = 0.8
    """Exponent applied to the priority of each step."""

    maxfrac: float = 0.5
    """Priority of a sequence: maxfrac * maximum + (1 - maxfrac) * mean of its steps."""

    initial: float = float("inf")
    """Priority of new steps; infinite means that they are sampled first."""

    zero_on_sample: bool = True
    """Set priorities of sampled steps to zero until the agent computes new ones."""


@dataclass(frozen=True)
class ReplayConfig:
    """Size, storage and sampling of the replay buffer."""

    capacity: int = 5_000_000
    """Maximum number of steps; the oldest are evicted first."""

    fit: bool = False
    """Reduce the capacity to what fits into memory and on disk. Set automatically for
    runs whose blocks, files and flags give no capacity."""

    storage: Storage = "auto"
    """Where steps are stored; auto means in memory if they fit, otherwise on disk."""

    device_memory: float = 0.5
    """Fraction of the free GPU memory that a copy of the replay may take. If the replay
    fits, batches are gathered on the GPU. 0 disables the copy."""

    save: bool = True
    """Save the replay with the checkpoints, so that a resumed run has it."""

    segment: int = 1024
    """Steps per file on disk."""

    online: bool = True
    """Sample every new step once before sampling from the whole replay."""

    fracs: SelectorFractions = field(default_factory=SelectorFractions)
    """Fractions of uniform, prioritized and recency sampling."""

    prio: PriorityConfig = field(default_factory=PriorityConfig)
    """Prioritized sampling, used if `fracs.priority` is above zero."""

    recexp: float = 1.0
    """Recency sampling: probabilities are proportional to age ** -recexp."""

    def __post_init__(self) -> None:
        for name in ("capacity", "segment"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"replay.{name} is {getattr(self, name)}, but must be at least 1.\n"
                    f"  Fix: --replay.{name} 1024"
                )
        if not 0 <= self.device_memory <= 1:
            raise UserError(
                f"replay.device_memory is {self.device_memory}, but must be between 0 "
                "and 1.\n  Fix: --replay.device_memory 0.5"
            )
