"""With the GPU twins in place, DreamerV3 is still the original's function.

The recorded calls go through an agent whose parts were all replaced, in float32: on a
GPU where there is one, else in Triton's interpreter. What leaves an update (metrics,
gradients, extras) is compared with the recording; sums are added in another order than
in the plain parts, and the encoder's maximum takes another path, so the tolerance is
wider than theirs.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dreamerv3_recording import (
    VARIANTS,
    Feed,
    RecordedSamples,
    Recording,
    has,
    load,
    under,
)

from reverie.agents.dreamer.agent import Dreamer
from reverie.agents.options import BuildOptions
from reverie.convert.dreamerv3.weights import from_original, original_name
from reverie.kernels import accelerate

triton = pytest.importorskip("triton")

TOLERANCE = 1e-4
"""Relative L2 error allowed per tensor."""

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CALLS = 3
DIFFERENCES = ("adv", "ret", "val", "slowval", "tar", "rew", "loss/policy")
"""Metrics whose parts cancel; they are covered by the losses and gradients."""


class RecordedClocks(RecordedSamples):
    """Recorded choices as clocks: the one that was chosen has already rung."""

    def categorical(self, probs):
        return super().categorical(probs).to(probs.device)

    def normal(self, mean, std):
        return super().normal(mean, std).to(mean.device)

    def exponential(self, like):
        # all steps of a scan, one step of a dream, or an action
        classes, steps = like.shape[-1], like.shape[1] if like.dim() == 4 else 1
        draws = torch.stack([self.draws.pop(0) for _ in range(steps)], 1)
        chosen = torch.nn.functional.one_hot(draws.long(), classes).reshape(like.shape)
        return torch.where(chosen.bool(), 1e-30, 1.0).to(like.device)


def make_fast(recording: Recording) -> Dreamer:
    agent = Dreamer(
        recording.obs_space,
        recording.act_space,
        recording.config,
        BuildOptions(DEVICE, compile="step"),
    )
    agent.load_state_dict(from_original(recording.params, agent.state_dict()))
    recording.rng = RecordedClocks()
    agent.rng = dict.fromkeys(agent.rng, recording.rng)
    return agent


def rel(ours, theirs) -> float:
    gap, size = np.linalg.norm(ours - theirs), np.linalg.norm(theirs)
    return float(gap / size) if size else float(gap)


def as_recorded(grad: torch.Tensor) -> np.ndarray:
    array = grad.float().cpu().numpy()
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    return array.T if array.ndim == 2 else array


@pytest.mark.extended
@pytest.mark.skipif(
    DEVICE.type == "cpu" and not triton.knobs.runtime.interpret,
    reason="no GPU, and no interpreter in its place",
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_updates_with_all_twins_in_place(variant, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(accelerate, "kernels_available", lambda device: True)
    recording = Recording(variant)
    agent = make_fast(recording)
    plain = [type(part) for part in agent.world.children()]
    assert all(kind.__name__.startswith("Fast") for kind in plain[:3]), plain
    seen = []
    apply = agent.opt.apply
    agent.opt.apply = lambda loss, grads: seen.append(grads) or apply(loss, grads)
    errors = {}
    for i in range(CALLS if DEVICE.type == "cuda" else 1):
        call = load(f"{variant}_call{i}")
        recording.queue_train_draws(call)
        batch = recording.batch(under(call, "data/"))
        feed = Feed({key: value.to(DEVICE) for key, value in batch.items()})
        metrics = agent.train(feed)
        assert not recording.rng.draws, "some recorded draws were never asked for"
        for key, value in under(call, "metrics/").items():
            if key.startswith(DIFFERENCES) or key.endswith(("te_rms", "m_rms")):
                continue
            errors[f"call {i} {key}"] = rel(np.asarray(float(metrics[key])), value)
        if agent.extras:
            noted = feed.updates[0][1]["dyn/deter"].cpu().numpy()
            errors[f"call {i} deter"] = rel(noted, call["out/deter"])
        if has(f"{variant}_grads_call{i}"):
            theirs = under(load(f"{variant}_grads_call{i}"), "grad/")
            for name, grad in zip(agent.opt.names, seen[-1], strict=True):
                key = original_name(*name.split(".", 1))
                ours = as_recorded(grad).reshape(theirs[key].shape)
                errors[f"call {i} {key}"] = rel(ours, theirs[key])
    assert {k: e for k, e in errors.items() if not e < TOLERANCE} == {}
