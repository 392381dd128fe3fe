"""The loop of the posterior scan as five fused kernels a step, forth and back.

For every size, dtype and batch whose widths are multiples of 16; `scan_kernels` has the
kernels. What remains of the loop here is the order in which they follow each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from jaxtyping import Bool
from torch import Tensor

from reverie.kernels.launch import can_launch
from reverie.kernels.scan import triton_kernels as scan_kernels
from reverie.kernels.scan.loop import (
    Inputs,
    ScanWeights,
    Settings,
    Slopes,
    Sums,
    Tape,
    hoist,
    new_tape,
)

ROWS = 1
"""A batch may have any multiple of these."""
LEAST = 16
"""The smallest side of a product."""
BUDGET = 24 * 1024
"""Bytes that a program reads at a time, about; it has a few such loads in flight."""
OPTIONS = {"num_stages": 4, "num_warps": 4}
COLUMNS = 32
"""Of a tile of the core, at most."""


class Plan(NamedTuple):
    """Sizes, and how they are cut into tiles."""

    deter: int
    units: int
    width: int
    stoch: int
    classes: int
    rows: int
    """Of a tile."""
    columns: int
    """Of a tile of the core."""
    inputs: int
    """Of a tile of the layers around it."""
    gather: int
    """Of a tile of the layer that reads the choices."""
    precision: str
    itemsize: int

    def depth(self, width: int, columns: int) -> int:
        """Inputs that a tile reads at a time, out of `width`."""
        wanted = BUDGET // (self.itemsize * (self.rows + columns))
        return max(LEAST, _largest(width, 1 << wanted.bit_length() - 1))

    @property
    def logits(self) -> int:
        return self.stoch * self.classes

    @property
    def labels(self) -> int:
        """Classes of a choice, as a power of two."""
        return int(triton.next_power_of_2(self.classes))

    @property
    def choices(self) -> int:
        """Choices of a tile of the posterior."""
        return max(1, LEAST // self.labels)


def fits(weights: ScanWeights, inputs: Inputs) -> bool:
    """Whether the kernels take these weights; obs0 alone may be part of another."""
    widths = (*weights.obs0.weight.shape, *weights.dyngru.weight.shape[1:])
    clocks = inputs.clocks
    flat = clocks.shape[2] * clocks.shape[3]
    others = [x for layer in weights if layer is not weights.obs0 for x in layer]
    return (
        can_launch(inputs.actions.device, inputs.actions.dtype)
        and clocks.dtype == weights.obs0.scale.dtype == torch.float32
        and all(width % LEAST == 0 for width in (*widths, flat))
        and all(x.is_contiguous() for x in others)
    )


def run_forward(weights: ScanWeights, inputs: Inputs, settings: Settings) -> Tape:
    in0, in1, hid, gru, obs, logit = weights
    plan = _plan(weights, settings, inputs.reset)
    tape, hoisted = new_tape(weights, inputs), hoist(weights, inputs)
    batch, length = inputs.reset.shape
    both, across = _both(weights), in1.weight.T.contiguous()
    tokens, clocks = inputs.tokens.contiguous(), inputs.clocks.contiguous()
    reset = inputs.reset.contiguous().view(torch.uint8)
    share = _shares(plan, inputs.reset)
    choices = torch.empty(batch, plan.stoch, dtype=torch.int32, device=reset.device)
    _start(weights, inputs, tape, share)
    grid = triton.cdiv(batch, plan.rows)
    width, units, deter = plan.width, plan.units, plan.deter
    eps, unimix, tall = settings.eps, settings.unimix, plan.rows
    for t in range(length):
        when = (t, length, batch)
        scan_kernels.hidden_kernel[(deter // plan.columns, grid)](
            *(tape.deter, tape.in0, tape.in1, in0.scale, in1.scale),
            *(share.in0, share.in1, hoisted, hid.weight),
            *(tape.hid, share.hid, tape.shared, tape.inverse, *when, eps),
            *(deter, units, width, *_count(share.in0), *_count(share.in1)),
            *(tall, plan.columns, plan.depth(width, plan.columns)),
            *(plan.depth(units, plan.columns), plan.precision),
            **OPTIONS,
        )
        scan_kernels.gates_kernel[(deter // plan.columns, grid)](
            *(tape.hid, hid.scale, share.hid, gru.weight, gru.bias, tape.deter, reset),
            *(tape.gates, tape.deters, tape.hidden, tape.inverse, *when, eps),
            *(deter, width, *_count(share.hid)),
            *(tall, plan.columns, plan.depth(width, 3 * plan.columns), plan.precision),
            **OPTIONS,
        )
        scan_kernels.inputs_kernel[(2 * units // plan.inputs, grid)](
            *(tape.deters, both, in0.bias, tokens, reset),
            *(tape.in0, tape.obs, share.in0, share.obs, *when),
            *(deter, units, tall, plan.inputs),
            *(plan.depth(deter, plan.inputs), plan.precision),
            **OPTIONS,
        )
        scan_kernels.posterior_kernel[(triton.cdiv(plan.stoch, plan.choices), grid)](
            *(tape.obs, obs.scale, share.obs, logit.weight, logit.bias, clocks, reset),
            *(tape.logits, tape.stochs, tape.stoch, choices, tape.seen, tape.inverse),
            *(*when, eps, unimix, units, plan.stoch, plan.classes, *_count(share.obs)),
            *(tall, plan.choices, plan.labels),
            *(plan.depth(units, plan.choices * plan.labels), plan.precision),
            **OPTIONS,
        )
        if t + 1 < length:
            scan_kernels.choices_kernel[(batch, units // plan.gather)](
                *(choices, across, in1.bias, reset, tape.in1, share.in1, *when),
                *(units, plan.stoch, plan.classes),
                *(triton.next_power_of_2(plan.stoch), plan.gather),
                **OPTIONS,
            )
    return tape


def run_backward(
    weights: ScanWeights,
    tape: Tape,
    reset: Bool[Tensor, "B T"],
    grads: tuple[Tensor, Tensor, Tensor],
    settings: Settings,
) -> Slopes:
    in0, in1, hid, gru, obs, logit = weights
    plan = _plan(weights, settings, reset)
    batch, length = reset.shape
    both, starts = _both(weights), reset.contiguous().view(torch.uint8)
    share = _shares(plan, reset)
    share = share._replace(in1=torch.empty_like(share.in0))
    ddeters, dstochs, dlogits = (x.contiguous() for x in grads)
    # behind the norms; what was before them follows after the loop
    gobs, ghid = torch.empty_like(tape.obs), torch.empty_like(tape.hid)
    gin = tape.obs.new_empty(length, batch, 2 * plan.units)
    to_gates, to_logits = torch.empty_like(tape.gates), torch.empty_like(tape.logits)
    carry = torch.zeros(batch, plan.deter, device=reset.device)
    grid = triton.cdiv(batch, plan.rows)
    width, units, deter, flat = plan.width, plan.units, plan.deter, plan.logits
    unimix, tall, precision = settings.unimix, plan.rows, plan.precision
    for t in reversed(range(length)):
        when = (t, length, batch)
        scan_kernels.choices_backward[(triton.cdiv(plan.stoch, plan.choices), grid)](
            *(gin, tape.in1, in1.scale, share.in1, tape.inverse, starts, in1.weight),
            *(tape.logits, dstochs, dlogits, to_logits, *when, unimix),
            *(units, plan.stoch, plan.classes, *_count(share.in1), tall, plan.choices),
            *(plan.labels, plan.depth(units, plan.choices * plan.labels), precision),
            **OPTIONS,
        )
        scan_kernels.posterior_backward[(units // plan.inputs, grid)](
            *(to_logits, logit.weight, tape.obs, obs.scale, tape.inverse),
            *(gobs, share.obs, *when),
            *(units, flat, tall, plan.inputs, plan.depth(flat, plan.inputs), precision),
            **OPTIONS,
        )
        scan_kernels.gates_backward[(deter // plan.columns, grid)](
            *(gobs, tape.obs, obs.scale, share.obs, gin, tape.in0, in0.scale),
            *(share.in0, tape.inverse, starts, both, ddeters, tape.gates, tape.deter),
            *(carry, to_gates, *when, deter, units, width),
            *(*_count(share.obs), *_count(share.in0)),
            *(tall, plan.columns, plan.depth(units, plan.columns), precision),
            **OPTIONS,
        )
        scan_kernels.hidden_backward[(deter // plan.columns, grid)](
            *(to_gates, gru.weight, tape.hid, hid.scale, tape.inverse),
            *(ghid, share.hid, *when, deter, width),
            *(tall, plan.columns, plan.depth(3 * width, plan.columns), precision),
            **OPTIONS,
        )
        scan_kernels.inputs_backward[((2 * units + deter) // plan.inputs, grid)](
            *(ghid, tape.hid, hid.scale, share.hid, tape.inverse, starts, hid.weight),
            *(tape.in0, tape.in1, in0.scale, in1.scale, gin, share.in0, share.in1),
            *(carry, *when, deter, units, width, *_count(share.hid)),
            *(tall, plan.inputs, plan.depth(width, plan.inputs), precision),
            **OPTIONS,
        )
    return slopes_of(weights, tape, reset, gin, ghid, gobs, to_gates, to_logits, carry)


def slopes_of(
    weights: ScanWeights,
    tape: Tape,
    reset: Tensor,
    gin: Tensor,
    ghid: Tensor,
    gobs: Tensor,
    to_gates: Tensor,
    to_logits: Tensor,
    carry: Tensor,
) -> Slopes:
    """All slopes, from those behind the norms (`g`) and what else the loop leaves."""
    in0, in1, hid, _, obs, _ = weights
    units = tape.in0.shape[-1]
    to_in0, scale0, bias0 = _finish(gin, tape.in0, in0.scale, tape.inverse, 0)
    to_in1, scale1, bias1 = _finish(
        gin[..., units:], tape.in1, in1.scale, tape.inverse, 1
    )
    to_hid, scale2, bias2 = _finish(ghid, tape.hid, hid.scale, tape.inverse, 2)
    to_obs, scale3, _ = _finish(gobs, tape.obs, obs.scale, tape.inverse, 3)
    start = reset[:, :1]
    ddeter = carry + (to_in0[0] @ in0.weight).float().masked_fill(start, 0)
    dstoch = (to_in1[0] @ in1.weight).masked_fill(start, 0)
    gates, logits = (x.flatten(0, 1).sum(0) for x in (to_gates, to_logits))
    return Slopes(
        to_in0,
        to_in1,
        to_hid,
        to_gates,
        to_obs,
        to_logits,
        Sums(scale2, bias2, gates, scale0, bias0, scale1, bias1, scale3, logits),
        ddeter,
        dstoch,
    )


class _Shares(NamedTuple):
    """Room for every tile's share of a sum over its rows: (tiles, batch)."""

    in0: Tensor
    in1: Tensor
    hid: Tensor
    obs: Tensor


