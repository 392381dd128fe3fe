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
                f"replay.fracs is {fractions} (uniform, priority, recency), but the "
                "values must not be negative and must add up to 1.\n"
                "  Fix: e.g. --replay.fracs.uniform 0.5 --replay.fracs.priority 0.5"
            )


@dataclass(frozen=True)
class PriorityConfig:
    """Priorities of steps and sequences, computed from the losses of steps.

    The priority of a step is `(loss + offset) ** exponent`, with `loss` the value that
    the agent computes (`dreamer.priosignal`), plus `visit_scale * visit_decay ** n`
    after n batches that trained on the step.
    """

    exponent: float = 0.8
    """Exponent of the loss of each step."""

    offset: float = 0.0
    """Added to the loss of each step, so that steps with a loss of 0 are sampled."""

    visit_scale: float = 0.0
    """Scale of the term that decreases with the number of batches that trained on a
    step; 0 removes the term. If it is above 0, the context steps of a sequence are not
    counted as visited and do not change the priority of the sequence."""

    visit_decay: float = 0.7
    """Factor of the `visit_scale` term for each batch that trained on a step."""

    maxfrac: float = 0.5
    """Priority of a sequence: maxfrac * maximum + (1 - maxfrac) * mean of its steps."""

    initial: float = float("inf")
    """Priority of new steps; infinite means that they are sampled first. If
    `visit_scale` is 0, the priority is `(initial + offset) ** exponent`."""

    zero_on_sample: bool = True
    """Set the loss of sampled steps to 0 until the agent computes a new one."""

    def __post_init__(self) -> None:
        if not (0 <= self.maxfrac <= 1 and 0 <= self.visit_decay <= 1):
            raise UserError(
                "replay.prio.maxfrac and replay.prio.visit_decay must be from 0 to 1.\n"
                "  Fix: remove them to use the defaults."
            )
        finite = (self.exponent, self.offset, self.visit_scale)
        if not all(0 <= x < float("inf") for x in finite) or not self.initial >= 0:
            raise UserError(
                "The exponent, offset, visit_scale and initial of replay.prio must be "
                "numbers that are not negative; only initial may be infinite.\n"
                "  Fix: remove them to use the defaults."
            )


@dataclass(frozen=True)
class ReplayConfig:
    """Size, storage and sampling of the replay buffer."""

    capacity: int = 5_000_000
    """Maximum number of steps; the oldest are evicted first."""

    fit: bool = False
    """Reduce the capacity to what fits into memory and on disk. Set automatically if no
    preset, config file or flag sets the capacity."""

    ranks: Literal["shared", "sharded"] = "shared"
    """With several processes (ranks), `shared`: rank 0 has all environments and one
    replay for all ranks. `sharded`: each rank has its own part of the environments
    (`run.envs`) and of the replay (`capacity`)."""

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
    """Fractions of uniform, prioritized and recency-weighted sampling."""

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
