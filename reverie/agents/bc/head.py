"""Policy head of behavior cloning: predicts the demonstrated action from features.

Shapes: `M` Gaussians of a mixture, `N` entries of a discrete action, `R` GRU units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from reverie.nets.blocks import MLP, Linear, MLPConfig, ModulesByKey
from reverie.nets.gru import GRU
from reverie.spaces import Space, Spaces

MIN_SCALE = 1e-6
"""Entries of an action with a smaller scale are treated as constant: not rescaled."""


@dataclass(frozen=True)
class BCHeadConfig(MLPConfig):
    """Policy head of behavior cloning."""

    kind: Literal["mlp", "mixture"] = "mlp"
    """Output for continuous actions: a single prediction (`mlp`), or a mixture of
    Gaussians."""
    layers: int = 4
    norm: str = "none"
    outscale: float = 1.0
    """Scale of the initial weights of the output layer."""
    recurrent: int = 0
    """Units of a GRU before the hidden layers; 0 for none."""
    loss: Literal["mse", "l1"] = "mse"
    """Loss for `mlp`: squared or absolute error."""
    modes: int = 5
    """Number of Gaussians of the mixture."""
    minstd: float = 0.01
    """Minimum standard deviation of each Gaussian, in normalized actions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.modes < 1 or self.minstd <= 0:
            raise ValueError("modes must be at least 1 and minstd above 0")


class PointPrediction:
    """Prediction of a continuous action without a distribution.

    `loss` is the setting `mse` or `l1`.
    """

    def __init__(self, value: Float[Tensor, "*b A"], loss: str):
        self.value, self.loss_kind = value, loss

    def mode(self) -> Float[Tensor, "*b A"]:
        return self.value

    def loss(self, target: Float[Tensor, "*b A"]) -> Float[Tensor, "*b"]:
        error = self.value - target
        return (error.square() if self.loss_kind == "mse" else error.abs()).mean(-1)


@dataclass(frozen=True, eq=False)
class GaussianMixture:
    """Mixture of Gaussians; its mode is the mean of the most probable Gaussian."""

    logits: Float[Tensor, "*b M"]
    mean: Float[Tensor, "*b M A"]
    std: Float[Tensor, "*b M A"]

    def mode(self) -> Float[Tensor, "*b A"]:
        index = self.logits.argmax(-1)[..., None, None]
        index = index.expand(*index.shape[:-1], self.mean.shape[-1])
        return self.mean.gather(-2, index)[..., 0, :]

    def loss(self, target: Float[Tensor, "*b A"]) -> Float[Tensor, "*b"]:
        distance = ((target[..., None, :] - self.mean) / self.std).square()
        logp = -0.5 * distance - self.std.log() - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(self.logits.log_softmax(-1) + logp.sum(-1), -1)


class CategoricalPrediction:
    """Categorical distributions of the entries of a discrete action.

    Class 0 of each entry is the action `low`, the lowest value of the space.
    """

    def __init__(self, logits: Float[Tensor, "*b N K"], low: Tensor, space: Space):
        self.logits, self.low, self.space = logits, low, space

    def mode(self) -> Tensor:
        index = self.logits.argmax(-1) + self.low
        return index.reshape(*index.shape[:-1], *self.space.shape)

    def loss(self, target: Tensor) -> Float[Tensor, "*b"]:
        index = target.reshape(*self.logits.shape[:-1]).long() - self.low
        logp = self.logits.log_softmax(-1).gather(-1, index[..., None])
        return -logp[..., 0].mean(-1)


ActionPrediction = PointPrediction | GaussianMixture | CategoricalPrediction