def _plan(weights: ScanWeights, settings: Settings, reset: Tensor) -> Plan:
    units, deter = weights.obs0.weight.shape
    width, flat = weights.dyngru.weight.shape[1], weights.obslogit.weight.shape[0]
    rows = min(64, max(LEAST, triton.next_power_of_2(len(reset))))
    exact = weights.obs0.weight.dtype == torch.float32
    return Plan(
        deter,
        units,
        width,
        flat // settings.classes,
        settings.classes,
        rows,
        columns=_largest(width, COLUMNS),
        inputs=LEAST,
        gather=_largest(units, 64),
        precision="ieee" if exact else "tf32",
        itemsize=weights.obs0.weight.itemsize,
    )


def _shares(plan: Plan, like: Tensor) -> _Shares:
    batch = len(like)
    counts = (
        plan.units // plan.inputs,
        plan.units // plan.gather,
        plan.deter // plan.columns,
        plan.units // plan.inputs,
    )
    return _Shares(*(torch.empty(n, batch, device=like.device) for n in counts))


def _start(weights: ScanWeights, inputs: Inputs, tape: Tape, share: _Shares) -> None:
    """The state before the first step, and what the first step reads of it."""
    start = inputs.reset[:, :1]
    tape.deter[0] = inputs.deter.masked_fill(start, 0)
    tape.stoch[0] = inputs.stoch.masked_fill(start, 0)
    for state, layer, pre, shares in (
        (tape.deter, weights.dynin0, tape.in0, share.in0),
        (tape.stoch, weights.dynin1, tape.in1, share.in1),
    ):
        torch.addmm(layer.bias, state[0], layer.weight.T, out=pre[0])
        tiles = pre[0].float().square().view(len(start), len(shares), -1)
        shares.copy_(tiles.sum(-1).T)


def _finish(
    grad: Tensor, pre: Tensor, scale: Tensor, inverse: Tensor, which: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients before a norm, of its scale, and of the bias before it."""
    width, count = pre.shape[-1], pre.shape[0] * pre.shape[1]
    apart = grad.stride(1)
    out, scales, biases = torch.empty_like(pre), *scale.new_empty(2, width)
    scan_kernels.norm_rows[(count,)](
        *(grad, pre, scale, inverse, out, which, width, apart),
        min(1024, triton.next_power_of_2(width)),
    )
    scan_kernels.norm_columns[(triton.cdiv(width, 64),)](
        *(grad, pre, inverse, out, scales, biases, which, count, width, apart, 32, 64)
    )
    return out, scales, biases


def _both(weights: ScanWeights) -> Tensor:
    """What reads a new state, as one matrix: dynin0 above obs0."""
    return torch.cat([weights.dynin0.weight, weights.obs0.weight])


def _count(shares: Tensor) -> tuple[int, int]:
    return len(shares), triton.next_power_of_2(len(shares))


def _largest(width: int, most: int) -> int:
    """The largest power of two that divides a width, up to `most`."""
    return min(most, width & -width)
