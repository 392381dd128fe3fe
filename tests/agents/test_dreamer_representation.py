"""Dreamer without a decoder, and with a detached one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dreamer_helpers import TINY, RandomFeed, changed, flatten, make

from reverie.agents.dreamer.config import REPRESENTATION_LOSSES
from reverie.api import UserError
from reverie.run.used_settings import resolve_for_command
from reverie.worlds import prototypes


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