class BCHead(nn.Module):
    """Maps features of a sequence to a prediction for every action key."""

    def __init__(self, inputs: int, spaces: Spaces, config: BCHeadConfig):
        super().__init__()
        self.spaces, self.config = spaces, config
        self.gru = GRU(inputs, config.recurrent) if config.recurrent else None
        width = config.recurrent or inputs
        self.mlp = MLP(width, config)
        self.out = ModulesByKey(
            {key: self._make_output(space) for key, space in spaces.items()}
        )

    def _make_output(self, space: Space) -> nn.Module:
        """Return the output layers for one action key."""
        config, size = self.config, math.prod(space.shape)
        width, scale = self.mlp.width, self.config.outscale
        if space.is_discrete:
            out = nn.ModuleDict({"logits": Linear(width, (size, space.classes), scale)})
            low = torch.tensor(space.low.reshape(-1).tolist())
            out.register_buffer("low", low, persistent=False)
            return out
        if config.kind == "mlp":
            return nn.ModuleDict({"mean": Linear(width, size, scale)})
        return nn.ModuleDict(
            {
                "logits": Linear(width, config.modes, scale),
                "mean": Linear(width, (config.modes, size), scale),
                "std": Linear(width, (config.modes, size), scale),
            }
        )

    def initial(self, batch: int, device: torch.device) -> Float[Tensor, "B R"]:
        """Return the GRU state at the start of an episode."""
        return torch.zeros(batch, self.config.recurrent, device=device)

    def forward(
        self,
        carry: Float[Tensor, "B R"],
        feat: Float[Tensor, "B T F"],
        is_first: Bool[Tensor, "B T"],
    ) -> tuple[dict[str, ActionPrediction], Float[Tensor, "B R"]]:
        """Return predictions by action key, and the last state of the GRU."""
        if self.gru is not None:
            gates, states = self.gru.gates(feat), []  # gates: (1, B, T, 3 R)
            for t in range(feat.shape[1]):
                carry = torch.where(is_first[:, t, None], 0, carry)
                carry = self.gru.step(gates[:, :, t], carry[None])[0]
                states.append(carry)
            feat = torch.stack(states, 1)
        x = self.mlp(feat)
        predictions = {
            key: self._predict(key, space, x) for key, space in self.spaces.items()
        }
        return predictions, carry

    def _predict(self, key: str, space: Space, x: Tensor) -> ActionPrediction:
        """Return the prediction for one action key from outputs of the MLP."""
        out, config = self.out[key], self.config
        layers = dict(out.named_children())
        if space.is_discrete:
            logits = layers["logits"](x).float()
            return CategoricalPrediction(logits, out.get_buffer("low"), space)
        mean = layers["mean"](x).float()
        if config.kind == "mlp":
            return PointPrediction(mean, config.loss)
        std = F.softplus(layers["std"](x).float()) + config.minstd
        return GaussianMixture(layers["logits"](x).float(), mean, std)


class ActionNormalizer(nn.Module):
    """Normalizes continuous actions with an offset and a scale per entry."""

    def __init__(self, spaces: Spaces):
        super().__init__()
        self.spaces = {k: s for k, s in spaces.items() if not s.is_discrete}
        for i, space in enumerate(self.spaces.values()):
            size = math.prod(space.shape)
            self.register_buffer(f"offset{i}", torch.zeros(size))
            self.register_buffer(f"scale{i}", torch.ones(size))

    def set(self, key: str, offset: Tensor, scale: Tensor) -> None:
        """Set offset and scale of a key; scales up to `MIN_SCALE` are replaced by 1."""
        i = list(self.spaces).index(key)
        scale = torch.where(scale > MIN_SCALE, scale, torch.ones_like(scale))
        self.get_buffer(f"offset{i}").copy_(offset.reshape(-1))
        self.get_buffer(f"scale{i}").copy_(scale.reshape(-1))

    def normalize(self, action: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return normalized actions; the axes of continuous actions are flattened."""
        normalized = dict(action)
        for i, (key, space) in enumerate(self.spaces.items()):
            x = action[key].float()
            x = x.reshape(*x.shape[: x.ndim - len(space.shape)], -1)
            offset, scale = self.get_buffer(f"offset{i}"), self.get_buffer(f"scale{i}")
            normalized[key] = (x - offset) / scale
        return normalized

    def denormalize(self, key: str, value: Float[Tensor, "*b A"]) -> Tensor:
        """Return the continuous action of one key in its own units and shape."""
        i = list(self.spaces).index(key)
        x = value * self.get_buffer(f"scale{i}") + self.get_buffer(f"offset{i}")
        return x.reshape(*x.shape[:-1], *self.spaces[key].shape)
