"""KL divergence of one-hot categoricals on a CPU, with a closed-form gradient.

The softmax of PyTorch is slow on a CPU for few classes, and `OneHot.kl` is computed
twice to stop different gradients, although both results are equal.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from reverie.nets.distributions import softmax


def onehot_kl(
    post: Float[Tensor, "*b S K"], prior: Float[Tensor, "*b S K"], unimix: float
) -> tuple[
    Float[Tensor, "*b"], Float[Tensor, "*b"], Float[Tensor, ""], Float[Tensor, ""]
]:
    """Return `OneHot.kl` with a gradient for the prior, the same with a gradient for
    the posterior, and the mean entropies of posterior and prior.

    `unimix` must be positive.
    """
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _KL.apply(  # type: ignore[no-untyped-call]
        post, prior, unimix
    )
    return result


class _KL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, post: Tensor, prior: Tensor, unimix: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        softmaxes = softmax(torch.stack([post, prior]))
        probs = (softmaxes * (1 - unimix)).add_(unimix / post.shape[-1])
        logprobs = torch.log(probs)
        difference = logprobs[0] - logprobs[1]
        kl = (probs[0] * difference).sum((-2, -1))
        entropies = (probs * logprobs).sum((-2, -1)).neg_().reshape(2, -1).mean(1)
        ctx.save_for_backward(softmaxes, probs, logprobs, difference)
        ctx.unimix = unimix
        return kl, kl.clone(), entropies[0], entropies[1]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dyn: Tensor, rep: Tensor, post_entropy: Tensor, prior_entropy: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        softmaxes, probs, logprobs, difference = ctx.saved_tensors
        # Gradients of the probabilities. Terms that are equal for all classes are left
        # out, because they have no effect on the gradients of the logits.
        grads = torch.empty_like(probs)
        torch.mul(difference, rep[..., None, None], out=grads[0])
        torch.mul(probs[0] / probs[1], -dyn[..., None, None], out=grads[1])
        entropies = torch.stack([post_entropy, prior_entropy])
        if entropies.any():
            scale = entropies / dyn.numel()
            grads -= logprobs * scale.view(2, *[1] * (probs.ndim - 1))
        grads.mul_(softmaxes).mul_(1 - ctx.unimix)
        grads.addcmul_(softmaxes, grads.sum(-1, keepdim=True), value=-1)
        post, prior = grads.unbind()
        return post, prior, None
