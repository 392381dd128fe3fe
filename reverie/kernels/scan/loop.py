"""The loop of the posterior scan in plain operations, forth and back.

This is the form to read, and the one that the kernels are compared with. What comes in
is laid out (B, T, ...). What the loop leaves behind is laid out (T, B, ...), so that a
step is a matrix of its own, and all steps are rows of one longer matrix. (Rows that are
a large power of two apart crowd into one part of a GPU's cache.)

`U` is the width of the layers around the core, `G` the number of its blocks, `L` all
classes of all choices, `J` all gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

ROWS = 1
"""A batch may have any multiple of these."""


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
    """(U, L): reads the choices."""
    dynhid0: Normed
    """(G, D / G + 3 U, D / G): reads a block of deter, both above, the action."""
    dyngru: Dense
    """(G, D / G, 3 D / G): reset, candidate, update."""
    obs0: Unbiased
    """(U, D): the columns that read deter."""
    obslogit: Dense
    """(L, U): the choices' logits."""


class Inputs(NamedTuple):
    """Everything else a scan depends on."""

    deter: Float[Tensor, "B D"]
    stoch: Float[Tensor, "B L"]
    actions: Float[Tensor, "B T U"]
    tokens: Float[Tensor, "B T U"]
    reset: Bool[Tensor, "B T"]
    clocks: Float[Tensor, "B T S K"]


class Settings(NamedTuple):
    classes: int
    unimix: float
    eps: float


class Tape(NamedTuple):
    """What the way back needs of the way forth; the rows in the order of the loop."""

    deters: Float[Tensor, "*n D"]
    """The results, first the three that are asked for."""
    stochs: Float[Tensor, "*n L"]
    logits: Float[Tensor, "*n L"]
    deter: Float[Tensor, "*n D"]
    """What each step started from, zero after a reset."""
    stoch: Float[Tensor, "*n L"]
    in0: Float[Tensor, "*n U"]
    """What each layer gave before its norm."""
    in1: Float[Tensor, "*n U"]
    hid: Float[Tensor, "*n D"]
    gates: Float[Tensor, "*n J"]
    obs: Float[Tensor, "*n U"]
    inverse: Float[Tensor, "*n 4"]
    """One over the root mean square of in0, in1, hid and obs."""
    shared: Float[Tensor, "*n X"]
    """Behind norm and activation: in0, in1 and the action, which all blocks read."""
    hidden: Float[Tensor, "*n D"]
    seen: Float[Tensor, "*n U"]


class Sums(NamedTuple):
    """Gradients of what is added to, or multiplied with, every row alike."""

    hid_scale: Float[Tensor, " D"]
    hid_bias: Float[Tensor, " D"]
    gates: Float[Tensor, " J"]
    in0_scale: Float[Tensor, " U"]
    in0_bias: Float[Tensor, " U"]
    in1_scale: Float[Tensor, " U"]
    in1_bias: Float[Tensor, " U"]
    obs_scale: Float[Tensor, " U"]
    logits: Float[Tensor, " L"]


class Slopes(NamedTuple):
    """Gradients of the values before each norm and gate, and what follows from them.

    The rows are in the order of the tape's.
    """

    in0: Float[Tensor, "*n U"]
    in1: Float[Tensor, "*n U"]
    hid: Float[Tensor, "*n D"]
    gates: Float[Tensor, "*n J"]
    obs: Float[Tensor, "*n U"]
    logits: Float[Tensor, "*n L"]
    sums: Sums
    deter: Float[Tensor, "B D"] | None
    """Of the state before the first step; None where nobody wants it."""
    stoch: Float[Tensor, "B L"] | None


