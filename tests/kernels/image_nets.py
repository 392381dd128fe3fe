"""Helpers for tests that compare fast encoders and decoders with the plain ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reverie.nets.blocks import initialize
from reverie.spaces import Space

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def image(*shape: int) -> Space:
    return Space(np.dtype(np.uint8), shape, 0, 256)


VECTOR = Space(np.float32, (5,))

each_kind_of_spaces = pytest.mark.parametrize(
    "spaces",
    [
        {"image": image(16, 16, 3)},
        {"image": image(12, 24, 1)},
        {"image": image(13, 14, 3)},
        {"a": image(16, 16, 3), "b": image(9, 12, 1), "v": VECTOR},
    ],
    ids=["square", "oblong gray", "padded", "two and a vector"],
)

each_unsupported_setting = pytest.mark.parametrize(
    "change",
    [
        {"kernel": 4},
        {"kernel": 3},
        {"outer": True},
        {"strided": True},
        {"norm": "layer"},
        {"norm": "none"},
        {"act": "gelu"},
    ],
    ids=str,
)


def make_pair(make, fast_class, mean: float) -> tuple[nn.Module, nn.Module]:
    """Return a plain network with random parameters, and the fast version of it."""
    plain, fast = make(), make()
    initialize(plain, torch.Generator().manual_seed(1))
    for name, parameter in plain.named_parameters():
        if name.endswith(("bias", "scale", "shift")):
            torch.nn.init.normal_(parameter, mean, 0.3)
    fast.load_state_dict(plain.state_dict())
    fast.__class__ = fast_class
    return plain.to(DEVICE), fast.to(DEVICE)


def random_obs(spaces: dict[str, Space], *batch: int) -> dict[str, Tensor]:
    return {
        key: torch.randint(0, 256, (*batch, *space.shape)).to(torch.uint8).to(DEVICE)
        if space.is_image
        else torch.randn(*batch, *space.shape, device=DEVICE)
        for key, space in spaces.items()
    }


def relative_errors(expected: list[Tensor], actual: list[Tensor]) -> list[float]:
    pairs = zip(expected, actual, strict=True)
    return [((a.float() - b.float()).norm() / a.norm()).item() for a, b in pairs]


def outputs_and_gradients(function, inputs, weights) -> list[Tensor]:
    """Return a function's output, and gradients of its sum weighted by `weights(y)`."""
    leaves = [leaf.clone().requires_grad_() for leaf in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad((y * weights(y)).sum(), leaves)]


def ramp(y: Tensor) -> Tensor:
    return torch.linspace(-1, 1, y.numel(), device=DEVICE).reshape(y.shape)
