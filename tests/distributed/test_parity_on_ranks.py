"""Training steps recorded from the original DreamerV3, computed by two ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "parity"))
from dreamerv3_recording import VARIANTS, Feed, Recording, has, load, under
from test_dreamerv3 import AVERAGED, CALLS, TOLERANCE, rel, to_layout

from reverie.convert.dreamerv3.weights import original_name
from reverie.distributed import collective


def train_on_rank(variant: str) -> list[tuple[dict, dict]]:
    """Return metrics and gradients of each recorded call, from all ranks together."""
    recording = Recording(variant)
    agent = recording.make_agent()
    names = [original_name(*name.split(".", 1)) for name in agent.opt.names]
    gradients: list[dict] = []
    apply = agent.opt.apply

    def spy(loss, grads):
        summed = collective.all_reduce_coalesced(grads)
        arrays = [to_layout(grad.numpy()) for grad in summed]
        gradients.append(dict(zip(names, arrays, strict=True)))
        return apply(loss, grads)

    agent.opt.apply = spy
    torch.set_flush_denormal(True)  # as in the recording, see test_dreamerv3.py
    try:
        metrics = []
        for index in range(CALLS):
            call = load(f"{variant}_call{index}")
            recording.queue_train_draws(call)
            feed = Feed(recording.batch(under(call, "data/")))
            with collective.synchronized():
                metrics.append(collective.average_metrics(agent.train(feed)))
            assert not recording.rng.draws
    finally:
        torch.set_flush_denormal(False)
    return list(zip(metrics, gradients, strict=True))


def magnitude(call: dict, key: str) -> float:
    """Mean magnitude of the numbers that a metric averages, if both signs occur."""
    return float(abs(call[AVERAGED[key]]).mean()) if key in AVERAGED else 0.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_reproduce_the_recorded_training_steps(ranks, variant):
    for results in ranks.run(2, train_on_rank, variant):
        for index, (metrics, gradients) in enumerate(results):
            call = load(f"{variant}_call{index}")
            theirs = {k: x for k, x in under(call, "metrics/").items() if "loss" in k}
            assert theirs
            errors = {
                key: rel(metrics[key], value, magnitude(call, key))
                for key, value in theirs.items()
            }
            if has(f"{variant}_grads_call{index}"):
                recorded = under(load(f"{variant}_grads_call{index}"), "grad/")
                assert set(recorded) == set(gradients)
                errors |= {k: rel(gradients[k], x) for k, x in recorded.items()}
            print(f"\n{variant}, call {index}, 2 ranks: {max(errors.values()):.1e}")
            assert {k: e for k, e in errors.items() if e > TOLERANCE} == {}