def run_forward(weights: ScanWeights, inputs: Inputs, settings: Settings) -> Tape:
    own, read = own_rows(weights), read_rows(weights)
    hoisted, tape = hoist(weights, inputs), new_tape(weights, inputs)
    deter, stoch, _, tokens, reset, clocks = inputs
    units, eps = tokens.shape[-1], settings.eps
    for t, start in enumerate(reset[..., None].unbind(1)):
        deter, stoch = deter.masked_fill(start, 0), stoch.masked_fill(start, 0)
        tape.deter[t], tape.stoch[t] = deter, stoch
        inverse, shared = tape.inverse[t], tape.shared[t]
        in0 = torch.addmm(weights.dynin0.bias, deter, weights.dynin0.weight.T)
        in1 = torch.addmm(weights.dynin1.bias, stoch, weights.dynin1.weight.T)
        x0, inverse[:, 0] = normed(in0, weights.dynin0.scale, eps)
        x1, inverse[:, 1] = normed(in1, weights.dynin1.scale, eps)
        shared[:, :units], shared[:, units : 2 * units] = x0, x1
        hid = torch.addmm(hoisted[:, t], shared[:, : 2 * units], read)
        hid = hid + block_matmul(deter, own)
        hidden, inverse[:, 2] = normed(hid, weights.dynhid0.scale, eps)
        gates = block_matmul(hidden, weights.dyngru.weight) + weights.dyngru.bias
        deter = gated(gates, deter, own.shape[0])
        obs = torch.addmm(tokens[:, t], deter, weights.obs0.weight.T)
        seen, inverse[:, 3] = normed(obs, weights.obs0.scale, eps)
        logits = torch.addmm(weights.obslogit.bias, seen, weights.obslogit.weight.T)
        stoch = chosen(logits, clocks[:, t], settings.unimix)
        tape.in0[t], tape.in1[t], tape.hid[t] = in0, in1, hid
        tape.gates[t], tape.hidden[t], tape.obs[t] = gates, hidden, obs
        tape.seen[t], tape.deters[t] = seen, deter
        tape.stochs[t], tape.logits[t] = stoch, logits
    return tape


def run_backward(
    weights: ScanWeights,
    tape: Tape,
    reset: Bool[Tensor, "B T"],
    grads: tuple[
        Float[Tensor, "B T D"], Float[Tensor, "B T L"], Float[Tensor, "B T L"]
    ],
    settings: Settings,
) -> Slopes:
    """Data gradients, last step first; weights have to wait for all of them."""
    own, read = own_rows(weights), read_rows(weights)
    wide, blocks = weights.obs0.scale.dtype, own.shape[0]
    ddeters, dstochs, dlogits = grads
    like = (tape.in0, tape.in1, tape.hid, tape.gates, tape.obs, tape.logits)
    din0, din1, dhid, dgates, dobs, dlogit = (torch.empty_like(x) for x in like)
    norms = (tape.in0, tape.in1, tape.hid, tape.obs)
    scales = [torch.empty_like(x, dtype=wide) for x in norms]
    ddeter = torch.zeros_like(tape.deter[0], dtype=wide)
    dstoch = torch.zeros_like(tape.stoch[0], dtype=wide)
    for t in reversed(range(reset.shape[1])):
        dlogit[t] = dlogits[:, t] + chosen_backward(
            dstoch + dstochs[:, t], tape.logits[t], settings
        )
        inverse = tape.inverse[t, :, :, None]
        dobs[t], scales[3][t] = normed_backward(
            dlogit[t] @ weights.obslogit.weight,
            tape.obs[t],
            inverse[:, 3],
            weights.obs0.scale,
        )
        ddeter = ddeter + ddeters[:, t] + dobs[t] @ weights.obs0.weight
        dgates[t], ddeter = gated_backward(ddeter, tape.gates[t], tape.deter[t], blocks)
        dhid[t], scales[2][t] = normed_backward(
            block_matmul(dgates[t], weights.dyngru.weight.transpose(1, 2)),
            tape.hid[t],
            inverse[:, 2],
            weights.dynhid0.scale,
        )
        up0, up1 = (dhid[t] @ read.T).chunk(2, -1)
        din0[t], scales[0][t] = normed_backward(
            up0, tape.in0[t], inverse[:, 0], weights.dynin0.scale
        )
        din1[t], scales[1][t] = normed_backward(
            up1, tape.in1[t], inverse[:, 1], weights.dynin1.scale
        )
        ddeter = ddeter + block_matmul(dhid[t], own.transpose(1, 2))
        ddeter = ddeter + din0[t] @ weights.dynin0.weight
        dstoch = (din1[t] @ weights.dynin1.weight).to(wide)
        start = reset[:, t, None]
        ddeter, dstoch = ddeter.masked_fill(start, 0), dstoch.masked_fill(start, 0)
    total = [
        x.flatten(0, 1).sum(0) for x in (*scales, din0, din1, dhid, dgates, dlogit)
    ]
    scale0, scale1, scale2, scale3, bias0, bias1, bias2, gates, logits = total
    return Slopes(
        din0,
        din1,
        dhid,
        dgates,
        dobs,
        dlogit,
        Sums(scale2, bias2, gates, scale0, bias0, scale1, bias1, scale3, logits),
        ddeter,
        dstoch,
    )


