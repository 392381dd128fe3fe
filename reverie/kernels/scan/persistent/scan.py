"""The host's side of the persistent scan: room for its exchanges, and the launches.

The kernels scan 16 rows; a larger batch is scanned 16 by 16, and the caller pads an odd
one. `common.cu` says how they work. The order in which `_arguments` are named here is
that of the structures there.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Mapping
from importlib import resources
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool
from torch import Tensor

from reverie.kernels import nvrtc
from reverie.kernels.scan import loop as scan_loop
from reverie.kernels.scan.loop import (
    Inputs,
    ScanWeights,
    Settings,
    Slopes,
    Sums,
    Tape,
    pack,
)

ROWS = 16
"""A batch may have any multiple of these."""
BLOCKS, THREADS = 128, 256
DETER, UNITS, GROUPS, CHOICES, CLASSES = 2048, 256, 8, 32, 16  # size12m
LOGITS = CHOICES * CLASSES
SHARED_FORWARD = 8 * ROWS * 40 * 4 + LOGITS * 34 * 2
SHARED_BACKWARD = 8 * ROWS * (24 + 24 + 56) * 4
SUMS = [DETER, DETER, 3 * DETER, *[UNITS] * 5, LOGITS]
"""Widths of `Sums`, side by side."""
LINE = 32  # words of 4 bytes between the rows of a sum over the grid
EMPTY = -1
"""All bits set, in every word that one block of threads waits for."""


_refused: list[str] = []
"""Why a launch failed; from then on, the scan runs step by step."""


class Kernels(NamedTuple):
    forward: nvrtc.CooperativeKernel
    backward: nvrtc.CooperativeKernel


def fits(weights: ScanWeights, inputs: Inputs) -> bool:
    """Whether there are kernels for these sizes, this dtype and this GPU.

    They give no gradient for the state before the first step.
    """
    like = inputs.actions
    wanted = inputs.deter.requires_grad or inputs.stoch.requires_grad
    return (
        like.is_cuda
        and like.dtype == torch.bfloat16
        and inputs.clocks.dtype == torch.float32
        and not (wanted and torch.is_grad_enabled())
        and weights.dyngru.weight.shape == (GROUPS, UNITS, 3 * UNITS)
        and weights.obs0.weight.shape == (UNITS, DETER)
        and inputs.clocks.shape[2:] == (CHOICES, CLASSES)
        and not _refused
        and kernels(like.device) is not None
    )


@functools.cache
def kernels(device: torch.device) -> Kernels | None:
    """Both kernels, compiled for `device`; None where they cannot run."""
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 9 or properties.multi_processor_count < BLOCKS:
        return None
    try:
        forward, backward = nvrtc.load(
            source(), ("scan_forward", "scan_backward"), device
        )
        return Kernels(
            nvrtc.CooperativeKernel(forward, BLOCKS, THREADS, SHARED_FORWARD),
            nvrtc.CooperativeKernel(backward, BLOCKS, THREADS, SHARED_BACKWARD),
        )
    except nvrtc.Unavailable as error:
        _refuse(error)
        return None


def source() -> str:
    folder = resources.files(__package__)
    names = ("numbers.cu", "common.cu", "forward.cu", "backward.cu")
    return "\n".join(folder.joinpath(name).read_text() for name in names)


def run_forward(weights: ScanWeights, inputs: Inputs, settings: Settings) -> Tape:
    in0, in1, hid, gru, obs, logit = _solid(weights)
    batch, length = inputs.reset.shape
    groups, like = batch // ROWS, inputs.actions
    deters, prehid, pre1, shared = _emptied(
        like.device,
        torch.bfloat16,
        *((groups, length, ROWS, x) for x in (DETER, DETER, UNITS, 3 * UNITS)),
    )
    shares, squares, choices = _emptied(
        like.device,
        torch.float32,
        (groups, length, GROUPS, ROWS, 2 * UNITS),
        (groups, length, ROWS, LINE),
        (groups, length, ROWS, CHOICES),
    )
    widths = (LOGITS, LOGITS, DETER, LOGITS, UNITS, 3 * DETER, UNITS, DETER, UNITS)
    stochs, logits, deter, stoch, pre0, gates, preobs, hidden, seen = (
        like.new_empty(groups, length, ROWS, width) for width in widths
    )
    inverse = torch.empty(groups, length, ROWS, 4, device=like.device)
    shared[..., 2 * UNITS :] = rearrange(inputs.actions, "(n r) t u -> n t r u", r=ROWS)
    start = inputs.reset[:, :1]
    for state, kept, layer, pre in (
        (inputs.deter, deter, in0, pre0),
        (inputs.stoch, stoch, in1, pre1),
    ):
        first = state.masked_fill(start, 0)
        kept[:, 0] = first.view(groups, ROWS, -1)
        pre[:, 0] = F.linear(first, layer.weight, layer.bias).view(groups, ROWS, -1)

    fixed = {
        "in0": in0.weight,
        "in1": in1.weight,
        "hid": hid.weight,
        "gru": gru.weight,
        "obs": obs.weight,
        "logit": logit.weight,
        "in0_bias": in0.bias,
        "in1_bias": in1.bias,
        "gru_bias": gru.bias,
        "logit_bias": logit.bias,
        "in0_scale": in0.scale,
        "in1_scale": in1.scale,
        "hid_scale": hid.scale,
        "obs_scale": obs.scale,
    }
    grouped = {
        "hoisted": scan_loop.hoist(weights, inputs).view(groups, ROWS, length, -1),
        "tokens": inputs.tokens.contiguous().view(groups, ROWS, length, -1),
        "clocks": inputs.clocks.contiguous().view(groups, ROWS, length, -1),
        "reset": inputs.reset.contiguous().view(groups, ROWS, length),
        "pre0": pre0,
        "pre1": pre1,
        "shared": shared,
        "prehid": prehid,
        "deters": deters,
        "deter": deter,
        "stoch": stoch,
        "stochs": stochs,
        "hidden": hidden,
        "gates": gates,
        "preobs": preobs,
        "seen": seen,
        "logits": logits,
        "inverse": inverse,
        "shares": shares,
        "squares": squares,
        "choices": choices,
    }
    numbers = {
        "length": length,
        "obs_stride": obs.weight.stride(0),
        "eps": settings.eps,
        "unimix": settings.unimix,
    }
    found = kernels(like.device)
    assert found is not None
    try:
        for group in range(groups):
            found.forward(_arguments(fixed, grouped, numbers, group))
    except nvrtc.Unavailable as error:
        _refuse(error)
        return scan_loop.run_forward(weights, inputs, settings)
    return Tape(
        deters,
        stochs,
        logits,
        deter,
        stoch,
        pre0,
        pre1,
        prehid,
        gates,
        preobs,
        inverse,
        shared,
        hidden,
        seen,
    )


def run_backward(
    weights: ScanWeights,
    tape: Tape,
    reset: Bool[Tensor, "B T"],
    grads: tuple[Tensor, Tensor, Tensor],
    settings: Settings,
) -> Slopes:
    if tape.deters.dim() == 3:  # it was not this loop that went forth
        return scan_loop.run_backward(weights, tape, reset, grads, settings)
    in0, in1, hid, gru, obs, logit = _solid(weights)
    batch, length = reset.shape
    groups, like = batch // ROWS, tape.deters
    widths = (UNITS, UNITS, 3 * DETER, DETER)
    to_obs, to_in0, to_gates, before_norm = _emptied(
        like.device, torch.bfloat16, *((groups, length, ROWS, x) for x in widths)
    )
    obs_shares, in_shares, products = _emptied(
        like.device,
        torch.float32,
        (groups, length, ROWS, BLOCKS // ROWS, UNITS),
        (groups, length, GROUPS, ROWS, 2 * UNITS),
        (groups, length, ROWS, LINE),
    )
    to_in1, to_hid, to_logits = (
        like.new_empty(groups, length, ROWS, x) for x in (UNITS, DETER, LOGITS)
    )
    sums = torch.empty(groups, ROWS, sum(SUMS), device=like.device)

    fixed = {
        "in0": in0.weight,
        "in1": in1.weight,
        "hid": hid.weight,
        "gru": gru.weight,
        "obs": obs.weight,
        "logit": logit.weight,
        "in0_scale": in0.scale,
        "in1_scale": in1.scale,
        "hid_scale": hid.scale,
        "obs_scale": obs.scale,
    }
    grouped = {
        "pre0": tape.in0,
        "pre1": tape.in1,
        "prehid": tape.hid,
        "gates": tape.gates,
        "preobs": tape.obs,
        "logits": tape.logits,
        "deter": tape.deter,
        "inverse": tape.inverse,
        "reset": reset.contiguous().view(groups, ROWS, length),
        "from_deters": grads[0].contiguous().view(groups, ROWS, length, -1),
        "from_stochs": grads[1].contiguous().view(groups, ROWS, length, -1),
        "from_logits": grads[2].contiguous().view(groups, ROWS, length, -1),
        "to_obs": to_obs,
        "to_in0": to_in0,
        "to_gates": to_gates,
        "before_norm": before_norm,
        "obs_shares": obs_shares,
        "in_shares": in_shares,
        "products": products,
        "to_in1": to_in1,
        "to_hid": to_hid,
        "to_logits": to_logits,
        "sums": sums,
    }
    numbers = {
        "length": length,
        "obs_stride": obs.weight.stride(0),
        "unimix": settings.unimix,
    }
    found = kernels(like.device)
    assert found is not None
    try:
        for group in range(groups):
            found.backward(_arguments(fixed, grouped, numbers, group))
    except nvrtc.Unavailable as error:
        _refuse(error)
        return _run_backward_by_steps(weights, tape, reset, grads, settings)
    total = Sums(*torch.split(sums.sum((0, 1)), SUMS))
    return Slopes(
        to_in0, to_in1, to_hid, to_gates, to_obs, to_logits, total, None, None
    )


def _run_backward_by_steps(
    weights: ScanWeights,
    tape: Tape,
    reset: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    settings: Settings,
) -> Slopes:
    """The plain way back over this loop's tape."""
    folded = Tape(*(rearrange(x, "n t r w -> t (n r) w") for x in tape))
    slopes = scan_loop.run_backward(weights, folded, reset, grads, settings)
    names = ("in0", "in1", "hid", "gates", "obs", "logits")
    return slopes._replace(
        **{
            name: rearrange(getattr(slopes, name), "t (n r) w -> n t r w", r=ROWS)
            for name in names
        }
    )


