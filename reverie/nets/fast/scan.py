"""The posterior scan of the RSSM, rearranged so that little is left inside its loop.

Only deter -> deter and stoch -> deter are recurrent. What depends on actions and
observations alone arrives already projected, for all steps at once; the share of the
hidden layer that reads the actions is one product before the loop. Backward, the loop
carries data gradients only; each weight gradient is one product over all B * T rows
after it. Everything is laid out (B, T, ...), so a step is a view of a longer tensor and
nothing is stacked or copied.

`U` is the width of the layers around the core, `G` the number of its blocks, `L` all
classes of all choices, `J` all gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable


class Dense(NamedTuple):
    """A layer without a norm behind it."""

    weight: Tensor
    bias: Tensor


class Normed(NamedTuple):
    """A layer, and the scale of the RMS norm behind it."""

    weight: Tensor
    bias: Tensor
    scale: Tensor


class Unbiased(NamedTuple):
    """The deterministic half of the posterior's layer: its bias came with the tokens.

    The norm behind it sees the sum of both halves.
    """

    weight: Tensor
    scale: Tensor


class ScanWeights(NamedTuple):
    """The recurrent layers under the names of `Dynamics`.

    Weights and biases are in the compute dtype, scales in float32 or wider.
    """

    dynin0: Normed
    """(U, D): reads the deterministic half."""
    dynin1: Normed
    """(U, S * K): reads the choices."""
    dynhid0: Normed
    """(G, D / G + 3 U, D / G): reads a block of deter, both above, the action."""
    dyngru: Dense
    """(G, D / G, 3 D / G): reset, candidate, update."""
    obs0: Unbiased
    """(U, D): the columns that read deter."""
    obslogit: Dense
    """(S * K, U): the choices' logits."""


class Sizes(NamedTuple):
    batch: int
    length: int
    deter: int
    units: int
    blocks: int
    stoch: int
    classes: int


class Tape(NamedTuple):
    """What one pass leaves for the way back: the values before each norm and gate."""

    deter: Float[Tensor, "B T D"]
    """What the step started from, zero after a reset."""
    stoch: Float[Tensor, "B T L"]
    """Likewise, as one-hot vectors side by side."""
    in0: Float[Tensor, "B T U"]
    in1: Float[Tensor, "B T U"]
    hid: Float[Tensor, "B T D"]
    gates: Float[Tensor, "B T J"]
    obs: Float[Tensor, "B T U"]
    deters: Float[Tensor, "B T D"]
    """The results."""
    stochs: Float[Tensor, "B T L"]
    logits: Float[Tensor, "B T L"]


class Slopes(NamedTuple):
    """Gradients of the values on the tape, and of what only the loop can know."""

    in0: Float[Tensor, "B T U"]
    in1: Float[Tensor, "B T U"]
    hid: Float[Tensor, "B T D"]
    gates: Float[Tensor, "B T J"]
    obs: Float[Tensor, "B T U"]
    logits: Float[Tensor, "B T L"]
    scales: tuple[Tensor, Tensor, Tensor, Tensor]
    """Of the norms of dynin0, dynin1, dynhid0 and obs0."""
    deter: Float[Tensor, "B D"]
    """Of the state before the first step."""
    stoch: Float[Tensor, "B L"]


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
    flat = [tensor for layer in weights for tensor in layer]
    deters, stochs, logits = _Scan.apply(  # type: ignore[no-untyped-call]
        deter, stoch.flatten(1), actions, tokens, reset, noise, unimix, eps, *flat
    )
    shape = noise.shape
    return deters, stochs.reshape(shape), logits.reshape(shape)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        deter: Tensor,
        stoch: Tensor,
        actions: Tensor,
        tokens: Tensor,
        reset: Tensor,
        noise: Tensor,
        unimix: float,
        eps: float,
        *flat: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = _pack(flat)
        tape = run_forward(
            weights, deter, stoch, actions, tokens, reset, noise, unimix, eps
        )
        ctx.save_for_backward(actions, reset, *flat, *tape)
        ctx.settings = (noise.shape[-1], unimix, eps)
        return tape.deters, tape.stochs, tape.logits

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, ddeters: Tensor, dstochs: Tensor, dlogits: Tensor
    ) -> tuple[Tensor | None, ...]:
        actions, reset, *rest = ctx.saved_tensors
        count = len(rest) - len(Tape._fields)
        weights, tape = _pack(rest[:count]), Tape(*rest[count:])
        slopes = run_backward(
            weights, tape, reset, ddeters, dstochs, dlogits, *ctx.settings
        )
        dactions, dweights = spread(weights, tape, slopes, actions, ctx.settings[2])
        flat = [tensor for layer in dweights for tensor in layer]
        return (
            slopes.deter.to(actions.dtype),
            slopes.stoch.to(actions.dtype),
            dactions,
            slopes.obs,
            None,
            None,
            None,
            None,
            *flat,
        )


