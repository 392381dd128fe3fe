"""Random inputs and named results of the posterior scan, and stand-ins for kernels."""

from __future__ import annotations

import ctypes
import re

import torch
from torch import Tensor

from reverie.kernels import nvrtc
from reverie.kernels.scan import posterior
from reverie.kernels.scan.tensors import (
    ForwardPass,
    ScanInputs,
    ScanSettings,
    ScanWeights,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def decisive_noise(noise: Tensor) -> Tensor:
    """Noise that alone determines the samples, so that rounding cannot change them."""
    winner = torch.nn.functional.one_hot(noise.argmin(-1), noise.shape[-1])
    return torch.where(winner.bool(), 1e-4, 1e4).to(noise.dtype)


def random_scan(
    batch: int,
    length: int,
    sizes: tuple[int, int, int, int, int],
    dtype: torch.dtype = torch.float32,
) -> ForwardPass:
    """Return arguments of a scan; `sizes` is deter, units, blocks, stoch, classes."""
    deter, units, blocks, stoch, classes = sizes
    width, logits = deter // blocks, stoch * classes
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 0.2) -> Tensor:
        x = scale * torch.randn(*shape, generator=generator)
        return x.to(DEVICE, dtype).requires_grad_()

    def gain(size: int) -> Tensor:
        x = 1 + 0.1 * torch.randn(size, generator=generator)
        return x.to(DEVICE).requires_grad_()

    rows = width + 3 * units
    weights = ScanWeights(
        *(normal(units, deter), normal(units), gain(units)),
        *(normal(units, logits), normal(units), gain(units)),
        *(normal(blocks, rows, width), normal(deter), gain(deter)),
        *(normal(blocks, width, 3 * width), normal(3 * deter)),
        *(normal(units, deter), gain(units)),
        *(normal(logits, units, scale=1.0), normal(logits)),
    )
    noise = torch.empty(batch, length, stoch, classes).exponential_(generator=generator)
    inputs = ScanInputs(
        normal(batch, deter, scale=0.5),
        normal(batch, logits),
        normal(batch, length, units, scale=1.0),
        normal(batch, length, units, scale=1.0),
        (torch.rand(batch, length, generator=generator) < 0.3).to(DEVICE),
        decisive_noise(noise).to(DEVICE),
    )
    return ForwardPass(weights, inputs, ScanSettings(classes, 0.01, 1e-4))


def outputs_and_gradients(implementation, scan: ForwardPass) -> dict[str, Tensor]:
    """Run a scan forward and backward and return all results by name."""
    outputs = posterior.posterior_scan(implementation, scan)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    names = ("deter", "stoch", "actions", "tokens")
    leaves = {
        **dict(zip(names, scan.inputs, strict=False)),
        **scan.weights._asdict(),
    }
    grads = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    named = dict(zip(("deters", "stochs", "logits"), outputs, strict=True))
    return {**named, **dict(zip(leaves, grads, strict=True))}


def assert_as_accurate(fast, plain, exact) -> None:
    """Fast results must be as close to float32 as the plain ones of the same dtype."""
    for name, expected in exact.items():
        error, usual = (
            float((x[name] - expected).detach().norm()) for x in (fast, plain)
        )
        assert error < 1.5 * usual + 0.002 * float(expected.detach().norm()), name


class KernelRecorder:
    """Stand-in for a kernel that records its arguments, or fails to launch."""

    def __init__(self, error: str = ""):
        self.error, self.calls = error, []

    def __call__(
        self, arguments: ctypes.Structure, blocks: int = 0, overlap: bool = True
    ) -> None:
        if self.error:
            raise nvrtc.Unavailable(self.error)
        self.calls.append(arguments)


def struct_members(name: str, source: str) -> list[tuple[str, type]]:
    """Return the members of a CUDA structure, those of its base classes first."""
    pattern = rf"struct {name}(?: : ([\w, ]+))? {{(.*?)}};"
    bases, body = re.search(pattern, source, re.S).groups()
    members: list[tuple[str, type]] = []
    for base in (bases or "").split(", "):
        members += struct_members(base, source) if base else []
    for line in re.sub(r"//.*", "", body).split(";"):
        if "*" in line:
            names = re.sub(r"^\s*(const )?\w+\s*", "", line.strip())
            members += [(x.strip(" *\n"), ctypes.c_void_p) for x in names.split(",")]
        elif line.strip():
            kind, _, names = line.strip().partition(" ")
            number = {"int": ctypes.c_int, "float": ctypes.c_float}[kind]
            members += [(x.strip(), number) for x in names.split(",")]
    return members