def hoist(weights: ScanWeights, inputs: Inputs) -> Float[Tensor, "B T D"]:
    """The share of the hidden layer that reads the actions, with its bias."""
    rows = inputs.actions.flatten(0, 1)
    acted = acted_rows(weights)
    batch, length = inputs.reset.shape
    return torch.addmm(weights.dynhid0.bias, rows, acted).view(batch, length, -1)


def new_tape(weights: ScanWeights, inputs: Inputs) -> Tape:
    """Room for all steps, with what is known before the first one."""
    units, deter = weights.obs0.weight.shape
    flat, like = weights.obslogit.weight.shape[0], inputs.actions
    batch, length = inputs.reset.shape

    def room(width: int) -> Tensor:
        return like.new_empty(length, batch, width)

    tape = Tape(
        deters=room(deter),
        stochs=room(flat),
        logits=room(flat),
        deter=room(deter),
        stoch=room(flat),
        in0=room(units),
        in1=room(units),
        hid=room(deter),
        gates=room(3 * deter),
        obs=room(units),
        inverse=weights.obs0.scale.new_empty(length, batch, 4),
        shared=room(3 * units),
        hidden=room(deter),
        seen=room(units),
    )
    tape.shared[..., 2 * units :] = inputs.actions.transpose(0, 1)
    return tape


def own_rows(weights: ScanWeights) -> Float[Tensor, "G W W"]:
    """The rows of the hidden layer that read deter, block by block."""
    hidden = weights.dynhid0.weight
    return hidden[:, : hidden.shape[2]]


def read_rows(weights: ScanWeights) -> Float[Tensor, "X D"]:
    """The rows of the hidden layer that read dynin0 and dynin1, in all blocks."""
    return _rows(weights, 0, 2)


def acted_rows(weights: ScanWeights) -> Float[Tensor, "U D"]:
    """The rows of the hidden layer that read the action, in all blocks."""
    return _rows(weights, 2, 3)


def _rows(weights: ScanWeights, start: int, stop: int) -> Tensor:
    hidden, units = weights.dynhid0.weight, weights.obs0.weight.shape[0]
    shared = hidden[:, hidden.shape[2] :]
    return rearrange(shared[:, start * units : stop * units], "g i o -> i (g o)")


def pack(flat: Sequence[Tensor]) -> ScanWeights:
    """All tensors of all layers, back in their places."""
    return ScanWeights(
        Normed(*flat[0:3]),
        Normed(*flat[3:6]),
        Normed(*flat[6:9]),
        Dense(*flat[9:11]),
        Unbiased(*flat[11:13]),
        Dense(*flat[13:15]),
    )


def block_matmul(
    x: Float[Tensor, "B I"], weight: Float[Tensor, "G i o"]
) -> Float[Tensor, "B O"]:
    rows = rearrange(x, "b (g i) -> g b i", g=weight.shape[0])
    return rearrange(torch.bmm(rows, weight), "g b o -> b (g o)")


def normed(
    x: Float[Tensor, "B F"], scale: Float[Tensor, " F"], eps: float
) -> tuple[Float[Tensor, "B F"], Float[Tensor, " B"]]:
    """RMS norm and SiLU, and what the norm multiplied with."""
    wide = x.to(scale.dtype)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return F.silu((wide * inverse * scale).to(x.dtype)), inverse[:, 0]


def normed_backward(
    grad: Float[Tensor, "B F"],
    x: Float[Tensor, "B F"],
    inverse: Float[Tensor, "B 1"],
    scale: Float[Tensor, " F"],
) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B F"]]:
    """Gradients of the input, and of the scale by row."""
    unit = x * inverse
    gate = torch.sigmoid(unit * scale)
    grad = grad * gate * (1 + unit * scale * (1 - gate))
    inside = grad * scale
    inside = inside - unit * (inside * unit).mean(-1, keepdim=True)
    return (inside * inverse).to(x.dtype), grad * unit


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
    grad: Float[Tensor, "B L"], logits: Float[Tensor, "B L"], settings: Settings
) -> Float[Tensor, "B L"]:
    """As if the probabilities had been the choice."""
    grad = rearrange(grad, "b (s k) -> b s k", k=settings.classes)
    probs = torch.softmax(logits.to(grad.dtype).view_as(grad), -1)
    slope = probs * (grad - (grad * probs).sum(-1, keepdim=True))
    return ((1 - settings.unimix) * slope).flatten(1)


def _gates(gates: Tensor, blocks: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return rearrange(gates.to(dtype), "b (g n i) -> n b (g i)", g=blocks, n=3).unbind(0)