def run_forward(
    weights: ScanWeights,
    deter: Tensor,
    stoch: Tensor,
    actions: Tensor,
    tokens: Tensor,
    reset: Tensor,
    noise: Tensor,
    unimix: float,
    eps: float,
) -> Tape:
    """The loop in plain operations: the form that the kernels are compared with."""
    own, inputs, acted = split_hidden(weights)
    size = sizes(weights, noise)
    hoisted = torch.addmm(weights.dynhid0.bias, actions.flatten(0, 1), acted)
    hoisted = hoisted.view(size.batch, size.length, size.deter)
    tape = new_tape(size, actions)
    for t, start in enumerate(reset[..., None].unbind(1)):
        deter, stoch = deter.masked_fill(start, 0), stoch.masked_fill(start, 0)
        in0 = torch.addmm(weights.dynin0.bias, deter, weights.dynin0.weight.T)
        in1 = torch.addmm(weights.dynin1.bias, stoch, weights.dynin1.weight.T)
        x0 = normed(in0, weights.dynin0.scale, eps)
        x1 = normed(in1, weights.dynin1.scale, eps)
        shared = torch.addmm(hoisted[:, t], torch.cat([x0, x1], -1), inputs)
        hid = shared + block_matmul(deter, own)
        x = normed(hid, weights.dynhid0.scale, eps)
        gates = block_matmul(x, weights.dyngru.weight) + weights.dyngru.bias
        tape.deter[:, t], tape.stoch[:, t] = deter, stoch
        tape.in0[:, t], tape.in1[:, t], tape.hid[:, t] = in0, in1, hid
        tape.gates[:, t] = gates
        deter = gated(gates, deter, size.blocks)
        obs = torch.addmm(tokens[:, t], deter, weights.obs0.weight.T)
        x = normed(obs, weights.obs0.scale, eps)
        logits = torch.addmm(weights.obslogit.bias, x, weights.obslogit.weight.T)
        stoch = chosen(logits, noise[:, t], unimix)
        tape.obs[:, t], tape.deters[:, t] = obs, deter
        tape.stochs[:, t], tape.logits[:, t] = stoch, logits
    return tape


def run_backward(
    weights: ScanWeights,
    tape: Tape,
    reset: Tensor,
    ddeters: Tensor,
    dstochs: Tensor,
    dlogits: Tensor,
    classes: int,
    unimix: float,
    eps: float,
) -> Slopes:
    """Gradients of the tape, last step first."""
    own, inputs, _ = split_hidden(weights)
    dtype, wide = tape.hid.dtype, weights.obs0.scale.dtype
    like = [tape.in0, tape.in1, tape.hid, tape.gates, tape.obs, tape.logits]
    din0, din1, dhid, dgates, dobs, dlogit = [torch.empty_like(x) for x in like]
    ups = [torch.empty_like(x) for x in (tape.in0, tape.in1, tape.hid, tape.obs)]
    blocks = own.shape[0]
    ddeter = torch.zeros_like(tape.deter[:, 0], dtype=wide)
    dstoch = torch.zeros_like(tape.stoch[:, 0], dtype=wide)
    for t in reversed(range(tape.hid.shape[1])):
        dz = dstoch + dstochs[:, t]
        dlogit[:, t] = dlogits[:, t] + chosen_backward(
            dz, tape.logits[:, t], classes, unimix
        )
        up = dlogit[:, t] @ weights.obslogit.weight
        dobs[:, t] = normed_backward(up, tape.obs[:, t], weights.obs0.scale, eps)
        ups[3][:, t] = up
        ddeter += ddeters[:, t] + dobs[:, t] @ weights.obs0.weight
        dgates[:, t], ddeter = gated_backward(
            ddeter, tape.gates[:, t], tape.deter[:, t], blocks
        )
        up = block_matmul(dgates[:, t], weights.dyngru.weight.transpose(1, 2))
        dhid[:, t] = normed_backward(up, tape.hid[:, t], weights.dynhid0.scale, eps)
        ups[2][:, t] = up
        up0, up1 = (dhid[:, t] @ inputs.T).chunk(2, -1)
        din0[:, t] = normed_backward(up0, tape.in0[:, t], weights.dynin0.scale, eps)
        din1[:, t] = normed_backward(up1, tape.in1[:, t], weights.dynin1.scale, eps)
        ups[0][:, t], ups[1][:, t] = up0, up1
        ddeter += block_matmul(dhid[:, t], own.transpose(1, 2))
        ddeter += din0[:, t] @ weights.dynin0.weight
        dstoch = (din1[:, t] @ weights.dynin1.weight).to(wide)
        start = reset[:, t, None]
        ddeter, dstoch = ddeter.masked_fill(start, 0), dstoch.masked_fill(start, 0)
    scales = (
        scale_gradient(ups[0], tape.in0, weights.dynin0.scale, eps),
        scale_gradient(ups[1], tape.in1, weights.dynin1.scale, eps),
        scale_gradient(ups[2], tape.hid, weights.dynhid0.scale, eps),
        scale_gradient(ups[3], tape.obs, weights.obs0.scale, eps),
    )
    ddeter, dstoch = ddeter.to(dtype), dstoch.to(dtype)
    return Slopes(din0, din1, dhid, dgates, dobs, dlogit, scales, ddeter, dstoch)


