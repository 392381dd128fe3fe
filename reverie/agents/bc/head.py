"""From features to actions that an expert would choose: a point, or a mixture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from reverie.nets.blocks import MLP, Linear, ModulesByKey
from reverie.nets.gru import GRU
from reverie.spaces import Space, Spaces


@dataclass(frozen=True)
class CloneHeadConfig:
    """The network that is cloned into."""

    kind: Literal["mlp", "mixture"] = "mlp"
    """One action, or a mixture of Gaussians over them."""
    layers: int = 4
    """Hidden layers."""
    units: int = 1024
    """Their width."""
    act: str = "silu"
    """Activation."""
    norm: str = "none"
    """Norm: rms, layer or none."""
    outscale: float = 1.0
    """Scale of the initial output weights."""
    recurrent: int = 0
    """Width of a recurrent layer in front of them; 0 for none."""
    loss: Literal["mse", "l1"] = "mse"
    """How the one action is compared."""
    modes: int = 5
    """Gaussians of a mixture."""
    minstd: float = 0.01
    """Least deviation of each, in normalised actions."""

    def __post_init__(self) -> None:
        if self.layers < 0 or min(self.units, self.modes) < 1 or self.minstd <= 0:
            raise ValueError(
                "layers must be at least 0, units and modes 1, and minstd above 0"
            )


class Point:
    """One action."""

    def __init__(self, value: Float[Tensor, "*b A"], loss: str):
        self.value, self._loss = value, loss

    def mode(self) -> Float[Tensor, "*b A"]:
        return self.value

    def loss(self, target: Float[Tensor, "*b A"]) -> Float[Tensor, "*b"]:
        apart = self.value - target
        return (apart.square() if self._loss == "mse" else apart.abs()).mean(-1)


class Mixture:
    """Gaussians with weights; its mode is the mean of the likeliest."""

    def __init__(
        self,
        logits: Float[Tensor, "*b M"],
        mean: Float[Tensor, "*b M A"],
        std: Float[Tensor, "*b M A"],
    ):
        self.logits, self.mean, self.std = logits, mean, std

    def mode(self) -> Float[Tensor, "*b A"]:
        index = self.logits.argmax(-1)[..., None, None]
        index = index.expand(*index.shape[:-1], self.mean.shape[-1])
        return self.mean.gather(-2, index)[..., 0, :]

    def loss(self, target: Float[Tensor, "*b A"]) -> Float[Tensor, "*b"]:
        distance = ((target[..., None, :] - self.mean) / self.std).square()
        density = -0.5 * distance - self.std.log() - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(self.logits.log_softmax(-1) + density.sum(-1), -1)


class Choice:
    """One of some classes, for every entry of a discrete action."""

    def __init__(self, logits: Float[Tensor, "*b N K"], low: Tensor, space: Space):
        self.logits, self.low, self.space = logits, low, space

    def mode(self) -> Tensor:
        index = self.logits.argmax(-1) + self.low
        return index.reshape(*index.shape[:-1], *self.space.shape)

    def loss(self, target: Tensor) -> Float[Tensor, "*b"]:
        flat = target.reshape(*self.logits.shape[:-1]).long() - self.low
        picked = self.logits.log_softmax(-1).gather(-1, flat[..., None])
        return -picked[..., 0].mean(-1)


class CloneHead(nn.Module):
    """Features of a sequence to a guess for every key of the action."""

    def __init__(self, inputs: int, spaces: Spaces, config: CloneHeadConfig):
        super().__init__()
        self.spaces, self.config = spaces, config
        self.gru = GRU(inputs, config.recurrent) if config.recurrent else None
        width = config.recurrent or inputs
        self.mlp = MLP(width, config.layers, config.units, config.act, config.norm)
        self.out = ModulesByKey(
            {key: self._make(space) for key, space in spaces.items()}
        )

    def _make(self, space: Space) -> nn.Module:
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
        return torch.zeros(batch, self.config.recurrent, device=device)

    def forward(
        self,
        carry: Float[Tensor, "B R"],
        feat: Float[Tensor, "B T F"],
        is_first: Bool[Tensor, "B T"],
    ) -> tuple[dict[str, Point | Mixture | Choice], Float[Tensor, "B R"]]:
        if self.gru is not None:
            gates, steps = self.gru.gates(feat), []
            for t in range(feat.shape[1]):
                carry = torch.where(is_first[:, t, None], 0, carry)
                carry = self.gru.step(gates[:, :, t], carry[None])[0]
                steps.append(carry)
            feat = torch.stack(steps, 1)
        x = self.mlp(feat)
        guesses = {
            key: self._guess(key, space, x) for key, space in self.spaces.items()
        }
        return guesses, carry

    def _guess(self, key: str, space: Space, x: Tensor) -> Point | Mixture | Choice:
        out, config = self.out[key], self.config
        layers = dict(out.named_children())
        if space.is_discrete:
            return Choice(layers["logits"](x).float(), out.get_buffer("low"), space)
        mean = layers["mean"](x).float()
        if config.kind == "mlp":
            return Point(mean, config.loss)
        std = F.softplus(layers["std"](x).float()) + config.minstd
        return Mixture(layers["logits"](x).float(), mean, std)


class ActionScale(nn.Module):
    """Actions between about -1 and 1, and back; what it needs is in its buffers."""

    def __init__(self, spaces: Spaces):
        super().__init__()
        self.spaces = {k: s for k, s in spaces.items() if not s.is_discrete}
        for i, space in enumerate(self.spaces.values()):
            size = math.prod(space.shape)
            self.register_buffer(f"offset{i}", torch.zeros(size))
            self.register_buffer(f"scale{i}", torch.ones(size))

    def set(self, key: str, offset: Tensor, scale: Tensor) -> None:
        """Entries that never change keep their size."""
        i = list(self.spaces).index(key)
        scale = torch.where(scale > 1e-6, scale, torch.ones_like(scale))
        self.get_buffer(f"offset{i}").copy_(offset.reshape(-1))
        self.get_buffer(f"scale{i}").copy_(scale.reshape(-1))

    def narrow(self, action: dict[str, Tensor]) -> dict[str, Tensor]:
        """As the head sees them; floats are flat."""
        found = dict(action)
        for i, (key, space) in enumerate(self.spaces.items()):
            x = action[key].float()
            x = x.reshape(*x.shape[: x.ndim - len(space.shape)], -1)
            offset, scale = self.get_buffer(f"offset{i}"), self.get_buffer(f"scale{i}")
            found[key] = (x - offset) / scale
        return found

    def widen(self, key: str, value: Float[Tensor, "*b A"]) -> Tensor:
        """As the environment takes them."""
        i = list(self.spaces).index(key)
        x = value * self.get_buffer(f"scale{i}") + self.get_buffer(f"offset{i}")
        return x.reshape(*x.shape[:-1], *self.spaces[key].shape)
