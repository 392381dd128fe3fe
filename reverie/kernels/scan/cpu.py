"""The posterior scan on a CPU, for small models: few operations per step.

Each operation on a small tensor takes about the same time, whatever its size, and
autograd adds to it. So this scan computes its gradient in closed form: everything that
depends on activations only is computed for all steps at once before the backward loop,
and the gradient of each weight is one matrix product after it.

The hidden layer `hid` is block-diagonal only for deter. Its weights are expanded to a
dense matrix, so that it is one product per step. `SmallWeights` contains the weights in
the layout used here; it is computed from the parameters by differentiable operations,
so its gradients reach them.

The names of layers and sizes are those of `tensors.py`; W3 and D3 are 3 W and 3 D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from reverie.nets.distributions import softmax

MAX_DETER = 256
"""Maximum size of `deter`, because the dense weights have its square as size."""

Sample = Callable[[Tensor], Tensor]
"""Draws one-hot samples from logits `(B, L)`; returns a tensor of that shape."""


class SmallWeights(NamedTuple):
    """Weights of the recurrent layers; rows of matrices are inputs."""

    in0: Float[Tensor, "D U"]
    in0_bias: Float[Tensor, " U"]
    in1: Float[Tensor, "L U"]
    in1_bias: Float[Tensor, " U"]
    in_scale: Float[Tensor, "2 U"]
    """Norm scales of in0 and in1."""
    hid: Float[Tensor, "I D"]
    """Rows for deter, in0 and in1: I is D + 2 U. The product with the action is in
    `hid_inputs`."""
    hid_scale: Float[Tensor, " D"]
    gates: Float[Tensor, "G W W3"]
    """Columns of the reset gates, then the candidates and the update gates."""
    gates_bias: Float[Tensor, "G 1 W3"]
    """Includes the constant -1 of the update gates (see `update_deter`)."""
    obs: Float[Tensor, "D U"]
    obs_scale: Float[Tensor, " U"]
    logits: Float[Tensor, "U L"]
    logits_bias: Float[Tensor, " L"]


class SmallInputs(NamedTuple):
    """Initial state, and inputs of all steps."""

    deter: Float[Tensor, "B D"]
    stoch: Float[Tensor, "B L"]
    hid_inputs: Float[Tensor, "B T D"]
    """Product of the actions with `hid`, including the bias."""
    obs_inputs: Float[Tensor, "B T U"]
    """Product of the observation embedding with `obs`, including the bias."""


class ScanConstants(NamedTuple):
    """Inputs of the scan without gradients."""

    is_first: Bool[Tensor, "B T"]
    sample: Sample
    classes: int
    unimix: float
    eps: float


class _Saved(NamedTuple):
    """Activations that the backward pass needs.

    Their leading axes are `(T, B)`, those of `gates` `(T, G, B)`.
    """

    stoch: Tensor  # before each step, zero where `is_first` is true
    in_pre: Tensor
    hid_in: Tensor  # `deter` before each step, then the activations of in0 and in1
    hid_pre: Tensor
    hid_act: Tensor
    gates: Tensor
    deter: Tensor
    obs_pre: Tensor
    obs_act: Tensor
    logits: Tensor


def dense_blocks(weight: Float[Tensor, "G I O"]) -> Float[Tensor, "G*I G*O"]:
    """Return the dense matrix of a block-diagonal one."""
    blocks: list[Tensor] = list(weight.unbind())
    dense: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return dense


def gates_bias(bias: Float[Tensor, " D3"], blocks: int) -> Float[Tensor, "G 1 W3"]:
    """Return the biases of the gate layer for `SmallWeights`."""
    constants = bias.new_tensor([[0.0], [0.0], [-1.0]])
    return (bias.view(blocks, 3, -1) + constants).flatten(1)[:, None]


def by_block(x: Float[Tensor, "*n B D"], blocks: int) -> Float[Tensor, "*n G B W"]:
    """Return a view with an axis of blocks."""
    return x.view(*x.shape[:-1], blocks, -1).transpose(-3, -2)


def next_deter(
    gates: Float[Tensor, "G B W3"], deter: Float[Tensor, "G B W"], out: Tensor
) -> None:
    """Write the next `deter`, given the gates before activation."""
    reset, candidate, update = gates.chunk(3, -1)
    # tanh in terms of the sigmoid, which is several times faster
    candidate = torch.sigmoid(reset).mul_(candidate).mul_(2).sigmoid_()
    candidate.mul_(2).sub_(1)
    torch.lerp(deter, candidate, torch.sigmoid(update), out=out)


def embed_state(
    weights: SmallWeights,
    eps: float,
    deter: Float[Tensor, "B D"],
    stoch: Float[Tensor, "B L"],
    in_pre: Float[Tensor, "B 2 U"],
    out: Float[Tensor, "B _"],
) -> None:
    """Write the outputs of in0 and in1, and the inputs of `hid`."""
    units = in_pre.shape[2]
    torch.addmm(weights.in0_bias, deter, weights.in0, out=in_pre[:, 0])
    torch.addmm(weights.in1_bias, stoch, weights.in1, out=in_pre[:, 1])
    normed = F.rms_norm(in_pre, (units,), eps=eps).mul_(weights.in_scale)
    torch.cat([deter, F.silu(normed, inplace=True).flatten(1)], 1, out=out)


def norm_silu(
    x: Float[Tensor, "B F"], scale: Float[Tensor, " F"], eps: float
) -> Float[Tensor, "B F"]:
    return F.silu(F.rms_norm(x, scale.shape, scale, eps), inplace=True)


def posterior_scan(
    weights: SmallWeights, inputs: SmallInputs, constants: ScanConstants
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T L"], Float[Tensor, "B T L"]]:
    """Return deter, sampled stoch and posterior logits of every step.

    Samples have straight-through gradients.
    """
    result: tuple[Tensor, Tensor, Tensor] = _PosteriorScan.apply(  # type: ignore[no-untyped-call]
        constants, *inputs, *weights
    )
    return result


class _PosteriorScan(torch.autograd.Function):
    """`flat` are the inputs, then the weights."""

    @staticmethod
    def forward(
        ctx: Any, constants: ScanConstants, *flat: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = SmallInputs(*flat[: len(SmallInputs._fields)])
        weights = SmallWeights(*flat[len(inputs) :])
        saved, stoch = _run_forward(weights, inputs, constants)
        ctx.save_for_backward(*weights, *saved)
        ctx.constants = constants._replace(sample=_no_sample)
        batch_first = [x.transpose(0, 1) for x in (saved.deter, stoch, saved.logits)]
        deter, stoch, logits = (x.contiguous() for x in batch_first)
        return deter, stoch, logits

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, deter: Tensor, stoch: Tensor, logits: Tensor
    ) -> tuple[Tensor | None, ...]:
        flat = ctx.saved_tensors
        weights = SmallWeights(*flat[: len(SmallWeights._fields)])
        saved = _Saved(*flat[len(weights) :])
        grads = [x.transpose(0, 1) for x in (deter, stoch, logits)]
        input_grads, weight_grads = _run_backward(weights, saved, grads, ctx.constants)
        return (None, *input_grads, *weight_grads)


def _no_sample(logits: Tensor) -> Tensor:
    """Replace `sample` in the backward pass, so that no generator is kept alive."""
    raise NotImplementedError


def _run_forward(
    weights: SmallWeights, inputs: SmallInputs, constants: ScanConstants
) -> tuple[_Saved, Float[Tensor, "T B L"]]:
    """Run all steps; return activations and samples."""
    w, eps, new = weights, constants.eps, inputs.deter.new_empty
    deter, stoch = inputs.deter, inputs.stoch
    (batch, length, width), units = inputs.hid_inputs.shape, w.obs.shape[1]
    (blocks, _, gate_width), logits_width = w.gates.shape, stoch.shape[1]
    rows = (length, batch)
    saved = _Saved(
        stoch=new(*rows, logits_width),
        in_pre=new(*rows, 2, units),
        hid_in=new(*rows, len(w.hid)),
        hid_pre=new(*rows, width),
        hid_act=new(*rows, width),
        gates=new(length, blocks, batch, gate_width),
        deter=new(*rows, width),
        obs_pre=new(*rows, units),
        obs_act=new(*rows, units),
        logits=new(*rows, logits_width),
    )
    steps = [_Saved._make(step) for step in zip(*map(torch.unbind, saved), strict=True)]
    hid_inputs, obs_inputs = inputs.hid_inputs.unbind(1), inputs.obs_inputs.unbind(1)
    has_first, stochs = constants.is_first.any(0).tolist(), []
    for t, step in enumerate(steps):
        if has_first[t]:
            first = constants.is_first[:, t, None]
            deter, stoch = deter.masked_fill(first, 0), stoch.masked_fill(first, 0)
        step.stoch.copy_(stoch)
        embed_state(w, eps, deter, stoch, step.in_pre, step.hid_in)
        torch.addmm(hid_inputs[t], step.hid_in, w.hid, out=step.hid_pre)
        hid_act = norm_silu(step.hid_pre, w.hid_scale, eps)
        step.hid_act.copy_(hid_act)
        rows_by_block = by_block(hid_act, blocks)
        torch.baddbmm(w.gates_bias, rows_by_block, w.gates, out=step.gates)
        out = by_block(step.deter, blocks)
        next_deter(step.gates, by_block(deter, blocks), out)
        deter = step.deter
        torch.addmm(obs_inputs[t], deter, w.obs, out=step.obs_pre)
        obs_act = norm_silu(step.obs_pre, w.obs_scale, eps)
        step.obs_act.copy_(obs_act)
        torch.addmm(w.logits_bias, obs_act, w.logits, out=step.logits)
        stoch = constants.sample(step.logits)
        stochs.append(stoch)
    return saved, torch.stack(stochs)


class _NormSiluGrad:
    """The gradient of `silu(rms_norm(x) * scale)` for all steps.

    With the gradient `g` of the output, which callers write to `grads`, the gradient of
    `x` is `g * direct - sum(g * projected) * normed`.
    """

    def __init__(self, x: Tensor, scale: Tensor, eps: float):
        width = x.shape[-1]
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
        xhat = x * rstd
        z = xhat * scale
        sigmoid = torch.sigmoid(z)
        slope = z.mul_(1 - sigmoid).add_(1).mul_(sigmoid)  # derivative of SiLU
        self.by_scale = xhat * slope  # derivative of the output by `scale`
        self.projected = (self.by_scale * scale).unbind()
        self.direct = slope.mul_(scale).mul_(rstd).unbind()
        self.normed = xhat.mul_(rstd).div_(width).unbind()
        self.all_grads = torch.empty_like(x)
        self.grads = self.all_grads.unbind()

    def step(self, t: int, out: Tensor) -> None:
        """Write the gradient of `x` of step `t`."""
        grad = self.grads[t]
        dot = torch.linalg.vecdot(grad, self.projected[t])[..., None]
        torch.mul(grad, self.direct[t], out=out)
        out.addcmul_(dot, self.normed[t], value=-1)

    def scale_grad(self) -> Tensor:
        """Return the gradient of `scale`, after all steps."""
        return self.by_scale.mul_(self.all_grads).sum((0, 1))


def _gate_slopes(
    saved: _Saved,
) -> tuple[Float[Tensor, "T G B 3 W"], Float[Tensor, "T B D"]]:
    """Return the derivatives of the next `deter` by the gates and by `deter`."""
    blocks, width = saved.gates.shape[1], saved.deter.shape[-1]
    reset, before, update = saved.gates.chunk(3, -1)
    reset, update = torch.sigmoid(reset), torch.sigmoid(update)
    candidate, keep = torch.tanh(reset * before), 1 - update
    previous = by_block(saved.hid_in[..., :width], blocks)
    slopes = torch.empty_like(saved.gates).view(*saved.gates.shape[:-1], 3, -1)
    by_reset, by_candidate, by_update = slopes.unbind(-2)
    torch.mul(update * (1 - candidate.square()), reset, out=by_candidate)
    torch.mul(by_candidate * before, 1 - reset, out=by_reset)
    torch.mul(update * keep, candidate - previous, out=by_update)
    return slopes, keep.transpose(1, 2).flatten(2)


def _run_backward(
    weights: SmallWeights,
    saved: _Saved,
    grads: list[Float[Tensor, "T B _"]],
    constants: ScanConstants,
) -> tuple[SmallInputs, SmallWeights]:
    """Return the gradients of inputs and weights, given those of the outputs."""
    grad_deter, grad_stoch, grad_logits = (x.unbind() for x in grads)
    length, blocks, batch, _ = saved.gates.shape
    width = saved.deter.shape[-1]
    has_first = constants.is_first.any(0).tolist()
    in_grad = _NormSiluGrad(saved.in_pre, weights.in_scale, constants.eps)
    hid_grad = _NormSiluGrad(saved.hid_pre, weights.hid_scale, constants.eps)
    obs_grad = _NormSiluGrad(saved.obs_pre, weights.obs_scale, constants.eps)
    slopes, keep = (x.unbind() for x in _gate_slopes(saved))
    softmaxes = softmax(saved.logits.view(length, batch, -1, constants.classes))
    # derivative of the mixture with a uniform distribution
    mixed = (softmaxes * (1 - constants.unimix)).unbind()
    probs = softmaxes.unbind()
    all_grads = [
        torch.empty_like(x)
        for x in (saved.in_pre, saved.hid_pre, saved.obs_pre, saved.logits)
    ]
    d_in, d_hid, d_obs, d_logits = (x.unbind() for x in all_grads)
    d_gates = saved.gates.new_empty(blocks, length, batch, weights.gates.shape[2])
    by_logits, by_obs, by_hid = weights.logits.T, weights.obs.T, weights.hid.T
    by_gates = weights.gates.transpose(1, 2)
    by_in0, by_in1 = weights.in0.T, weights.in1.T
    d_deter = torch.zeros_like(saved.deter[0])
    d_stoch = torch.zeros_like(saved.stoch[0])
    for t in reversed(range(length)):
        d_mixed = (d_stoch + grad_stoch[t]).view_as(probs[t]).mul_(mixed[t])
        d_mixed.addcmul_(d_mixed.sum(-1, keepdim=True), probs[t], value=-1)
        torch.add(grad_logits[t], d_mixed.flatten(1), out=d_logits[t])
        torch.mm(d_logits[t], by_logits, out=obs_grad.grads[t])
        obs_grad.step(t, out=d_obs[t])
        d_deter = torch.addmm(d_deter, d_obs[t], by_obs).add_(grad_deter[t])
        d_gates_t = d_gates[:, t]
        out = d_gates_t.view(blocks, batch, 3, -1)
        torch.mul(by_block(d_deter, blocks)[..., None, :], slopes[t], out=out)
        hid_out = by_block(hid_grad.grads[t], blocks)
        hid_out.copy_(torch.bmm(d_gates_t, by_gates))
        hid_grad.step(t, out=d_hid[t])
        d_hid_in = torch.mm(d_hid[t], by_hid)
        in_grad.grads[t].copy_(d_hid_in[:, width:].view_as(d_in[t]))
        in_grad.step(t, out=d_in[t])
        d_deter = torch.addcmul(d_hid_in[:, :width], d_deter, keep[t])
        d_in0, d_in1 = d_in[t].unbind(1)
        d_deter.addmm_(d_in0, by_in0)
        d_stoch = torch.mm(d_in1, by_in1)
        if has_first[t]:
            first = constants.is_first[:, t, None]
            d_deter.masked_fill_(first, 0)
            d_stoch.masked_fill_(first, 0)
    _, d_hid_inputs, d_obs_inputs, _ = (x.transpose(0, 1) for x in all_grads)
    d_inputs = SmallInputs(d_deter, d_stoch, d_hid_inputs, d_obs_inputs)
    in_rows, hid_rows, obs_rows, logit_rows = (x.flatten(0, 1) for x in all_grads)
    d_in0, d_in1 = in_rows.unbind(1)
    in_bias, gate_rows = in_rows.sum(0), d_gates.flatten(1, 2)
    rows = _Saved(*(x.flatten(0, 1) for x in saved))
    d_weights = SmallWeights(
        in0=rows.hid_in[:, :width].T @ d_in0,
        in0_bias=in_bias[0],
        in1=rows.stoch.T @ d_in1,
        in1_bias=in_bias[1],
        in_scale=in_grad.scale_grad(),
        hid=rows.hid_in.T @ hid_rows,
        hid_scale=hid_grad.scale_grad(),
        gates=by_block(rows.hid_act, blocks).transpose(1, 2) @ gate_rows,
        gates_bias=gate_rows.sum(1, keepdim=True),
        obs=rows.deter.T @ obs_rows,
        obs_scale=obs_grad.scale_grad(),
        logits=rows.obs_act.T @ logit_rows,
        logits_bias=logit_rows.sum(0),
    )
    return d_inputs, d_weights