def spread(
    weights: ScanWeights, tape: Tape, slopes: Slopes, actions: Tensor, eps: float
) -> tuple[Tensor, ScanWeights]:
    """Gradients of actions and of every weight, each from all steps at once."""
    acted = split_hidden(weights)[2]
    blocks = weights.dyngru.weight.shape[0]
    din0, din1, dhid, dgates, dobs, dlogits = (x.flatten(0, 1) for x in slopes[:6])
    deter, stoch, deters = (
        x.flatten(0, 1) for x in (tape.deter, tape.stoch, tape.deters)
    )
    x0 = normed(tape.in0, weights.dynin0.scale, eps)
    x1 = normed(tape.in1, weights.dynin1.scale, eps)
    shared = torch.cat([x0, x1, actions], -1).flatten(0, 1)
    hid = normed(tape.hid, weights.dynhid0.scale, eps).flatten(0, 1)
    obs = normed(tape.obs, weights.obs0.scale, eps).flatten(0, 1)
    each = rearrange(dhid, "n (g o) -> g n o", g=blocks)
    own = torch.bmm(rearrange(deter, "n (g i) -> g i n", g=blocks), each)
    rest = torch.bmm(shared.T.expand(blocks, -1, -1), each)
    gru = torch.bmm(
        rearrange(hid, "n (g i) -> g i n", g=blocks),
        rearrange(dgates, "n (g o) -> g n o", g=blocks),
    )
    scale0, scale1, scale2, scale3 = slopes.scales
    grads = ScanWeights(
        dynin0=Normed(din0.T @ deter, din0.sum(0), scale0),
        dynin1=Normed(din1.T @ stoch, din1.sum(0), scale1),
        dynhid0=Normed(torch.cat([own, rest], 1), dhid.sum(0), scale2),
        dyngru=Dense(gru, dgates.sum(0)),
        obs0=Unbiased(dobs.T @ deters, scale3),
        obslogit=Dense(dlogits.T @ obs, dlogits.sum(0)),
    )
    return (dhid @ acted.T).view_as(actions), grads


def sizes(weights: ScanWeights, noise: Tensor) -> Sizes:
    units, deter = weights.obs0.weight.shape
    batch, length, stoch, classes = noise.shape
    blocks = weights.dyngru.weight.shape[0]
    return Sizes(batch, length, deter, units, blocks, stoch, classes)


def new_tape(size: Sizes, like: Tensor) -> Tape:
    deter, units, flat = size.deter, size.units, size.stoch * size.classes
    widths = (deter, flat, units, units, deter, 3 * deter, units, deter, flat, flat)
    shape = (size.batch, size.length)
    return Tape(*(like.new_empty(*shape, width) for width in widths))


