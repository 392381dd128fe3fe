"""Config of the RSSM."""

from __future__ import annotations

import math
from dataclasses import dataclass

WEIGHTS_PER_SQUARED_UNIT = 87
"""The RSSM of a size preset whose MLPs have n units has about 87 n^2 weights."""


def units_for_weights(weights: int) -> int:
    """Return the MLP units of a size preset whose RSSM has about this many weights."""
    return math.isqrt(weights // WEIGHTS_PER_SQUARED_UNIT)


@dataclass(frozen=True)
class LatentStateConfig:
    """Fields that the RSSM and the world of dreamerv3-torch have in common."""

    deter: int = 8192
    """Size of the deterministic state."""
    hidden: int = 1024
    """Units of the hidden layers of sequence model, posterior and prior."""
    stoch: int = 32
    """Number of categorical variables of the stochastic state, which has `stoch` times
    `classes` entries."""
    classes: int = 64
    """Classes of each categorical variable."""
    act: str = "silu"
    """Activation function."""
    norm: str = "rms"
    """Normalization: rms, layer or none."""
    unimix: float = 0.01
    """Fraction of the uniform distribution mixed into every categorical, which keeps
    the KL losses finite."""
    free_nats: float = 1.0
    """Free nats: KL losses below this value are set to it."""
    store: str = "float32"
    """Dtype in which the replay buffer stores `deter`: float32 or float16."""

    def __post_init__(self) -> None:
        if not 0 <= self.unimix <= 1:
            raise ValueError("unimix must be from 0 to 1")
        if self.store not in ("float32", "float16"):
            raise ValueError(f"store must be float32 or float16, not {self.store!r}")

    @property
    def feature_widths(self) -> tuple[int, int]:
        """Sizes of the deterministic and the stochastic features."""
        # dreamerv3-torch may have 0 classes: Gaussian variables, with one entry each
        return self.deter, self.stoch * max(1, self.classes)


@dataclass(frozen=True)
class RSSMConfig(LatentStateConfig):
    """Sizes and regularization of the RSSM.

    The defaults are those of the preset size200m.
    """

    blocks: int = 8
    """Blocks of the block-diagonal GRU; must divide `deter`. More blocks mean fewer
    weights."""
    dynlayers: int = 1
    """Block-diagonal hidden layers of the sequence model, before the GRU gates."""
    obslayers: int = 1
    """Hidden layers of the posterior."""
    imglayers: int = 2
    """Hidden layers of the prior, which predicts the stochastic state without an
    observation."""
    outscale: float = 1.0
    """Scale of the initial weights of the logit layers."""
    absolute: bool = False
    """Compute the posterior from the observation alone, without `deter`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (self.deter, self.hidden, self.stoch, self.classes, self.blocks)
        layers = (self.dynlayers, self.obslayers, self.imglayers)
        if min(sizes) < 1 or min(layers) < 0:
            raise ValueError("sizes must be at least 1, and layers at least 0")

    @property
    def equivalent_units(self) -> int:
        """MLP units of a size preset with this `deter`, which is 8 times as large. Used
        to estimate the memory of training."""
        return self.deter // 8
