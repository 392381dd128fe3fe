"""Config of the world model of dreamerv3-torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reverie.nets.blocks import MLPConfig


@dataclass(frozen=True)
class DreamerV3TorchConfig:
    """Sizes and options of the latent dynamics, and of images and keys."""

    deter: int = 512
    """Size of the deterministic state."""
    hidden: int = 512
    """Units of the hidden layers of sequence model, posterior and prior."""
    stoch: int = 32
    """Number of categorical or Gaussian variables of the stochastic state."""
    classes: int = 32
    """Classes of each categorical variable; 0 for Gaussian variables."""
    act: str = "silu"
    """Activation function."""
    norm: str = "layer1em3"
    """Normalization: layer, rms or none, with an epsilon (`layer1em3`)."""
    unimix: float = 0.01
    """Fraction of the uniform distribution mixed into every categorical."""
    initial: Literal["learned", "zeros"] = "learned"
    """State at the start of an episode: learned, or all zeros."""
    mean_act: Literal["none", "tanh5"] = "none"
    """Function of the Gaussian means: none, or tanh5 for 5 tanh(x / 5)."""
    std_act: Literal["sigmoid2", "sigmoid", "abs"] = "sigmoid2"
    """Function of the Gaussian deviations: sigmoid2 for 2 sigmoid(x / 2), sigmoid, or
    abs for |x + 1|."""
    min_std: float = 0.1
    """Added to the Gaussian deviations."""
    free_nats: float = 1.0
    """Free nats: the KL losses are clipped below this value."""
    image_output: Literal["shifted", "sigmoid"] = "shifted"
    """Output of the image decoder: shifted by 0.5, or squashed by a sigmoid."""
    image_dist: Literal["mse", "normal"] = "mse"
    """Loss of images: squared error, or a normal distribution with deviation 1."""
    key_order: tuple[str, ...] = ()
    """Order of the observation keys in encoder and decoder; other keys come last, in
    sorted order."""
    scale_images: Literal["all", "image"] = "all"
    """Images that are divided by 255: all, or only the key `image`. dreamerv3-torch
    divides only that one, so its checkpoints with other images need `image`."""
    store: str = "float32"
    """Dtype in which the replay buffer stores `deter`: float32 or float16."""

    def __post_init__(self) -> None:
        if min(self.deter, self.hidden, self.stoch) < 1 or self.classes < 0:
            raise ValueError("sizes must be at least 1, and classes at least 0")
        if not 0 <= self.unimix <= 1 or self.min_std < 0:
            raise ValueError("unimix must be from 0 to 1, and min_std not negative")
        if self.store not in ("float32", "float16"):
            raise ValueError(f"store must be float32 or float16, not {self.store!r}")

    @property
    def feature_widths(self) -> tuple[int, int]:
        """Sizes of the deterministic and the stochastic features."""
        return self.deter, self.stoch * max(1, self.classes)

    @property
    def layer(self) -> MLPConfig:
        """Norm and activation of the hidden layers."""
        return MLPConfig(1, self.hidden, self.act, self.norm)

    @property
    def gate_layer(self) -> MLPConfig:
        """Norm of the gates of the GRU, which have no common activation."""
        return MLPConfig(1, self.hidden, "none", self.norm)
