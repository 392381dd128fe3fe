"""The posterior scan of the RSSM, rearranged so that little is left inside its loop.

Only deter -> deter and stoch -> deter are recurrent. What depends on actions and
observations alone arrives already projected, for all steps at once; the share of the
hidden layer that reads the actions is one product before the loop. Backward, the loop
carries data gradients only; each weight gradient is one product over all B * T rows
after it.

The loop comes in four forms: plain operations (`scan_loop`), a few fused kernels a step
in Triton (`scan_steps`) or in CUDA, where weights stream in ahead of their use
(`streamed`), and one kernel that stays on the GPU for the whole sequence
(`persistent`). They leave the same tape behind.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from reverie.kernels.scan import loop as scan_loop
from reverie.kernels.scan.loop import (
    Dense,
    Inputs,
    Normed,
    ScanWeights,
    Settings,
    Slopes,
    Tape,
    Unbiased,
    acted_rows,
    pack,
)
from reverie.kernels.scan.persistent import scan as persistent
from reverie.kernels.scan.streamed import scan as streamed

__all__ = ["Dense", "Normed", "ScanWeights", "Unbiased", "scan"]


def scan(
    weights: ScanWeights,
    deter: Float[Tensor, "B D"],
    stoch: Float[Tensor, "B S K"],
    actions: Float[Tensor, "B T U"],
    tokens: Float[Tensor, "B T U"],
    reset: Bool[Tensor, "B T"],
    noise: Float[Tensor, "B T S K"],
    unimix: float,
    eps: float,
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T S K"], Float[Tensor, "B T S K"]]:
    """Deterministic halves, choices and logits of every step of a sequence.

    `actions` are embedded; `tokens` are the observation's share of obs0, bias included.
    `noise` holds exponential clocks: the class whose clock, run at the rate of its
    probability, rings first is chosen. Choices carry the gradient of the probabilities.
    """
    inputs = Inputs(deter, stoch.flatten(1), actions, tokens, reset, noise)
    settings = Settings(noise.shape[-1], unimix, eps)
    return run(choose(weights, inputs), weights, inputs, settings)


def choose(weights: ScanWeights, inputs: Inputs) -> ModuleType:
    """The fastest form of the loop that takes these weights and inputs."""
    if persistent.fits(weights, inputs):
        return persistent
    if inputs.actions.is_cuda:
        # Triton comes with CUDA alone
        from reverie.kernels.scan import triton_steps as scan_steps

        if streamed.pays(weights, inputs) and streamed.fits(weights, inputs):
            return streamed
        if scan_steps.fits(weights, inputs):
            return scan_steps
    return scan_loop


def run(
    loop: ModuleType, weights: ScanWeights, inputs: Inputs, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Scan by the given form of the loop."""
    batch, flat = len(inputs.reset), [tensor for layer in weights for tensor in layer]
    inputs = _padded(inputs, loop.ROWS)
    deters, stochs, logits = _Scan.apply(  # type: ignore[no-untyped-call]
        loop, settings, *inputs, *flat
    )
    shape = inputs.clocks.shape
    return deters[:batch], stochs.view(shape)[:batch], logits.view(shape)[:batch]


def _padded(inputs: Inputs, rows: int) -> Inputs:
    """A whole number of groups of rows; those made up are zero, with clocks of one."""
    missing = -len(inputs.reset) % rows
    if not missing:
        return inputs
    return Inputs._make(
        F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing), value=x is inputs.clocks)
        for x in inputs
    )


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loop: ModuleType, settings: Settings, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = Inputs(*tensors[: len(Inputs._fields)])
        flat = tensors[len(inputs) :]
        tape = loop.run_forward(pack(flat), inputs, settings)
        ctx.loop, ctx.settings = loop, settings
        ctx.save_for_backward(inputs.reset, *tape, *flat)
        batch = len(inputs.reset)
        deters, stochs, logits = (_by_row(x, batch).contiguous() for x in tape[:3])
        return deters, stochs, logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        reset, *rest = ctx.saved_tensors
        tape, batch = Tape(*rest[: len(Tape._fields)]), len(reset)
        weights = pack(rest[len(tape) :])
        slopes = ctx.loop.run_backward(weights, tape, reset, grads, ctx.settings)
        found = spread(weights, tape, slopes)
        flat = [
            grad.to(value.dtype)
            for layer, owner in zip(found, weights, strict=True)
            for grad, value in zip(layer, owner, strict=True)
        ]
        dtype = tape.deters.dtype
        states = [x if x is None else x.to(dtype) for x in (slopes.deter, slopes.stoch)]
        actions = _by_row(slopes.hid @ acted_rows(weights).T, batch)
        tokens = _by_row(slopes.obs, batch)
        return (None, None, *states, actions, tokens, None, None, *flat)


def _by_row(x: Float[Tensor, "*n T R F"], batch: int) -> Float[Tensor, "B T F"]:
    """From the order of the loop (steps of R rows, for groups of rows) to (B, T)."""
    rows = x.reshape(-1, *x.shape[-3:]).transpose(1, 2)
    return rows.reshape(batch, *rows.shape[2:])


def spread(weights: ScanWeights, tape: Tape, slopes: Slopes) -> ScanWeights:
    """Gradients of every weight, each from all steps at once."""
    blocks, sums = weights.dyngru.weight.shape[0], slopes.sums
    din0, din1, dhid, dgates, dobs, dlogits = (x.flatten(0, -2) for x in slopes[:6])
    deters, stoch, deter = tape.deters, tape.stoch, tape.deter
    deters, stoch, deter = (x.flatten(0, -2) for x in (deters, stoch, deter))
    shared, hidden, seen = tape.shared, tape.hidden, tape.seen
    shared, hidden, seen = (x.flatten(0, -2) for x in (shared, hidden, seen))
    by_block = rearrange(dhid, "n (g o) -> g n o", g=blocks)
    hid, own = torch.empty_like(weights.dynhid0.weight), by_block.shape[-1]
    before = rearrange(deter, "n (g i) -> g i n", g=blocks)
    torch.bmm(before, by_block, out=hid[:, :own])
    torch.bmm(shared.T.expand(blocks, -1, -1), by_block, out=hid[:, own:])
    gru = torch.bmm(
        rearrange(hidden, "n (g i) -> g i n", g=blocks),
        rearrange(dgates, "n (g o) -> g n o", g=blocks),
    )
    return ScanWeights(
        dynin0=Normed(din0.T @ deter, sums.in0_bias, sums.in0_scale),
        dynin1=Normed(din1.T @ stoch, sums.in1_bias, sums.in1_scale),
        dynhid0=Normed(hid, sums.hid_bias, sums.hid_scale),
        dyngru=Dense(gru, sums.gates),
        obs0=Unbiased(dobs.T @ deters, sums.obs_scale),
        obslogit=Dense(dlogits.T @ seen, sums.logits),
    )
