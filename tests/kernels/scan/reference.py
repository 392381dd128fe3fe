"""The posterior scan in plain PyTorch operations, forward and backward.

The kernels are tested against it, and it is tested against `RSSMDynamics.observe`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.scan import tensors

ROWS = 1
"""The batch size must be a multiple of this."""


def hidden_rows(
    weights: tensors.ScanWeights,
) -> tuple[Float[Tensor, "G W W"], Float[Tensor, "X D"]]:
    """Rows of the hidden layer's weight that read deter, and those of in0 and in1."""
    width, units = weights.hid_weight.shape[2], weights.obs_weight.shape[0]
    from_inputs = weights.hid_weight[:, width : width + 2 * units]
    return weights.hid_weight[:, :width], rearrange(from_inputs, "g i o -> i (g o)")


def run_forward(scan: tensors.ForwardPass) -> tensors.SavedActivations:
    """Run all steps and return their activations."""
    weights, inputs, settings = scan
    from_deter, from_inputs = hidden_rows(weights)
    projected = tensors.project_actions(weights, inputs)
    saved = tensors.allocate_saved(weights, inputs)
    deter, stoch, _, tokens, is_first, noise = inputs
    units, eps = tokens.shape[-1], settings.eps
    for t, first in enumerate(is_first[..., None].unbind(1)):
        deter, stoch = deter.masked_fill(first, 0), stoch.masked_fill(first, 0)
        saved.prev_deter[t], saved.prev_stoch[t] = deter, stoch
        inv_rms, shared = saved.inv_rms[t], saved.shared_input[t]
        in0 = torch.addmm(weights.in0_bias, deter, weights.in0_weight.T)
        in1 = torch.addmm(weights.in1_bias, stoch, weights.in1_weight.T)
        act0, inv_rms[:, 0] = norm_act(in0, weights.in0_scale, eps)
        act1, inv_rms[:, 1] = norm_act(in1, weights.in1_scale, eps)
        shared[:, :units], shared[:, units : 2 * units] = act0, act1
        hid = torch.addmm(projected[:, t], shared[:, : 2 * units], from_inputs)
        hid = hid + block_matmul(deter, from_deter)
        hid_act, inv_rms[:, 2] = norm_act(hid, weights.hid_scale, eps)
        gates = block_matmul(hid_act, weights.gru_weight) + weights.gru_bias
        deter = gru_update(gates, deter, from_deter.shape[0])
        obs = torch.addmm(tokens[:, t], deter, weights.obs_weight.T)
        obs_act, inv_rms[:, 3] = norm_act(obs, weights.obs_scale, eps)
        logits = torch.addmm(weights.logit_bias, obs_act, weights.logit_weight.T)
        stoch = sample(logits, noise[:, t], settings.unimix)
        saved.in0_pre[t], saved.in1_pre[t], saved.hid_pre[t] = in0, in1, hid
        saved.gates[t], saved.hid_act[t], saved.obs_pre[t] = gates, hid_act, obs
        saved.obs_act[t], saved.deter[t] = obs_act, deter
        saved.stoch[t], saved.logits[t] = stoch, logits
    return saved


def run_backward(scan: tensors.BackwardPass) -> tensors.ScanGrads:
    """Compute the gradients of all activations, from the last step to the first."""
    weights, saved, is_first, *grads, settings = scan
    grad_deter, grad_stoch, grad_logits = grads
    from_deter, from_inputs = hidden_rows(weights)
    dtype, blocks = weights.obs_scale.dtype, from_deter.shape[0]
    like = (saved.in0_pre, saved.in1_pre, saved.hid_pre, saved.gates, saved.obs_pre)
    din0, din1, dhid, dgates, dobs = (torch.empty_like(x) for x in like)
    dlogits = torch.empty_like(saved.logits)
    norms = (saved.in0_pre, saved.in1_pre, saved.hid_pre, saved.obs_pre)
    dscales = [torch.empty_like(x, dtype=dtype) for x in norms]
    ddeter = torch.zeros_like(saved.deter[0], dtype=dtype)
    dstoch = torch.zeros_like(saved.stoch[0], dtype=dtype)
    for t in reversed(range(is_first.shape[1])):
        inv_rms = saved.inv_rms[t, :, :, None]
        dlogits[t] = grad_logits[:, t] + sample_backward(
            dstoch + grad_stoch[:, t], saved.logits[t], settings
        )
        dact = dlogits[t] @ weights.logit_weight
        dobs[t], dscales[3][t] = norm_act_backward(
            dact, saved.obs_pre[t], inv_rms[:, 3], weights.obs_scale
        )
        ddeter = ddeter + grad_deter[:, t] + dobs[t] @ weights.obs_weight
        dgates[t], ddeter = gru_update_backward(
            ddeter, saved.gates[t], saved.prev_deter[t], blocks
        )
        dact = block_matmul(dgates[t], weights.gru_weight.transpose(1, 2))
        dhid[t], dscales[2][t] = norm_act_backward(
            dact, saved.hid_pre[t], inv_rms[:, 2], weights.hid_scale
        )
        dact0, dact1 = (dhid[t] @ from_inputs.T).chunk(2, -1)
        din0[t], dscales[0][t] = norm_act_backward(
            dact0, saved.in0_pre[t], inv_rms[:, 0], weights.in0_scale
        )
        din1[t], dscales[1][t] = norm_act_backward(
            dact1, saved.in1_pre[t], inv_rms[:, 1], weights.in1_scale
        )
        ddeter = ddeter + block_matmul(dhid[t], from_deter.transpose(1, 2))
        ddeter = ddeter + din0[t] @ weights.in0_weight
        dstoch = (din1[t] @ weights.in1_weight).to(dtype)
        first = is_first[:, t, None]
        ddeter, dstoch = ddeter.masked_fill(first, 0), dstoch.masked_fill(first, 0)
    names = (
        *("in0_scale", "in1_scale", "hid_scale", "obs_scale"),
        *("in0_bias", "in1_bias", "hid_bias", "gru_bias", "logit_bias"),
    )
    rows = (*dscales, din0, din1, dhid, dgates, dlogits)
    vectors = tensors.VectorGrads(
        **{name: x.flatten(0, 1).sum(0) for name, x in zip(names, rows, strict=True)}
    )
    return tensors.ScanGrads(
        din0, din1, dhid, dgates, dobs, dlogits, vectors, ddeter, dstoch
    )


