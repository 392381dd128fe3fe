"""The host's side of the streamed scan: weights laid out for it, ten launches a step.

`steps.cu` has the kernels. The order in which arguments are named here is that of the
structures there.
"""

from __future__ import annotations

import functools
import warnings
from importlib import resources
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from reverie.kernels import nvrtc
from reverie.kernels.scan import loop as scan_loop
from reverie.kernels.scan.loop import (
    Inputs,
    ScanWeights,
    Settings,
    Slopes,
    Tape,
    hoist,
    new_tape,
)

ROWS = 1
"""A batch may have any multiple of these."""
THREADS, WARPS, NARROW, WINDOW = 256, 8, 8, 32
NAMES = ("hidden", "gates", "inputs", "posterior", "choices")
BACK = ("choices", "posterior", "gates", "hidden", "inputs")

_refused: list[str] = []
"""Why a launch failed; from then on, others do the work."""


class Cut(NamedTuple):
    """How the work is cut, and how much of it is under way at once."""

    core: int
    """Columns of a tile of the core."""
    hold: int
    """Loads of weights that a thread has under way."""
    resident: int
    """Blocks of threads that share a multiprocessor."""


CUT = Cut(32, 28, 1)
"""The quickest at every size, as measured on an H200: 64 steps of 16 rows take 4.4 ms
there and back at size50m, 8.0 at size100m and 11.9 at size200m; with two smaller blocks
on a multiprocessor, Cut(16, 12, 2), they take 5.0, 9.8 and 15.1."""
MOST = 1024
"""The widest blocks for which this is quicker than `scan_steps`, which takes 7.2, 12.1
and 15.5 ms there. Larger batches always are."""


class Sizes(NamedTuple):
    deter: int
    units: int
    groups: int
    choices: int
    classes: int

    @property
    def part(self) -> int:
        """Units of a row that one block adds up from the choices."""
        return 64 if self.units % 64 == 0 else 32


class Kernels(NamedTuple):
    forth: dict[str, nvrtc.OverlappingKernel]
    back: dict[str, nvrtc.OverlappingKernel]


def pays(weights: ScanWeights, inputs: Inputs) -> bool:
    """Whether this is the quickest way for these sizes, as measured on an H200."""
    return weights.dyngru.weight.shape[1] <= MOST or len(inputs.reset) > 16


def fits(weights: ScanWeights, inputs: Inputs) -> bool:
    """Whether there are kernels for these sizes, this dtype and this GPU."""
    like, size = inputs.actions, _sizes(weights, inputs.clocks)
    others = [x for layer in weights if layer is not weights.obs0 for x in layer]
    return (
        like.is_cuda
        and like.dtype == torch.bfloat16
        and inputs.clocks.dtype == weights.obs0.scale.dtype == torch.float32
        and size.units % WINDOW == 0
        and size.deter % (size.groups * WINDOW) == 0
        and size.choices * size.classes % WINDOW == 0
        and size.classes % 8 == 0
        and all(x.is_contiguous() for x in others)
        and not _refused
        and kernels(size, like.device) is not None
    )


