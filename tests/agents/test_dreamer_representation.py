"""Dreamer without a decoder, and with a detached one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from dreamer_helpers import ACT, OBS, TINY, RandomFeed, changed, flatten, make

from reverie.agents.dreamer.config import REPRESENTATION_LOSSES, LossScales
from reverie.agents.dreamer.loss_scales import check_names
from reverie.api import UserError, WorldLoss
from reverie.nets.rng import Rng
from reverie.run.used_settings import resolve_for_command
from reverie.spaces import agent_obs_space
from reverie.worlds import prototypes
from reverie.worlds.rssm.config import RSSMConfig
from reverie.worlds.rssm.world import RSSM


@pytest.mark.parametrize("name", ["barlow", "infonce", "prototypes"])
def test_training_without_a_decoder(name):
    agent = make(replace(TINY, representation=name, priosignal="model"))
    feed = RandomFeed(agent)
    before = flatten(agent.state_dict())
    metrics = agent.train(feed)
    assert "dec" not in agent.components()
    updated = changed(before, flatten(agent.state_dict()))
    assert {"enc", "dyn", "representation", "pol"} <= updated
    for loss in REPRESENTATION_LOSSES[name]:
        assert torch.isfinite(metrics[f"loss/{loss}"])
    assert "loss/image" not in metrics
    assert feed.priorities[0][1].shape == (3, 6)
    assert not any(key.startswith("openloop") for key in agent.report(feed))
    assert agent.world_model_env().predicted_keys == []
    assert "decode" not in agent.world_steps()
    assert agent.sections(feed).keys() >= {"representation", "scan"}


@pytest.mark.parametrize("optimizers", ["joint", "separate"])
def test_a_detached_decoder_trains_no_other_network(optimizers):
    config = replace(
        TINY, representation="barlow", optimizers=optimizers, priosignal="model"
    )
    # so small that the norm of all gradients of an optimizer changes every update
    clipped = replace(config.world_opt, clip=1e-3)
    config = replace(config, world_opt=clipped)
    plain, detached = make(config), make(replace(config, draw=True))
    for name, module in plain.components().items():
        detached.components()[name].load_state_dict(module.state_dict())
    feed = RandomFeed(detached)
    detached.train(feed)
    output = plain._update(feed.batches[0])
    for name, module in plain.components().items():
        other = detached.components()[name].state_dict()
        for key, value in module.state_dict().items():
            assert torch.equal(value, other[key]), (name, key)
    assert torch.equal(output.priority, feed.priorities[0][1])
    fresh = make(replace(config, draw=True)).world.dec.state_dict()
    assert changed(flatten(fresh), flatten(dict(detached.world.dec.state_dict())))
    assert "openloop/image" in detached.report(feed)


@pytest.mark.parametrize("name", ["barlow", "prototypes"])
def test_training_is_the_same_with_and_without_a_detached_decoder(name):
    config = replace(TINY, representation=name)
    agents = [make(replace(config, draw=draw), seed=3) for draw in (False, True)]
    feeds = [RandomFeed(agent) for agent in agents]
    for _ in range(2):
        plain, detached = (
            {"train": agent.train(feed), "report": agent.report(feed)}
            for agent, feed in zip(agents, feeds, strict=True)
        )
        for part, metrics in plain.items():
            for key, value in metrics.items():
                if not key.startswith("opt/"):  # includes the decoder
                    assert torch.equal(value, detached[part][key]), (part, key)
    plain, detached = (agent.components() for agent in agents)
    assert [*detached] == ["enc", "dyn", "dec", *[*plain][2:]]
    for key, module in plain.items():
        other = detached[key].state_dict()
        torch.testing.assert_close(module.state_dict(), other, rtol=0, atol=0)
    seeds = [make(agents[1].config, seed=seed).world.dec for seed in (3, 3, 4)]
    weights = [decoder.imgout.weight for decoder in seeds]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def padded_batch(lengths, rows):
    """Return episodes of these lengths; padding repeats the last row."""
    rng, episodes = np.random.default_rng(0), []
    for length in lengths:
        spaces = {**OBS, **ACT}.items()
        episode = {k: torch.tensor(s.sample(rng, length)) for k, s in spaces}
        for key in ("is_first", "is_last", "is_terminal"):
            episode[key] = torch.zeros(length, dtype=torch.bool)
        episode["is_first"][0] = True
        index = torch.arange(rows).clamp(max=length - 1)
        episodes.append({k: x[index] for k, x in episode.items()})
        episodes[-1]["mask"] = torch.arange(rows) < length
        episodes[-1]["is_first"] = torch.arange(rows) == 0
    return {k: torch.stack([e[k] for e in episodes]) for k in episodes[0]}


@pytest.mark.parametrize("name", ["decoder", "barlow", "infonce", "prototypes"])
def test_held_out_losses_do_not_depend_on_padding(name):
    agent = make(replace(TINY, representation=name), random_heads=True)
    short, long = (agent.episode_losses(padded_batch((4, 6), rows)) for rows in (6, 20))
    assert short[0].keys() >= {*REPRESENTATION_LOSSES.get(name, ("image",))}
    for key, loss in short[0].items():
        torch.testing.assert_close(loss[short[1]], long[0][key][long[1]])
    if name == "prototypes":
        assert (long[0]["proto_norm"][:, 0] == 0).all()


@pytest.mark.parametrize("name", ["barlow", "infonce", "prototypes"])
def test_an_episode_of_one_row_has_finite_losses(name):
    agent = make(replace(TINY, representation=name))
    losses, mask = agent.episode_losses(padded_batch((1,), 3))
    assert all(x[mask].isfinite().all() for x in losses.values())


def test_the_best_checkpoint_is_selected_without_the_detached_decoder():
    scales = LossScales(rec=3.0, infonce=0.5, rep=0.25)
    config = replace(TINY, loss_scales=scales)
    agent = make(replace(config, representation="infonce", draw=True))
    names = ("image", "vector", "infonce", "rep", "dyn")
    found = [agent.episode_loss_scale(name) for name in names]
    assert found == [0, 0, 0.5, 0.25, 1]
    decoder = make(config)
    assert [decoder.episode_loss_scale(x) for x in ("image", "rep")] == [3, 0.25]


class IncompleteWorld(RSSM):
    """Does not pass the embedding to the losses of the representation."""

    Config = RSSMConfig

    def loss(self, state, batch, rng):
        states, _ = self._observe(state, batch, rng)
        return WorldLoss(self.prediction_losses(states, batch), states, {})


class WorldWithoutViews(IncompleteWorld):
    """Computes the losses of prototypes without augmented views."""

    def loss(self, state, batch, rng):
        embed = self.enc(batch, self.dtype)
        states, _ = self._infer(state, embed, batch, rng)
        return WorldLoss(self.prediction_losses(states, batch, embed), states, {})


@pytest.mark.parametrize(
    ("world", "name", "message"),
    [
        (IncompleteWorld, "barlow", "IncompleteWorld .* without the embedding"),
        (WorldWithoutViews, "prototypes", "without the two views"),
    ],
)
def test_incomplete_losses_of_a_plugin_world_are_an_error(world, name, message):
    networks = make(replace(TINY, representation=name)).world.networks
    own = world(OBS, ACT, TINY.rssm, networks)
    batch = padded_batch((4, 4), 4)
    batch["prevact"] = {"action": batch["action"]}
    rng = Rng(0, "test", torch.device("cpu"))
    with pytest.raises(UserError, match=rf"{message}(.|\n)*Fix: call super\(\)\.loss"):
        own.loss(own.initial(2), batch, rng)


@pytest.mark.parametrize(
    ("config", "signal"),
    [
        (replace(TINY, world="vta"), "boundary_rate"),
        (replace(TINY, dec=replace(TINY.dec, cnn_keys="none")), "image"),
    ],
)
def test_a_priority_of_a_loss_that_is_not_computed_is_an_error(config, signal):
    with pytest.raises(UserError, match="not a loss of each step") as error:
        check_names(agent_obs_space(OBS), replace(config, priosignal=signal))
    assert signal not in str(error.value).partition("Fix:")[2]
    vta = replace(config.vta, boundary_rate=0.2)
    computed = replace(config, vta=vta, dec=TINY.dec, priosignal=signal)
    check_names(agent_obs_space(OBS), computed)


def test_prototypes_are_frozen_at_first_and_the_encoder_has_a_slow_copy(monkeypatch):
    monkeypatch.setattr(prototypes, "FROZEN_UPDATES", 1)
    agent = make(replace(TINY, representation="prototypes"))
    feed, representation = RandomFeed(agent), agent.world.representation
    slow, fast = representation.slow_encoder, agent.world.enc
    before = fast.cnn0.weight.clone()
    vectors = representation.prototypes.weight.clone()
    assert torch.equal(slow.cnn0.weight, before)
    agent.train(feed)
    torch.testing.assert_close(
        slow.cnn0.weight, 0.05 * fast.cnn0.weight + 0.95 * before
    )
    assert torch.equal(representation.prototypes.weight, vectors)
    assert feed.written[0][1]["dyn/deter"].shape[:2] == (3, 6)  # of one view
    agent.train(feed)
    assert not torch.equal(representation.prototypes.weight, vectors)
    feed.change["vector"] = lambda x: x * torch.nan
    saved = slow.cnn0.weight.clone()
    agent.train(feed)  # is skipped
    assert torch.equal(slow.cnn0.weight, saved)
    assert representation.updates == 2


def test_the_loss_does_not_change_the_count_of_updates():
    # on a GPU, `update_slow` changes it while buffers of the loss are restored
    agent = make(replace(TINY, representation="prototypes"))
    updates = agent.world.representation.updates
    assert all(x is not updates for x in agent.state_changed_by_loss()[0])
    assert not updates.requires_grad
    assert "updates" in agent.state_dict()["representation"]


def test_weights_of_losses_are_not_sent_to_copies_of_the_policy():
    config = replace(TINY, representation="prototypes", harmony=True)
    agent, copy = make(config), make(config)
    agent.train(RandomFeed(agent))
    weights = agent.policy_weights()
    assert weights.keys() == {"enc", "dyn", "pol"}
    copy.load_policy_weights(weights)
    assert_close = torch.testing.assert_close
    assert_close(copy.world.enc.state_dict(), agent.world.enc.state_dict())


def test_harmony_scales_the_loss_of_the_representation():
    agent = make(replace(TINY, representation="infonce", draw=True, harmony=True))
    assert agent.harmony.group["infonce"] == "observation"
    assert "image" not in agent.harmony.group


def test_worlds_without_an_embedding_refuse_other_representations():
    config = replace(TINY, world="vta", representation="barlow")
    with pytest.raises(UserError, match="representation decoder"):
        make(config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"dreamer.draw": True}, "remove --dreamer.draw"),
        ({"dreamer.loss_scales.barlow": 1.0}, "--dreamer.representation barlow"),
        (
            {"dreamer.representation": "infonce", "dreamer.dec.depth": 8},
            "--dreamer.draw True",
        ),
        (
            {
                "dreamer.world": "dreamerv3_torch",
                "dreamer.representation": "barlow",
                "dreamer.dreamerv3_torch.image_dist": "normal",
            },
            "--dreamer.draw True",
        ),
    ],
)
def test_settings_without_effect_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        resolve_for_command("train", flags=flags)


@pytest.mark.parametrize("name", ["barlow", "infonce"])
def test_losses_that_compare_steps_need_two(name):
    sizes = {"batch_size": 1, "repval_loss": False}
    with pytest.raises(UserError, match=f"{name} needs at least two steps"):
        replace(TINY, representation=name, batch_length=1, **sizes)
    replace(TINY, representation=name, batch_length=2, **sizes)


@pytest.mark.parametrize(("size", "length"), [(1, 2), (4, 1)])
def test_prototypes_need_two_steps_after_the_first(size, length):
    sizes = {"batch_size": size, "batch_length": length, "repval_loss": False}
    with pytest.raises(UserError, match="prototypes needs at least two steps"):
        replace(TINY, representation="prototypes", **sizes)
    replace(TINY, representation="prototypes", **{**sizes, "batch_length": 3})
