"""Clipping factors and scalars of a LaProp update, computed in one kernel.

Global norm, clipping factors, learning rate, bias corrections and counters are about
fifty operations on scalars. In PyTorch, each of them is a kernel that takes longer to
launch than to run. The formulas are those of `Optimizer._prepare` and `LaProp`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from reverie.kernels.launch import jit
from reverie.nets.optim.laprop import LaProp
from reverie.nets.optim.optimizer import Optimizer, Scalar, Step, StepScalars


def prepare_step(
    opt: Optimizer, loss: Scalar, norms: Tensor, weight_norms: Tensor
) -> tuple[Step, Tensor]:
    """Return the `Step` of `Optimizer._prepare`, and its scalars as one tensor.

    The tensor begins with `gate`, `rate`, `mu_correction` and `nu_correction`, which
    the update kernel reads in this order.
    """
    assert isinstance(opt.rule, LaProp)
    config, count = opt.rule.config, len(norms)
    scalars, clip = norms.new_empty(6), norms.new_empty(count)
    _prepare_step[(1,)](
        *(norms, weight_norms, loss, opt.norms, clip, scalars),
        *(opt.step, opt.skipped, opt.consecutive_skips, count),
        *(
            config.lr,
            config.agc,
            *(_log(beta) for beta in (config.beta1, config.beta2)),
        ),
        *(float(config.warmup), float(max(1, config.anneal - config.warmup))),
        *(config.floor, config.schedule, bool(config.agc)),
        triton.next_power_of_2(count),
    )
    gate, rate, mu_correction, nu_correction, norm, lr = scalars.unbind()
    values = StepScalars(rate, mu_correction, nu_correction)
    return Step(gate > 0, gate, norm, lr, clip, values), scalars


def _log(beta: float) -> float:
    """Return the logarithm of `beta` as a float32 number, as in the plain optimizer."""
    rounded = torch.tensor(beta, dtype=torch.float32).item()
    return math.log(rounded) if rounded else -math.inf


def total_norms(sums: Tensor) -> tuple[Scalar, Scalar]:
    """Return the global norms of the parameter changes and of the parameters.

    `sums` has one row for each chunk of a parameter tensor, with the sums of squares of
    the changes and of the parameters.
    """
    norms = sums.new_empty(2)
    _total_norms[(2,)](sums, norms, len(sums), 1024)
    return norms[0], norms[1]


@jit
def _prepare_step(
    norms, weight_norms, loss, stored_norms, clips, scalars,
    steps, skipped, consecutive_skips, count,
    lr, agc, log_beta1, log_beta2, warmup, anneal, floor,
    SCHEDULE: tl.constexpr, CLIPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store clipping factors and scalars, and update the counters, in one program.

    `agc` is the threshold of adaptive gradient clipping, which CLIPS enables. `anneal`
    is the number of updates from the end of warm-up to the end of the schedule, and
    `floor` the final learning rate as a fraction of `lr`.
    """
    i = tl.arange(0, WIDTH)
    grad_norms = tl.load(norms + i, i < count, 0.0)
    tl.store(stored_norms + i, grad_norms, i < count)
    norm = tl.sqrt_rn(tl.sum(grad_norms * grad_norms))
    is_finite = (tl.abs(norm) < float("inf")) & (
        tl.abs(tl.load(loss).to(tl.float32)) < float("inf")
    )
    gate = is_finite.to(tl.float32)

    step = tl.load(steps)
    fraction = 1.0
    if SCHEDULE != "const":
        progress = tl.div_rn(tl.maximum(step - warmup, 0.0), anneal)
        progress = tl.minimum(progress, 1.0)
        if SCHEDULE == "linear":
            fraction = 1 - progress + floor * progress
        else:
            cosine = 0.5 * (1 + tl.cos(3.141592653589793 * progress))
            fraction = (1 - floor) * cosine + floor
    warmup_fraction = tl.div_rn(step, tl.maximum(warmup, 1.0))
    fraction = tl.where(step < warmup, warmup_fraction, fraction)
    rate = lr * fraction

    tl.store(steps, step + gate)
    tl.store(skipped, tl.load(skipped) + (1 - gate))
    tl.store(consecutive_skips, (tl.load(consecutive_skips) + 1) * (1 - gate))

    clip = tl.full((WIDTH,), 1.0, tl.float32)
    if CLIPS:
        # a minimum norm of 1e-3, so that weights that are zero can change
        limits = agc * tl.maximum(tl.load(weight_norms + i, i < count, 1.0), 1e-3)
        excess = tl.div_rn(tl.where(is_finite, grad_norms, 0.0), limits)
        clip = tl.div_rn(clip, tl.maximum(excess, 1.0))
    tl.store(clips + i, clip, i < count)

    exponent = tl.maximum(step + gate, 1.0).to(tl.float64)
    tl.store(scalars, gate)
    tl.store(scalars + 1, rate * gate)
    tl.store(scalars + 2, 1 - _power(log_beta1, exponent))
    tl.store(scalars + 3, 1 - _power(log_beta2, exponent))
    tl.store(scalars + 4, norm)
    tl.store(scalars + 5, rate)


@jit
def _power(log_base, exponent):
    """Return a power, computed in float64 and rounded to float32.

    The power is close to 1, so rounding errors would be large relative to `1 - power`.
    """
    return tl.exp(exponent * log_base).to(tl.float32)


@jit
def _total_norms(sums, norms, count, WIDTH: tl.constexpr):
    """Store the square root of the sum of a column; program i handles column i."""
    column = tl.program_id(0)
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, count, WIDTH):
        row = start + tl.arange(0, WIDTH)
        total += tl.load(sums + 2 * row + column, row < count, 0.0)
    tl.store(norms + column, tl.sqrt_rn(tl.sum(total)))