def block_matmul(
    x: Float[Tensor, "B I"], weight: Float[Tensor, "G i o"]
) -> Float[Tensor, "B O"]:
    """Multiply with a block-diagonal matrix."""
    rows = rearrange(x, "b (g i) -> g b i", g=weight.shape[0])
    return rearrange(torch.bmm(rows, weight), "g b o -> b (g o)")


def norm_act(
    x: Float[Tensor, "B F"], scale: Float[Tensor, " F"], eps: float
) -> tuple[Float[Tensor, "B F"], Float[Tensor, " B"]]:
    """Apply RMS norm and SiLU; also return the reciprocal root mean squares."""
    y = x.to(scale.dtype)
    inv_rms = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return F.silu((y * inv_rms * scale).to(x.dtype)), inv_rms[:, 0]


def norm_act_backward(
    grad: Float[Tensor, "B F"],
    x: Float[Tensor, "B F"],
    inv_rms: Float[Tensor, "B 1"],
    scale: Float[Tensor, " F"],
) -> tuple[Float[Tensor, "B F"], Float[Tensor, "B F"]]:
    """Return the gradients of the input, and of the scale for each row."""
    normed = x * inv_rms
    gate = torch.sigmoid(normed * scale)
    grad = grad * gate * (1 + normed * scale * (1 - gate))
    dnormed = grad * scale
    dnormed = dnormed - normed * (dnormed * normed).mean(-1, keepdim=True)
    return (dnormed * inv_rms).to(x.dtype), grad * normed


def gru_update(
    gates: Float[Tensor, "B J"], deter: Float[Tensor, "B D"], blocks: int
) -> Float[Tensor, "B D"]:
    """Compute the next deter from the gates of all blocks."""
    reset, candidate, update = _split_gates(gates, blocks, gates.dtype)
    candidate = torch.tanh(torch.sigmoid(reset) * candidate)
    update = torch.sigmoid(update - 1)
    return update * candidate + (1 - update) * deter


def gru_update_backward(
    grad: Float[Tensor, "B D"],
    gates: Float[Tensor, "B J"],
    deter: Float[Tensor, "B D"],
    blocks: int,
) -> tuple[Float[Tensor, "B J"], Float[Tensor, "B D"]]:
    """Return the gradients of the gates, and of the previous deter in `gru_update`."""
    reset, candidate, update = _split_gates(gates, blocks, grad.dtype)
    reset, update = torch.sigmoid(reset), torch.sigmoid(update - 1)
    new = torch.tanh(reset * candidate)
    dtanh = grad * update * (1 - new.square())
    dgates = [
        dtanh * candidate * reset * (1 - reset),
        dtanh * reset,
        grad * (new - deter) * update * (1 - update),
    ]
    stacked = rearrange(dgates, "n b (g i) -> b (g n i)", g=blocks)
    return stacked.to(gates.dtype), grad * (1 - update)


def sample(
    logits: Float[Tensor, "B L"], noise: Float[Tensor, "B S K"], unimix: float
) -> Float[Tensor, "B L"]:
    """Sample one-hot classes by an exponential race: argmax(probs / noise)."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    probs = torch.softmax(logits.view_as(noise).to(dtype), -1)
    probs = (1 - unimix) * probs + unimix / noise.shape[-1]
    index = torch.argmax(probs / noise, -1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, index, 1.0).to(logits.dtype).flatten(1)


def sample_backward(
    grad: Float[Tensor, "B L"],
    logits: Float[Tensor, "B L"],
    settings: tensors.ScanSettings,
) -> Float[Tensor, "B L"]:
    """Straight-through gradient: that of the probabilities."""
    grad = rearrange(grad, "b (s k) -> b s k", k=settings.classes)
    probs = torch.softmax(logits.to(grad.dtype).view_as(grad), -1)
    dlogits = probs * (grad - (grad * probs).sum(-1, keepdim=True))
    return ((1 - settings.unimix) * dlogits).flatten(1)


def _split_gates(gates: Tensor, blocks: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return rearrange(gates.to(dtype), "b (g n i) -> n b (g i)", g=blocks, n=3).unbind(0)
