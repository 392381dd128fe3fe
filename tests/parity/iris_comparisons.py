"""Comparisons of tensors, gradients and updates with those of the original Δ-IRIS."""

from __future__ import annotations

import copy
import re

import numpy as np
import torch
from iris_world_recording import as_bytes, under

from reverie.convert.delta_iris.names import (
    find_targets,
)
from reverie.nets.optim.adam import AdamConfig
from reverie.nets.optim.optimizer import Optimizer, dense_weights


def by_original_name(module: torch.nn.Module, values: list, rules: list, names) -> dict:
    """Return values of parameters, such as gradients, by their original names."""
    ours = dict(zip(dict(module.named_parameters()), values, strict=True))
    return {
        name: target.view(ours) for name, target in find_targets(names, rules).items()
    }


def close(ours, theirs, tolerance=1e-4):
    """Compare with a tolerance relative to the largest entry."""
    ours = np.asarray(ours.detach() if isinstance(ours, torch.Tensor) else ours)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(
        ours, theirs, rtol=0, atol=tolerance * max(1e-6, np.abs(theirs).max())
    )


def close_gradients(ours, theirs, norm):
    """Compare gradients with tolerances relative to their largest entries.

    Biases of convolutions before a group norm with one channel per group, and key
    biases before the softmax, have no effect: their recorded gradients are rounding
    noise, which is compared with the total gradient norm instead.
    """
    assert set(theirs) <= set(ours)
    for name, wanted in theirs.items():
        error = np.abs(ours[name].numpy() - wanted).max()
        limit = 2e-3 * np.abs(wanted).max()
        if before_a_norm(name, theirs):
            limit = max(limit, 3e-5 * norm)
        assert error <= limit, f"{name}: {error} > {limit}"


def close_update(module, rules, theirs, recorded, config: AdamConfig, grads):
    """Compare one optimizer step, from recorded and from computed gradients.

    Adam normalizes gradients, so rounding differences matter where a gradient is almost
    zero: computed gradients are compared only where they are not.
    """
    norm = float(recorded["opt/grad_norm_before_clip"])
    like = dict(module.named_parameters())
    exact = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    for name, target in find_targets(theirs, rules).items():
        target.view(exact).copy_(torch.tensor(theirs[name]))
    for gradients, threshold in ((list(exact.values()), 0.0), (grads, 1e-4)):
        moved = copy.deepcopy(module)
        opt = Optimizer(dict(moved.named_parameters()), config, dense_weights(moved))
        ok, metrics = opt.apply(torch.zeros(()), gradients)
        assert bool(ok)
        assert abs(float(metrics["opt/grad_norm"]) / norm - 1) < 1e-4
        after = by_original_name(moved, opt.tensors, rules, theirs)
        for name, wanted in under(recorded, "opt/after/").items():
            name = name.removeprefix("model.")
            size = np.abs(theirs[name])
            off = np.abs(after[name].detach().numpy() - wanted)
            worst = off[size >= threshold * size.max()].max()
            assert worst <= 1e-6, f"{name}: off by {worst}"


def before_a_norm(name, names):
    if name.endswith(".sa.key.bias"):
        return True
    match = re.fullmatch(r"(.*coder)\.(\d+)\.(.*)bias", name)
    if not match:
        return False
    if re.fullmatch(r"f\.[03]\.", match[3]):  # the bias of a norm
        return False
    inside = [re.match(rf"{re.escape(match[1])}\.(\d+)\.", other) for other in names]
    last = max(int(found[1]) for found in inside if found)
    return int(match[2]) < last - 2


def nearly_same_frames(ours, theirs):
    """Compare frames; a few pixels may be rounded differently by one."""
    off = (ours.int() - as_bytes(theirs).int()).abs()
    assert off.max() <= 1
    assert off.float().mean() <= 1e-3
