"""Δ-IRIS with fused kernels compared with the original.

Repeats the tests of the plain modules with fast versions in Triton's interpreter, with
the same tolerances. This takes minutes.
"""

from __future__ import annotations

import iris_comparisons
import pytest
import test_iris_agent as agent
import test_iris_dynamics as dynamics
import test_iris_tokenizer as tokenizer
from iris_world_recording import tiny_world

pytest.importorskip("triton")

import triton

from reverie.kernels import accelerate
from reverie.kernels.optim.optimizer import FusedOptimizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not triton.knobs.runtime.interpret, reason="recorded numbers are on the CPU"
    ),
]


def with_fast_versions(make):
    """Wrap a factory so that it returns modules with fast versions."""

    def make_fast(*args, **kwargs):
        module = make(*args, **kwargs)
        accelerate.use_fast_versions(module)
        kinds = {type(part).__name__ for part in module.modules()}
        assert {"FastFrameEncoder", "FastResidual"} <= kinds
        return module

    return make_fast


@pytest.fixture(autouse=True)
def _use_fast_versions(monkeypatch):
    for module in (tokenizer, dynamics):
        monkeypatch.setattr(module, "tiny_world", with_fast_versions(tiny_world))
    monkeypatch.setattr(agent, "build", with_fast_versions(agent.build))
    monkeypatch.setattr(iris_comparisons, "Optimizer", FusedOptimizer)


def test_tokenizer_losses():
    tokenizer.test_losses("eval", False)


def test_tokenizer_update():
    tokenizer.test_gradients_and_one_update(False)


@pytest.mark.parametrize("variant", dynamics.SCALES)
def test_world_model_update(variant):
    dynamics.test_gradients_and_one_update(variant)


@pytest.mark.parametrize("plan", dynamics.PLANS)
def test_cached_steps(plan):
    dynamics.test_cached_steps_equal_the_full_forward(dynamics.tiny_world(), plan)


@pytest.mark.parametrize("variant", ["two_hot", "classes"])
def test_imagination(variant):
    dynamics.test_imagination_when_the_cache_is_cleared(variant)


@pytest.mark.parametrize("form", agent.FORMS)
def test_actor_critic_update(form):
    agent.test_losses_of_imagined_rollouts(form)
    agent.test_gradients_and_the_step_they_lead_to(form)
