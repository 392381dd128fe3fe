"""Config of the world model of dreamerv3-torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reverie.nets.blocks import MLPConfig
from reverie.worlds.rssm.config import LatentStateConfig, units_for_weights


@dataclass(frozen=True)
class DreamerV3TorchConfig(LatentStateConfig):
    """Sizes and options of the latent dynamics, and of images and keys."""

    deter: int = 512
    hidden: int = 512
    initial: Literal["learned", "zeros"] = "learned"
    """State at the start of an episode: learned, or all zeros."""
    stoch: int = 32
    """Number of categorical or Gaussian variables of the stochastic state."""
    classes: int = 32
    """Classes of each categorical variable; 0 for Gaussian variables."""
    norm: str = "layer1em3"
    """Normalization: layer, rms or none, with an epsilon (`layer1em3`)."""
    mean_act: Literal["none", "tanh5"] = "none"
    """Function of the Gaussian means: none, or tanh5 for 5 tanh(x / 5)."""
    std_act: Literal["sigmoid2", "sigmoid", "abs"] = "sigmoid2"
    """Function of the Gaussian standard deviations: sigmoid2 for 2 sigmoid(x / 2),
    sigmoid, or abs for |x + 1|."""
    min_std: float = 0.1
    """Added to the Gaussian standard deviations."""
    image_output: Literal["shifted", "sigmoid"] = "shifted"
    """Output of the image decoder: shifted by 0.5, or squashed by a sigmoid."""
    image_dist: Literal["mse", "normal"] = "mse"
    """Loss of images: squared error, or -log-density of a normal distribution with
    standard deviation 1."""
    key_order: tuple[str, ...] = ()
    """Order of the observation keys in encoder and decoder; other keys come last, in
    sorted order."""
    scale_images: Literal["all", "image"] = "all"
    """Images that are divided by 255: all, or only the key `image`. dreamerv3-torch
    divides only that key, so its checkpoints for tasks with other images need
    `image`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.deter, self.hidden, self.stoch) < 1 or self.classes < 0:
            raise ValueError("sizes must be at least 1, and classes at least 0")
        if self.min_std < 0:
            raise ValueError("min_std must not be negative")

    @property
    def equivalent_units(self) -> int:
        """Units of the size preset with about as many weights in its dynamics, to
        estimate the memory of training."""
        deter, stoch = self.feature_widths
        gru = 3 * deter * (self.hidden + deter)
        return units_for_weights(gru + self.hidden * (2 * deter + 3 * stoch))

    @property
    def layer(self) -> MLPConfig:
        """Norm and activation of the hidden layers."""
        return MLPConfig(1, self.hidden, self.act, self.norm)

    @property
    def gate_layer(self) -> MLPConfig:
        """Norm of the gates of the GRU; each gate has its own activation."""
        return MLPConfig(1, self.hidden, "none", self.norm)
