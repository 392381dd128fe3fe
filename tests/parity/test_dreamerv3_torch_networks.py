"""The networks of dreamerv3-torch give the outputs that its own code recorded.

The tests read all recordings in `REVERIE_PARITY_DIR/dreamerv3_torch`, and recordings of
other sizes, spaces and options that `dreamerv3_torch_recorder.py` computes from the
specification. `tests/agents/test_dreamerv3_torch_update.py` compares an update.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from dreamerv3_torch_networks import Networks
from dreamerv3_torch_recorder import RECORDINGS, record, write_recording
from dreamerv3_torch_recording import FOLDER, NAMES, Modes, Recording

from reverie.convert.dreamerv3_torch.checkpoint import read_weights
from reverie.convert.dreamerv3_torch.config import convert_options
from reverie.convert.dreamerv3_torch.sizes import infer_settings
from reverie.worlds.rssm.dynamics import RSSMState

TOLERANCE = 2e-5
"""Relative L2 error allowed for each tensor."""

open_recording = cache(Recording)


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """The folder of the recordings that are computed from the specification."""
    folder = tmp_path_factory.mktemp("recordings")
    for name in RECORDINGS:
        write_recording(folder, name)
    return folder


@pytest.fixture(params=[*NAMES, *(f"computed-{name}" for name in RECORDINGS)])
def recording(request, computed) -> Recording:
    name = request.param.removeprefix("computed-")
    return open_recording(FOLDER if request.param in NAMES else computed, name)


def check(actual, expected, name: str) -> None:
    actual = np.asarray(torch.as_tensor(actual).detach(), np.float64)
    expected = np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    error = np.linalg.norm(actual - expected)
    assert error <= TOLERANCE * np.linalg.norm(expected), (name, error)


def check_state(recording, actual, expected, name: str) -> None:
    """Compare deter, stoch and, if recorded, the statistics of a state."""
    states, statistics = actual
    if "deter" in expected:
        check(states.deter, expected["deter"], f"{name}/deter")
    if "stoch" in expected and states.stoch is not None:
        stoch = states.stoch.reshape(expected["stoch"].shape)
        check(stoch, expected["stoch"], f"{name}/stoch")
    if "logit" in expected:
        check(statistics, expected["logit"], f"{name}/logit")
    if "mean" in expected:
        check(statistics[..., 0], expected["mean"], f"{name}/mean")
        check(statistics[..., 1], expected["std"], f"{name}/std")


@pytest.fixture
def observed(recording):
    """Posterior states from the most likely samples, and their statistics."""
    world, batch = recording.world, recording.batch
    start, tokens = world.initial(len(batch["is_first"])), world.enc(batch, world.dtype)
    with torch.no_grad():
        return world.dyn.observe(
            start, tokens, batch["prevact"], batch["is_first"], Modes()
        )


def recorded_states(recording, prefix: str) -> RSSMState:
    data = recording.under(prefix)
    deter, stoch = torch.tensor(data["deter"]), torch.tensor(data["stoch"])
    config = recording.world.config
    return RSSMState(
        deter, stoch.reshape(*deter.shape[:-1], config.stoch, max(1, config.classes))
    )


def test_embeddings(recording):
    embed = recording.world.enc(recording.batch, torch.float32)
    check(embed, recording.data["embed"], "embed")


def test_posterior_and_prior(recording, observed):
    states, statistics = observed
    check_state(recording, (states, statistics), recording.under("post/"), "post")
    prior = recording.world.dyn.prior_logits(states.deter)
    expected = {k: v for k, v in recording.under("prior/").items() if k != "stoch"}
    check_state(recording, (states, prior), expected, "prior")


def test_features(recording, observed):
    check(recording.world.features(observed[0]), recording.data["feat"], "feat")


def test_heads(recording):
    """On the recorded features: modes and log-probabilities of the recorded values."""
    world, states = recording.world, recorded_states(recording, "post/")
    feat, expected = world.features(states), recording.under("head/")
    predicted = {
        f"decoder/{key}": (dist, recording.batch[key])
        for key, dist in world.dec(*world.decoder_inputs(states)).items()
    }
    reward, cont = world.rew(feat), world.con(feat)
    predicted["reward"] = (reward, recording.batch["reward"])
    predicted["cont"] = (cont, (~recording.batch["is_terminal"].bool()).float())
    names = {name.rpartition("/")[0] for name in expected}
    assert names == predicted.keys()
    for name, (dist, target) in predicted.items():
        mode = cont.prob() if name == "cont" else dist.pred()
        key = name.removeprefix("decoder/")
        if key in world.dec.unscaled:
            mode = 255 * mode
        mode = mode.reshape(expected[f"{name}/mode"].shape)
        check(mode, expected[f"{name}/mode"], name)
        check(-dist.loss(target), expected[f"{name}/logprob"], f"{name}/logprob")


def test_kl_losses(recording, observed):
    world, options = recording.world, recording.options
    states, statistics = observed
    kl = world.dyn.kl_terms(statistics, world.dyn.prior_logits(states.deter))
    free = world.config.free_nats
    dyn, rep = kl.dyn.clamp(min=free), kl.rep.clamp(min=free)
    expected = recording.under("kl/")
    loss = options["dyn_scale"] * dyn + options["rep_scale"] * rep
    scales = recording.agent.config.loss_scales
    assert (scales.dyn, scales.rep) == (options["dyn_scale"], options["rep_scale"])
    for name, value in {"value": kl.dyn, "dyn": dyn, "rep": rep, "loss": loss}.items():
        check(value, expected[name], f"kl/{name}")


def test_actor_and_critics(recording):
    feat = torch.tensor(recording.data["feat"])
    behaviour, expected = recording.behaviour, recording.under("actor/")
    dist = behaviour.pol(feat)["action"]
    if recording.is_discrete:
        mode = torch.nn.functional.one_hot(dist.pred(), dist.probs.shape[-1])
        check(mode, expected["mode"], "actor/mode")
    else:
        check(dist.pred(), expected["mode"], "actor/mode")
    ours = {
        "logits": lambda: dist.logprobs,
        "mean": lambda: dist.mean,
        "std": lambda: dist.std,
        "entropy": lambda: dist.entropy(),
    }
    compared = [key for key in expected if key in ours]
    assert recording.is_discrete is False or "logits" in compared
    for key in compared:
        value = ours[key]()
        check(value.reshape(expected[key].shape), expected[key], f"actor/{key}")
    for name, head in (("value", behaviour.val), ("slow_value", behaviour.slowval)):
        mode = recording.data[f"{name}/mode"]
        check(head(feat).pred().reshape(mode.shape), mode, name)


def test_imagination(recording):
    """The prior continues from the last posterior with recorded actions."""
    world, expected = recording.world, recording.under("imagine/")
    actions = torch.tensor(expected["action"])
    start = RSSMState(*(x[:, -1] for x in recorded_states(recording, "post/")))
    count = len(start.deter)
    steps = iter([a.expand(count, -1) for a in (*actions, actions[0])])
    policy = lambda state: {"action": next(steps)}  # noqa: E731
    rollout = world.imagine(start, policy, len(actions), Modes())
    states = RSSMState(*(x[:, 1:] for x in rollout.states))
    prior = world.dyn.prior_logits(states.deter)
    check_state(recording, (states, prior), expected, "imagine")
    decoded = world.decode(states)
    compared = [key for key in expected if key in decoded]
    assert compared or not world.image_keys
    for key in compared:
        scale = 255 if key in world.dec.unscaled else 1
        check(scale * decoded[key], expected[key], f"imagine/{key}")


def test_greedy_actions_of_the_policy(recording):
    """The policy step by step gives the recorded actions; its latents are sampled."""
    agent = recording.agent
    agent.rng["eval"] = Modes()
    batch, carry = recording.batch, agent.initial(len(recording.batch["is_first"]))
    recorded = recording.inputs["action"]
    for t in range(recorded.shape[1]):
        obs = {k: batch[k][:, t].numpy() for k in agent.obs_space}
        obs["is_first"] = batch["is_first"][:, t].numpy().astype(bool)
        previous = torch.tensor(recorded[:, t])
        carry = carry._replace(prevact={"action": previous})
        carry, action, _ = agent.policy(carry, obs, "eval")
        expected = recording.data["actor/mode"][:, t]
        if recording.is_discrete:
            np.testing.assert_array_equal(action["action"], expected.argmax(-1))
        else:
            check(action["action"], expected, "policy")


@pytest.mark.parametrize("name", NAMES)
def test_the_computed_recordings_follow_the_original(name):
    """The computation from the specification gives what the original recorded."""
    recording = open_recording(FOLDER, name)
    state = read_weights(FOLDER / f"{name}_latest.pt")
    shapes = {k: x.shape for k, x in recording.obs_space.items() if x.shape}
    networks = Networks(state, recording.options, shapes)
    actions = recording.data["imagine/action"]
    found = record(networks, recording.inputs, actions)
    assert {*found, "imagine/action"} >= {k for k in recording.data if k[:3] != "in/"}
    for key in found.keys() & recording.data.keys():
        check(found[key], recording.data[key], key)


@pytest.mark.parametrize("name", RECORDINGS)
def test_inferred_settings_are_those_of_the_config(computed, name):
    options = open_recording(computed, name).options
    weights = read_weights(computed / f"{name}_latest.pt")
    sizes = {"stoch": options["dyn_stoch"], "classes": options["dyn_discrete"]}
    inferred = infer_settings(weights, **sizes)
    converted = convert_options(options).settings
    assert len(inferred.keys() & converted.keys()) > 20
    for key in inferred.keys() & converted.keys():
        as_list = list if key.endswith("mults") else lambda x: x
        assert as_list(inferred[key]) == as_list(converted[key]), key