def _refuse(error: nvrtc.Unavailable) -> None:
    _refused.append(str(error))
    warnings.warn(
        f"The posterior scan runs step by step; its one kernel cannot: {error}",
        RuntimeWarning,
        stacklevel=3,
    )


def _solid(weights: ScanWeights) -> ScanWeights:
    """Contiguous weights; the posterior's rows may be part of longer ones."""
    obs = weights.obs0.weight
    solid = pack([x.contiguous() for layer in weights for x in layer])
    if obs.stride(1) == 1 and obs.stride(0) % 2 == 0:
        solid = solid._replace(obs0=solid.obs0._replace(weight=obs))
    return solid


def _emptied(
    device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]
) -> list[Tensor]:
    """Tensors whose every word is EMPTY, filled at one go."""
    per_word = 4 // dtype.itemsize
    counts = [prod(shape) // per_word for shape in shapes]
    words = torch.full((sum(counts),), EMPTY, dtype=torch.int32, device=device)
    pieces = torch.split(words, counts)
    return [
        piece.view(dtype).view(shape)
        for piece, shape in zip(pieces, shapes, strict=True)
    ]


def _arguments(
    fixed: Mapping[str, Tensor],
    grouped: Mapping[str, Tensor],
    numbers: Mapping[str, int | float],
    group: int,
) -> ctypes.Structure:
    """The kernels' one argument, for one group of rows."""
    own = {key: value[group] for key, value in grouped.items()}
    return nvrtc.make_arguments({**fixed, **own}, numbers)
