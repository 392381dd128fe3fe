"""Lambda-returns."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def lambda_return(
    reward: Float[Tensor, "B T"],
    bootstrap: Float[Tensor, "B T"],
    is_last: Float[Tensor, "B T"],
    is_terminal: Float[Tensor, "B T"],
    discount: float,
    lam: float,
) -> Float[Tensor, "B T-1"]:
    """TD(lambda) targets for every step but the last.

    `reward[:, t]` is received on arriving at step t, and both flags describe step t, so
    the return of step t starts with the reward of step t + 1. It does not extend beyond
    a last step; it is bootstrapped there unless the step is terminal. Both flags may be
    probabilities.
    """
    discounts = (1 - is_terminal)[:, 1:] * discount
    trace = (1 - is_last)[:, 1:] * lam
    one_step = reward[:, 1:] + (1 - trace) * discounts * bootstrap[:, 1:]
    decay = discounts * trace
    returns = [bootstrap[:, -1]]
    for t in reversed(range(one_step.shape[1])):
        returns.append(one_step[:, t] + decay[:, t] * returns[-1])
    return torch.stack(returns[:0:-1], 1)
