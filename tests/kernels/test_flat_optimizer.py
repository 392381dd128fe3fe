"""The optimizer that updates one matrix of all parameters equals the plain one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from reverie.kernels.accelerate import Accelerator
from reverie.kernels.optim import flat_cpu
from reverie.kernels.optim.flat_cpu import FlatOptimizer
from reverie.nets.optim.adam import AdamConfig, AMSGradConfig
from reverie.nets.optim.laprop import LaPropConfig
from reverie.nets.optim.optimizer import Optimizer, OptimizerConfig

CONFIGS: dict[str, OptimizerConfig] = {
    "laprop": LaPropConfig(lr=1e-2, warmup=2),
    "nesterov": LaPropConfig(lr=1e-2, warmup=0, nesterov=True, agc=0.0),
    "adam": AdamConfig(lr=1e-2, clip=0.5),
    "amsgrad": AMSGradConfig(lr=1e-2),
}


def make_parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (13, 7), "bias": (64,), "scalar": (), "conv": (4, 3, 3, 3)}
    tensors = {k: torch.randn(x, generator=generator) for k, x in shapes.items()}
    tensors["conv"] = tensors["conv"].to(memory_format=torch.channels_last)
    return {key: x.requires_grad_() for key, x in tensors.items()}


def make(config: OptimizerConfig, cls: Any = Optimizer, scaling: bool = False) -> Any:
    return cls(make_parameters(), config, decayed=(), scaling=scaling)


def train(opt: Optimizer, start: int, stop: int, bad: int = -1) -> list[dict[str, Any]]:
    """Take updates with random gradients; that of the update `bad` is not finite."""
    results = []
    for i in range(start, stop):
        generator = torch.Generator().manual_seed(i)
        scales = [torch.randn(x.shape, generator=generator) for x in opt.tensors]
        loss = sum(
            (scale * x).sum() + (0.1 * x).square().sum()
            for scale, x in zip(scales, opt.tensors, strict=True)
        )
        stepped, metrics = opt.update(loss * (torch.nan if i == bad else 1))
        assert bool(stepped) == (i != bad)
        results.append(metrics)
    return results


def assert_equal(fast: Optimizer, plain: Optimizer) -> None:
    for a, b in zip(fast.tensors, plain.tensors, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    fast_state, state = fast.state_dict(), plain.state_dict()
    assert fast_state.keys() == state.keys()
    for key, value in state.items():
        torch.testing.assert_close(fast_state[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("scaling", [False, True])
def test_parameters_state_and_metrics_equal_the_plain_ones(name, scaling):
    config = CONFIGS[name]
    plain, fast = (make(config, cls, scaling) for cls in (Optimizer, FlatOptimizer))
    assert FlatOptimizer.supports(plain)
    expected = train(plain, 0, 6, bad=3)
    for fast_metrics, metrics in zip(train(fast, 0, 6, bad=3), expected, strict=True):
        assert fast_metrics.keys() == metrics.keys()
        for key, value in metrics.items():
            torch.testing.assert_close(
                *(torch.as_tensor(x) for x in (fast_metrics[key], value)),
                **{"rtol": 1e-5, "atol": 1e-6, "equal_nan": True},
            )
    assert_equal(fast, plain)


def test_a_skipped_update_names_the_parameters_and_changes_nothing():
    opt = make(CONFIGS["laprop"], FlatOptimizer)
    train(opt, 0, 2)
    before = copy.deepcopy((opt.tensors, opt.moments))
    train(opt, 2, 3, bad=2)
    assert opt.nonfinite() == opt.names
    torch.testing.assert_close((opt.tensors, opt.moments), before, rtol=0, atol=0)


@pytest.mark.parametrize("classes", [(Optimizer, FlatOptimizer), (FlatOptimizer,) * 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_state_can_be_loaded_by_both_optimizers(classes, reverse):
    config, order = CONFIGS["laprop"], classes[::-1] if reverse else classes
    first, second = (make(config, cls) for cls in order)
    train(first, 0, 3)
    state = first.state_dict()
    with torch.no_grad():
        for a, b in zip(second.tensors, first.tensors, strict=True):
            a.copy_(b)
    second.load_state_dict(state)
    train(first, 3, 5)
    train(second, 3, 5)
    assert_equal(second, first)


def test_tensors_of_a_state_have_their_own_memory():
    opt = make(CONFIGS["laprop"], FlatOptimizer)
    train(opt, 0, 2)
    state = opt.state_dict()
    tensors = [x for key in opt.moments for x in state[key].values()]
    for x in tensors:
        assert x.untyped_storage().nbytes() == x.nbytes
    before = copy.deepcopy(tensors)
    train(opt, 2, 3)
    torch.testing.assert_close(tensors, before, rtol=0, atol=0)


def test_parameters_changed_by_others_are_used():
    plain, fast = (make(CONFIGS["adam"], cls) for cls in (Optimizer, FlatOptimizer))
    for opt in (plain, fast):
        train(opt, 0, 2)
        with torch.no_grad():
            opt.tensors[0].mul_(2)
        train(opt, 2, 4)
    assert_equal(fast, plain)


def test_the_accelerator_uses_it_for_small_models_on_a_cpu(monkeypatch):
    def made_by(compile: str, config: Any = CONFIGS["laprop"], **options: Any) -> Any:
        accelerator = Accelerator(compile, torch.device("cpu"))
        return type(accelerator.make_optimizer(make_parameters(), config, **options))

    assert made_by("step") is FlatOptimizer
    assert made_by("none") is Optimizer
    decay = AdamConfig(wd=0.1)
    assert made_by("step", decay) is FlatOptimizer  # no names
    assert made_by("step", decay, decayed=["matrix"]) is Optimizer
    assert made_by("step", LaPropConfig(eps=0.0)) is Optimizer
    monkeypatch.setattr(flat_cpu, "MAX_SIZE", 100)
    assert made_by("step") is Optimizer