def split_hidden(weights: ScanWeights) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of the hidden layer that read deter, both inputs, and the action.

    The first stays in blocks; the others, which every block reads, become (2 U, D) and
    (U, D).
    """
    hidden = weights.dynhid0.weight
    units, own = weights.obs0.weight.shape[0], hidden.shape[2]
    shared = rearrange(hidden[:, own:], "g i o -> i (g o)")
    return hidden[:, :own], shared[: 2 * units], shared[2 * units :]


def block_matmul(
    x: Float[Tensor, "B I"], weight: Float[Tensor, "G i o"]
) -> Float[Tensor, "B O"]:
    rows = rearrange(x, "b (g i) -> g b i", g=weight.shape[0])
    return rearrange(torch.bmm(rows, weight), "g b o -> b (g o)")


def normed(
    x: Float[Tensor, "*b F"], scale: Float[Tensor, " F"], eps: float
) -> Float[Tensor, "*b F"]:
    """RMS norm and SiLU."""
    _, y, _ = _norm(x, scale, eps)
    return torch.nn.functional.silu(y.to(x.dtype))


def normed_backward(
    grad: Float[Tensor, "*b F"],
    x: Float[Tensor, "*b F"],
    scale: Float[Tensor, " F"],
    eps: float,
) -> Float[Tensor, "*b F"]:
    unit, y, inverse = _norm(x, scale, eps)
    slope = grad * _silu_slope(y) * scale
    slope = slope - unit * (slope * unit).mean(-1, keepdim=True)
    return (slope * inverse).to(x.dtype)


def scale_gradient(
    grad: Float[Tensor, "*b F"],
    x: Float[Tensor, "*b F"],
    scale: Float[Tensor, " F"],
    eps: float,
) -> Float[Tensor, " F"]:
    unit, y, _ = _norm(x, scale, eps)
    return (grad * _silu_slope(y) * unit).flatten(0, -2).sum(0)


def gated(
    gates: Float[Tensor, "B J"], deter: Float[Tensor, "B D"], blocks: int
) -> Float[Tensor, "B D"]:
    reset, candidate, update = _gates(gates, blocks, gates.dtype)
    candidate = torch.tanh(torch.sigmoid(reset) * candidate)
    update = torch.sigmoid(update - 1)
    return update * candidate + (1 - update) * deter


def gated_backward(
    grad: Float[Tensor, "B D"],
    gates: Float[Tensor, "B J"],
    deter: Float[Tensor, "B D"],
    blocks: int,
) -> tuple[Float[Tensor, "B J"], Float[Tensor, "B D"]]:
    """Gradients of the gates, and of the state along the leak."""
    reset, candidate, update = _gates(gates, blocks, grad.dtype)
    reset, update = torch.sigmoid(reset), torch.sigmoid(update - 1)
    new = torch.tanh(reset * candidate)
    inside = grad * update * (1 - new.square())
    dgates = [
        inside * candidate * reset * (1 - reset),
        inside * reset,
        grad * (new - deter) * update * (1 - update),
    ]
    stacked = rearrange(dgates, "n b (g i) -> b (g n i)", g=blocks)
    return stacked.to(gates.dtype), grad * (1 - update)


def chosen(
    logits: Float[Tensor, "B L"], clocks: Float[Tensor, "B S K"], unimix: float
) -> Float[Tensor, "B L"]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    probs = torch.softmax(logits.view_as(clocks).to(wide), -1)
    probs = (1 - unimix) * probs + unimix / clocks.shape[-1]
    index = torch.argmax(probs / clocks, -1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, index, 1.0).to(logits.dtype).flatten(1)


def chosen_backward(
    grad: Float[Tensor, "B L"],
    logits: Float[Tensor, "B L"],
    classes: int,
    unimix: float,
) -> Float[Tensor, "B L"]:
    grad = rearrange(grad, "b (s k) -> b s k", k=classes)
    probs = torch.softmax(logits.to(grad.dtype).view_as(grad), -1)
    slope = probs * (grad - (grad * probs).sum(-1, keepdim=True))
    return ((1 - unimix) * slope).flatten(1)


def _norm(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x = x.to(scale.dtype)
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * inverse, x * inverse * scale, inverse


def _silu_slope(x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return gate * (1 + x * (1 - gate))


def _gates(gates: Tensor, blocks: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return rearrange(gates.to(dtype), "b (g n i) -> n b (g i)", g=blocks, n=3).unbind(0)


def _pack(flat: Sequence[Tensor]) -> ScanWeights:
    return ScanWeights(
        Normed(*flat[0:3]),
        Normed(*flat[3:6]),
        Normed(*flat[6:9]),
        Dense(*flat[9:11]),
        Unbiased(*flat[11:13]),
        Dense(*flat[13:15]),
    )