@functools.cache
def kernels(size: Sizes, device: torch.device) -> Kernels | None:
    """All kernels, compiled for these sizes; None where they cannot run."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return None
    columns = CUT.core
    tiles, core = 2 * size.units // NARROW, size.deter // columns
    # blocks and columns of each; those of the last forth depend on the batch
    forth = {
        "hidden": (core, columns),
        "gates": (core, 3 * columns),
        "inputs": (tiles, NARROW),
        "posterior": (size.choices, size.classes),
        "choices": (0, NARROW),
    }
    back = {
        "hidden": (core, columns),
        "gates": (core, columns),
        "inputs": (tiles + core, columns),
        "posterior": (tiles // 2, NARROW),
        "choices": (size.choices, size.classes),
    }
    names = [f"step_{name}" for name in NAMES] + [f"back_{name}" for name in NAMES]
    try:
        found = dict(zip(names, nvrtc.load(source(size), names, device), strict=True))
        return Kernels(
            *(
                {
                    name: nvrtc.OverlappingKernel(
                        found[f"{side}_{name}"],
                        blocks,
                        THREADS,
                        WARPS * 16 * _pitch(wide) * 4,
                    )
                    for name, (blocks, wide) in plan.items()
                }
                for side, plan in (("step", forth), ("back", back))
            )
        )
    except nvrtc.Unavailable as error:
        _refuse(error)
        return None


def source(size: Sizes) -> str:
    sizes = {**size._asdict(), **CUT._asdict(), "part": size.part}
    values = ", ".join(f"{name.upper()} = {value}" for name, value in sizes.items())
    package = __package__.rpartition(".")[0]
    numbers = resources.files(f"{package}.persistent").joinpath("numbers.cu")
    steps = resources.files(f"{package}.streamed").joinpath("steps.cu")
    texts = (numbers.read_text(), f"constexpr int {values};\n", steps.read_text())
    return "\n".join(texts)


def run_forward(weights: ScanWeights, inputs: Inputs, settings: Settings) -> Tape:
    in0, in1, hid, gru, obs, logit = weights
    batch, length = inputs.reset.shape
    size, device = _sizes(weights, inputs.clocks), inputs.reset.device
    tape = new_tape(weights, inputs)
    width = size.deter // size.groups
    feed = hid.weight[:, : width + 2 * size.units]
    shares0, shares1 = _start(weights, inputs, tape, size.part)
    pointers = {  # held here until the last launch
        "hid": feed.transpose(1, 2).contiguous(),
        "gru": gru.weight.transpose(1, 2).contiguous(),
        "both": torch.cat([in0.weight, obs.weight]),
        "logit": logit.weight,
        "in1": in1.weight.T.contiguous(),
        "in0_bias": in0.bias,
        "in1_bias": in1.bias,
        "gru_bias": gru.bias,
        "logit_bias": logit.bias,
        "in0_scale": in0.scale,
        "in1_scale": in1.scale,
        "hid_scale": hid.scale,
        "obs_scale": obs.scale,
        "hoisted": hoist(weights, inputs),
        "tokens": inputs.tokens.contiguous(),
        "clocks": inputs.clocks.contiguous(),
        "reset": inputs.reset.contiguous(),
        "deters": tape.deters,
        "stochs": tape.stochs,
        "logits": tape.logits,
        "deter": tape.deter,
        "stoch": tape.stoch,
        "pre0": tape.in0,
        "pre1": tape.in1,
        "prehid": tape.hid,
        "gates": tape.gates,
        "preobs": tape.obs,
        "inverse": tape.inverse,
        "shared": tape.shared,
        "hidden": tape.hidden,
        "seen": tape.seen,
        "shares0": shares0,
        "shares1": shares1,
        "shares2": torch.empty(batch, size.deter // CUT.core, device=device),
        "shares3": torch.empty(batch, size.units // NARROW, device=device),
        "choices": torch.empty(batch, size.choices, dtype=torch.int32, device=device),
    }
    numbers = {
        "t": 0,
        "length": length,
        "batch": batch,
        "eps": settings.eps,
        "unimix": settings.unimix,
    }
    arguments = nvrtc.make_arguments(pointers, numbers)
    found = kernels(size, device)
    assert found is not None
    try:
        for t in range(length):
            arguments.t = t
            for name in NAMES[:-1]:  # the weights are there once the first has started
                found.forth[name](arguments, overlap=t > 0 or name != NAMES[0])
            if t + 1 < length:
                found.forth["choices"](arguments, batch * size.units // size.part)
    except nvrtc.Unavailable as error:
        _refuse(error)
        return scan_loop.run_forward(weights, inputs, settings)
    return tape


def run_backward(
    weights: ScanWeights,
    tape: Tape,
    reset: Bool[Tensor, "B T"],
    grads: tuple[Tensor, Tensor, Tensor],
    settings: Settings,
) -> Slopes:
    from reverie.kernels.scan.triton_steps import slopes_of

    in0, in1, hid, gru, obs, logit = weights
    batch, length = reset.shape
    flat = weights.obslogit.weight.shape[0]
    stoch = flat // settings.classes
    units, deter = obs.weight.shape
    size = Sizes(deter, units, len(gru.weight), stoch, settings.classes)
    to_logits, to_gates = torch.empty_like(tape.logits), torch.empty_like(tape.gates)
    to_obs, to_hid = torch.empty_like(tape.obs), torch.empty_like(tape.hid)
    to_in = tape.obs.new_empty(length, batch, 2 * units)
    carry = torch.zeros(batch, deter, device=reset.device)
    shares = [
        torch.empty(batch, count, device=reset.device)
        for count in (units // NARROW, units // NARROW, deter // CUT.core)
    ]
    pointers = {  # held here until the last launch
        "in1": in1.weight.T.contiguous(),
        "logit": logit.weight.T.contiguous(),
        "both": torch.cat([in0.weight.T, obs.weight.T], 1),
        "gru": gru.weight,
        "hid": hid.weight,
        "in0_scale": in0.scale,
        "in1_scale": in1.scale,
        "hid_scale": hid.scale,
        "obs_scale": obs.scale,
        "from_deters": grads[0].contiguous(),
        "from_stochs": grads[1].contiguous(),
        "from_logits": grads[2].contiguous(),
        "reset": reset.contiguous(),
        "logits": tape.logits,
        "deter": tape.deter,
        "pre0": tape.in0,
        "pre1": tape.in1,
        "prehid": tape.hid,
        "gates": tape.gates,
        "preobs": tape.obs,
        "inverse": tape.inverse,
        "to_logits": to_logits,
        "to_gates": to_gates,
        "to_obs": to_obs,
        "to_hid": to_hid,
        "to_in": to_in,
        "carry": carry,
        "shares0": shares[0],
        "shares1": shares[1],
        "shares2": shares[2],
        "shares3": torch.empty_like(shares[0]),
    }
    numbers = {"t": 0, "length": length, "batch": batch, "unimix": settings.unimix}
    arguments = nvrtc.make_arguments(pointers, numbers)
    found = kernels(size, reset.device)
    assert found is not None
    try:
        for t in reversed(range(length)):
            arguments.t = t
            for name in BACK:
                found.back[name](arguments, overlap=t + 1 < length or name != BACK[0])
    except nvrtc.Unavailable as error:
        _refuse(error)
        return scan_loop.run_backward(weights, tape, reset, grads, settings)
    return slopes_of(
        weights, tape, reset, to_in, to_hid, to_obs, to_gates, to_logits, carry
    )


def _sizes(weights: ScanWeights, clocks: Tensor) -> Sizes:
    units, deter = weights.obs0.weight.shape
    groups = weights.dyngru.weight.shape[0]
    return Sizes(deter, units, groups, clocks.shape[2], clocks.shape[3])


def _start(
    weights: ScanWeights, inputs: Inputs, tape: Tape, part: int
) -> tuple[Tensor, Tensor]:
    """The state before the first step; the sums of squares of what it reads of it."""
    start = inputs.reset[:, :1]
    tape.deter[0] = inputs.deter.masked_fill(start, 0)
    tape.stoch[0] = inputs.stoch.masked_fill(start, 0)
    in0, in1 = weights.dynin0, weights.dynin1
    torch.addmm(in0.bias, tape.deter[0], in0.weight.T, out=tape.in0[0])
    torch.addmm(in1.bias, tape.stoch[0], in1.weight.T, out=tape.in1[0])
    shares = (len(start), -1)
    squares0, squares1 = (x[0].float().square() for x in (tape.in0, tape.in1))
    squares0, squares1 = squares0.view(*shares, NARROW), squares1.view(*shares, part)
    return squares0.sum(-1), squares1.sum(-1)


def _pitch(columns: int) -> int:
    """Distance of rows in shared memory, as in `Tile`."""
    return columns + (24 - columns % 16) % 16


def _refuse(error: nvrtc.Unavailable) -> None:
    _refused.append(str(error))
    warnings.warn(
        f"The posterior scan takes a slower way; its kernels cannot run: {error}",
        RuntimeWarning,
        stacklevel=3,
    )
