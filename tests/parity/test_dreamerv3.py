"""DreamerV3 is the original's function: recorded numbers in, recorded numbers out.

Everything runs through `train`, `policy` and `report`; only the draws are replaced.
The recordings were made on a CPU that rounds subnormal numbers to zero, which the
optimizer turns into visible moves of bins that never happen, so the tests round alike.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from dreamerv3_recording import (
    VARIANTS,
    Feed,
    Recording,
    Spy,
    has,
    index_of,
    load,
    under,
)

from reverie.agents import open_loop
from reverie.convert.dreamerv3.weights import original_name, to_original
from reverie.nets.rng import Rng

CALLS = 3

TOLERANCE = 2e-5
"""Relative L2 error allowed per tensor, for forward values, losses and gradients."""

AVERAGED = {
    "adv": "out/img/adv",
    "rew": "out/img/rew",
    "val": "out/img/value",
    "slowval": "out/img/slowvalue",
    "tar": "out/img/ret",
    "loss/policy": "out/loss/policy",
}
"""Metrics that are means of numbers of both signs. If every number is right to a part
e, their mean is right to e times the mean *magnitude*, which cancelling can make much
larger than the mean; so that magnitude is what their error is measured by."""


def flush_subnormals(on: bool = True) -> bool:
    return torch.set_flush_denormal(on)


def rel(ours, theirs, at_least: float = 0.0) -> float:
    ours = np.asarray(torch.as_tensor(ours).detach(), np.float64)
    theirs = np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    size = max(np.linalg.norm(theirs), at_least)
    gap = np.linalg.norm(ours - theirs)
    return float(gap / size) if size else float(gap)


class Replay:
    """A variant run through its training calls once, with all that was seen."""

    def __init__(self, variant: str):
        self.variant = variant
        self.recording = Recording(variant)
        self.agent = self.recording.make_agent()
        self.calls, self.ours, self.grads, self.after = [], [], [], []
        self.feeds, self.moments = [], None
        spy = Spy(self.agent)
        self.flushed = flush_subnormals(True)
        try:
            for i in range(CALLS):
                self._train(spy, load(f"{variant}_call{i}"))
        finally:
            flush_subnormals(False)

    def _train(self, spy: Spy, call: dict) -> None:
        spy.clear()
        self.recording.queue_train_draws(call)
        feed = Feed(self.recording.batch(under(call, "data/")))
        carry_in = carry_entries("carry_in", self.agent.carry["train"])
        metrics = self.agent.train(feed)
        assert not self.recording.rng.draws, "some recorded draws were never asked for"
        self.calls.append(call)
        self.feeds.append(feed)
        ours = {f"metrics/{key}": value for key, value in metrics.items()}
        ours |= carry_in
        ours |= carry_entries("carry_out", self.agent.carry["train"])
        ours |= self._forward(spy.calls, call)
        self.ours.append(ours)
        names = [original_name(*name.split(".", 1)) for name in self.agent.opt.names]
        grads = [grad.numpy() for grad in spy.calls["grads"][0]]
        self.grads.append(dict(zip(names, map(to_layout, grads), strict=True)))
        state = to_original(self.agent.state_dict())
        self.after.append({key: value.copy() for key, value in state.items()})

    def _forward(self, seen: dict, call: dict) -> dict:
        """Ours under the names of the recording."""
        learned, agent = seen["loss"][0], self.agent
        state, batch = seen["loss_args"][0][:2]
        imagined, (replayed,) = seen["imag_loss"][0], seen["repl_loss"]
        states, dream = learned.states, learned.rollout
        sequence = [x for x in seen["priorlogit"] if x.ndim == 4]
        steps = [x for x in seen["priorlogit"] if x.ndim == 3]
        post, prior = torch.stack(seen["obslogit"], 1), sequence[0]
        distribution = agent.world.dyn.distribution
        value, img_value = seen["val"][1], seen["val"][0]
        norm = agent.actor_critic.retnorm
        ours = {
            "out/carry_in/deter": state.deter,
            "out/carry_in/stoch": state.stoch,
            "out/tokens": seen["enc"][0],
            "out/deter": states.deter,
            "out/stoch": states.stoch,
            "out/post_logits": post,
            "out/prior_logits": prior,
            "out/kl_raw": distribution(post).kl(distribution(prior)),
            "out/rew_logits": seen["rew"][0].logits,
            "out/rew_pred": seen["rew"][0].pred(),
            "out/con_logit": seen["con"][0].logit,
            "out/con_prob": seen["con"][0].prob(),
            "out/value_logits": seen["replay_val"][0].logits,
            "out/img/deter": dream.states.deter[:, 1:],
            "out/img/stoch": dream.states.stoch[:, 1:],
            "out/img/prior_logits": torch.stack(steps, 1),
            "out/img/rew": seen["rew"][1].pred(),
            "out/img/con": seen["con"][1].prob(),
            "out/img/value": img_value.pred(),
            "out/img/value_logits": img_value.logits,
            "out/img/slowvalue": seen["slowval"][0].pred(),
            "out/img/slowvalue_logits": seen["slowval"][0].logits,
            "out/img/weight": imagined.weight,
            "out/img/ret": imagined.ret,
            "out/img/adv": imagined.adv,
            "out/img/logpi": imagined.logp,
            "out/img/loss_policy": imagined.losses["policy"],
            "out/img/loss_value": imagined.losses["value"],
            "out/img/retnorm_lo": norm.lo.clone(),
            "out/img/retnorm_hi": norm.hi.clone(),
            "out/img/retnorm_scale": norm.stats()[1],
            "out/repl/boot": seen["repl_loss_args"][0][4],
            "out/repl/ret": replayed.ret,
            "out/repl/value": value.pred(),
            "out/repl/value_logits": value.logits,
            "out/repl/slowvalue": seen["slowval"][1].pred(),
            "out/repl/loss_repval": replayed.loss,
            "out/loss_total": seen["total"][0],
            "entries/deter": states.deter,
            "entries/stoch": states.stoch,
        }
        for key, loss in learned.losses.items():
            ours[f"out/loss/{key}"] = loss
        for key, out in seen["dec"][0].items():
            out = getattr(out, "dist", out)
            ours[f"out/recon/{key}"] = out.mean if hasattr(out, "mean") else out.logits
        for key in self.recording.obs_space:
            ours[f"out/obs/{key}"] = batch[key]
        for key in self.recording.act_space:
            ours[f"out/prevact/{key}"] = batch["prevact"][key]
            ours[f"out/img/act/{key}"] = dream.actions[key]
            ours[f"out/img/entropy/{key}"] = imagined.entropy[key]
            ours |= policy_entries(f"out/pol/{key}", seen["replay_pol"][0][key])
            ours |= policy_entries(f"out/img/pol/{key}", seen["pol"][-1][key])
        return ours

    def possible_bins(self, part: str, upto: int) -> np.ndarray:
        """Bins of a two-hot head that had a probability of 1e-30 in some row."""
        names = {"rew": ["out/rew_logits"]}.get(
            part, ["out/value_logits", "out/img/value_logits"]
        )
        best = -np.inf
        for call in self.calls[: upto + 1]:
            for name in names:
                logits = call[name].astype(np.float64)
                logits = logits - np.logaddexp.reduce(logits, -1)[..., None]
                best = np.maximum(best, logits.reshape(-1, logits.shape[-1]).max(0))
        return best >= np.log(1e-30)

    def moved(self, name: str, upto: int) -> np.ndarray:
        """Entries whose gradient was more than rounding noise in every call so far."""
        mask = np.ones(self.grads[0][name].shape, bool)
        for grads in self.grads[: upto + 1]:
            size = np.abs(grads[name])
            mask &= size > 1e-4 * size.max()
        part = name.split("/")[0].replace("slowval", "val")
        if "head/logits" in name and part in ("rew", "val"):
            mask &= self.possible_bins(part, upto)
        return mask


def to_layout(grad: np.ndarray) -> np.ndarray:
    axes = {2: (1, 0), 4: (2, 3, 1, 0)}.get(grad.ndim)
    return grad if axes is None else grad.transpose(axes)


def carry_entries(prefix: str, carry) -> dict:
    state = {f"{prefix}/{k}": x.clone() for k, x in carry.state._asdict().items()}
    return state | {
        f"{prefix}/prevact/{k}": x.clone() for k, x in carry.prevact.items()
    }


def policy_entries(prefix: str, out) -> dict:
    if hasattr(out, "std"):
        return {f"{prefix}/mean": out.mean, f"{prefix}/stddev": out.std}
    return {f"{prefix}/logits": out.logits}


@cache
def replay(variant: str) -> Replay:
    return Replay(variant)


pytestmark = pytest.mark.parametrize("variant", VARIANTS)
calls = pytest.mark.parametrize("call", range(CALLS))


@calls
def test_every_recorded_tensor_of_a_training_call(variant, call):
    run = replay(variant)
    theirs, ours = run.calls[call], run.ours[call]
    recorded = [k for k in theirs if not k.startswith(("data/", "metrics/"))]
    assert len(recorded) > 50
    assert not [key for key in recorded if key not in ours]
    errors = {}
    for key in recorded:
        a, b = np.asarray(torch.as_tensor(ours[key]).detach()), theirs[key]
        if call and key.endswith(("rew_logits", "value_logits", "slowvalue_logits")):
            part = "rew" if "rew_logits" in key else "val"
            bins = run.possible_bins(part, call)
            a, b = a[..., bins], b[..., bins]
        errors[key] = rel(a, b)
    assert {k: e for k, e in errors.items() if e > TOLERANCE} == {}


@calls
def test_every_metric_under_its_own_name(variant, call):
    run = replay(variant)
    theirs, ours = under(run.calls[call], "metrics/"), under(run.ours[call], "metrics/")
    assert not [key for key in theirs if key not in ours]
    if not run.flushed:  # these two see the bins that never happen
        theirs = {
            k: v for k, v in theirs.items() if not k.endswith(("te_rms", "m_rms"))
        }
    errors = {}
    for key, value in theirs.items():
        source = run.calls[call].get(AVERAGED.get(key, ""))
        magnitude = 0.0 if source is None else float(np.abs(source).mean())
        if key in ("ret", "ret_min", "ret_max"):
            low = run.calls[call]["out/img/retnorm_lo"]
            scale = run.calls[call]["out/img/retnorm_scale"]
            magnitude = float(
                np.abs(run.calls[call]["out/img/ret"] - low).mean() / scale
            )
        errors[key] = rel(ours[key], value, magnitude)
    assert {k: e for k, e in errors.items() if e > TOLERANCE} == {}


@calls
def test_gradients_and_updates(variant, call):
    if not has(f"{variant}_grads_call{call}"):
        pytest.skip("gradients of this call were not recorded")
    run, recorded = replay(variant), load(f"{variant}_grads_call{call}")
    theirs = under(recorded, "grad/")
    assert set(theirs) == set(run.grads[call])
    errors = {key: rel(run.grads[call][key], value) for key, value in theirs.items()}
    assert {k: e for k, e in errors.items() if e > TOLERANCE} == {}

    before = run.after[call - 1] if call else run.recording.params
    rate = run.recording.config.opt.lr
    for key, value in under(recorded, "update/").items():
        # the difference of two float32 parameters is right to an ulp of the parameter
        ulp = 2 * np.spacing(np.abs(before[key]))
        gap = np.abs(run.after[call][key] - before[key] - value)
        right = (gap <= 1e-3 * rate + ulp)[run.moved(key, call)]
        assert right.size == 0 or right.mean() >= 0.99, key


@pytest.mark.parametrize("updates", [1, 3])
def test_parameters_after_updates(variant, updates):
    run, theirs = replay(variant), load(f"{variant}_after{updates}")
    ours, rate = run.after[updates - 1], run.recording.config.opt.lr
    for key, value in theirs.items():
        if key in run.grads[0]:
            mask = run.moved(key, updates - 1)
            ulp = np.spacing(np.abs(value))
            right = np.abs(ours[key] - value) <= updates * (1e-3 * rate + ulp)
            assert mask.sum() == 0 or right[mask].mean() >= 0.99, key
        elif key.startswith("slowval/head/logits"):
            bins = run.possible_bins("val", updates - 1)
            assert rel(ours[key][..., bins], value[..., bins]) <= TOLERANCE, key
        else:
            assert rel(ours[key], value) <= TOLERANCE, key


def test_optimizer_state_after_three_updates(variant):
    run, theirs = replay(variant), load(f"{variant}_optstate_after3")
    ours = run.after[2]
    for key, value in theirs.items():
        assert ours[key].shape == value.shape, key
        name = key.split("/", 4)[-1]
        if name not in run.grads[0]:
            assert ours[key] == value, key  # the counters
            continue
        mask = run.moved(name, 2)
        if not mask.any():
            continue
        if key.startswith("opt/state/1/"):  # magnitudes, squares of gradients
            assert rel(ours[key][mask], value[mask]) <= 2 * TOLERANCE, key
        else:  # momentum of gradients divided by their magnitudes: of order one
            right = np.abs(ours[key] - value)[mask] <= 1e-3
            assert right.mean() >= 0.99, key


@calls
def test_fresh_latents_go_back_to_the_replay(variant, call):
    run = replay(variant)
    feed, theirs = run.feeds[call], run.calls[call]
    context = run.recording.config.replay_context
    if not context:
        assert feed.updates == []
        return
    ((stepid, extras),) = feed.updates
    np.testing.assert_array_equal(stepid, theirs["data/stepid"][:, context:])
    assert rel(extras["dyn/deter"], theirs["entries/deter"]) <= TOLERANCE
    index = index_of(theirs["entries/stoch"])
    assert torch.equal(extras["dyn/stoch"].long(), index)


def test_acting(variant):
    recording, recorded = Recording(variant), load(f"{variant}_policy")
    agent = recording.make_agent()
    seen = {}
    parts = agent.components()
    parts["enc"].register_forward_hook(lambda m, a, out: seen.update(tokens=out[:, 0]))
    parts["pol"].register_forward_hook(lambda m, a, out: seen.update(pol=out))
    steps = sorted({key.split("/")[0] for key in recorded})
    assert len(steps) >= 3
    rows = len(recorded["t0/obs/is_first"])
    carry = agent.initial(rows)
    for step in steps:
        theirs = under(recorded, f"{step}/")
        recording.rng.draws = [index_of(theirs["stoch"])[:, None].squeeze(1)]
        recording.rng.draws += [
            torch.tensor(theirs[f"act/{key}"]) for key in recording.act_space
        ]
        ours = carry_entries("carry_in", carry)
        ours = {k.replace("carry_in/prevact", "prevact"): v for k, v in ours.items()}
        carry, action, extras = agent.policy(carry, under(theirs, "obs/"))
        ours |= {f"act/{key}": value for key, value in action.items()}
        ours |= {"tokens": seen["tokens"], **carry.state._asdict()}
        for key in recording.act_space:
            ours |= policy_entries(f"pol/{key}", seen["pol"][key])
        for key, value in theirs.items():
            if not key.startswith("obs/"):
                assert rel(ours[key], value) <= TOLERANCE, (step, key)
        if agent.extras:
            assert rel(extras["dyn/deter"], theirs["deter"]) <= TOLERANCE
            assert torch.equal(
                torch.tensor(extras["dyn/stoch"]).long(), index_of(theirs["stoch"])
            )


def original_layout(truth, model, observed, border=2, pause=10):
    """Arrange frames as the original does, with colored borders and black frames."""
    error = (model.astype(int) - truth + 255) // 2
    stack = np.concatenate([truth, model, error.astype(np.uint8)], 2)
    sides = (border, border)
    video = np.pad(stack, ((0, 0), (0, 0), sides, sides, (0, 0)))
    frame = np.pad(np.zeros(stack.shape[2:4], bool), border, constant_values=True)
    video[:, :observed, frame] = (0, 255, 0)
    video[:, observed:, frame] = (255, 0, 0)
    sequences, steps, height, width, channels = video.shape
    grid = video.transpose(1, 2, 0, 3, 4)
    grid = grid.reshape(steps, height, sequences * width, channels)
    return np.concatenate([grid, np.zeros_like(grid[:pause])])


def test_open_loop_report(variant, monkeypatch):
    recording, recorded = Recording(variant), load(f"{variant}_report")
    agent = recording.make_agent()
    loss, spent = agent.loss, Rng(0, "loss", torch.device("cpu"))
    # the recording has no draws for the losses of a report, only for what it looks at
    agent.loss = lambda state, batch, rng, training: loss(state, batch, spent, training)
    observed, imagined = [], []
    observe, imagine = agent.world.observe, agent.world.imagine

    def spy_observe(*args):
        observed.append(observe(*args))
        return observed[-1]

    def spy_imagine(state, policy, horizon, rng):
        imagined.append(imagine(state, policy, horizon, rng))
        return imagined[-1]

    agent.world.observe, agent.world.imagine = spy_observe, spy_imagine
    logits = {"obs": [], "img": []}
    dyn = agent.components()["dyn"]
    dyn.obslogit.register_forward_hook(lambda m, a, out: logits["obs"].append(out))
    dyn.priorlogit.register_forward_hook(lambda m, a, out: logits["img"].append(out))

    draws = [*index_of(recorded["obs/stoch"]).unbind(1)]
    draws += [*index_of(recorded["img/stoch"]).unbind(1)]
    recording.rng.draws = draws
    half, rest = recorded["obs/deter"].shape[1], recorded["img/deter"].shape[1]
    drawn = []
    draw = open_loop.open_loop_video

    def spy_draw(truth, model, observed, boundaries=None):
        drawn.append((truth, model, observed))
        return draw(truth, model, observed, boundaries=boundaries)

    monkeypatch.setattr(open_loop, "open_loop_video", spy_draw)
    report = agent.report(Feed(recording.batch(under(recorded, "data/"))))
    assert not draws
    states, dream = observed[-1], imagined[-1].states
    ours = {
        "obs/deter": states.deter,
        "obs/stoch": states.stoch,
        "obs/logit": torch.stack(logits["obs"][-half:], 1),
        "img/deter": dream.deter[:, 1:],
        "img/stoch": dream.stoch[:, 1:],
        "img/logit": torch.stack(logits["img"][-rest:], 1),
    }
    for key, value in ours.items():
        assert rel(value, recorded[key]) <= TOLERANCE, key
    if "video" in recorded:
        (arguments,) = drawn
        video = original_layout(*arguments)
        assert video.shape == recorded["video"].shape
        gap = np.abs(video.astype(int) - recorded["video"].astype(int))
        # a prediction on the border of two shades may be cut off to either
        assert gap.max() <= 1
        assert (gap > 0).mean() < 1e-3
    for key in under(load(f"{variant}_call0"), "metrics/"):
        assert key.startswith("opt/") or key in report, key
