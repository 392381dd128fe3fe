"""Δ-IRIS: updates of each component, batches and the time convention."""

from __future__ import annotations

import pytest
import torch
from iris_helpers import (
    changed,
    collected_feed,
    make_agent,
    make_env,
    settings,
    weights,
    with_burn_in,
)

from reverie.agents.iris.agent import Iris
from reverie.agents.iris.batches import to_segment
from reverie.agents.iris.config import COMPONENTS
from reverie.agents.options import BuildOptions
from reverie.capabilities import Profilable
from reverie.nets.rng import Rng
from reverie.rows import Window


@pytest.mark.parametrize("name", COMPONENTS)
def test_an_update_changes_one_component(name):
    agent = make_agent()
    feed = collected_feed(agent)
    before = {key: weights(agent, key) for key in COMPONENTS}
    metrics = agent.update(name, [feed(name)])
    assert all(torch.isfinite(torch.as_tensor(x)).all() for x in metrics.values())
    assert metrics["opt/consecutive_skips"] == 0
    assert not any(getattr(x, "requires_grad", False) for x in metrics.values())
    for key in COMPONENTS:
        assert changed(before[key], weights(agent, key)) == (key == name)


def test_components_are_trained_one_after_another():
    flags = {f"iris.training.{name}.first_steps": 2 for name in COMPONENTS}
    flags["iris.schedule.first_steps"] = 30
    agent = make_agent(settings(**flags))
    feed = collected_feed(agent, steps=16)
    trained = []
    while not agent.schedule.should_collect:
        metrics = agent.train(feed)
        agent.schedule.add_update()
        trained += {key.split("/")[1] for key in metrics if key.startswith("loss/")}
    assert trained == [name for name in COMPONENTS for _ in range(2)]
    assert agent.schedule.epoch == 2


def test_without_behaviour_only_the_world_is_trained():
    agent = make_agent(settings(**{"iris.behaviour": False}))
    agent.schedule.add_env_steps(10_000)
    for _ in range(600):
        assert agent.schedule.component in ("tokenizer", "world_model", None)
        agent.schedule.add_update()
        agent.schedule.add_env_steps(10_000)


def test_sections_are_updates_of_each_component():
    agent = make_agent()
    feed = collected_feed(agent)
    sections = agent.sections(feed)
    assert isinstance(agent, Profilable)
    assert list(sections) == list(COMPONENTS)
    before = weights(agent, "world_model")
    sections["world_model"]()
    assert changed(before, weights(agent, "world_model"))
    # `train` updates all components while none is due
    assert agent.schedule.should_collect
    losses = {key.split("/")[1] for key in agent.train(feed) if key[:5] == "loss/"}
    assert losses == set(COMPONENTS)
    assert agent.schedule.updates == 0


def test_episode_uses_are_counted_from_the_second_epoch():
    agent = make_agent()
    feed = collected_feed(agent)
    sampler = feed.replay._samplers["tokenizer"].episode_sampler
    agent.schedule.env_steps = 10**6
    agent.train(feed)
    assert not sampler.counts.any()
    agent.schedule.epoch = 2
    agent.train(feed)
    assert sampler.counts.sum() == agent.config.training.tokenizer.batch


def test_accumulated_batches_equal_one_larger_batch():
    config = settings(**{"iris.training.world_model.batch": 4})
    single, accumulated = make_agent(config), make_agent(config)
    feed = collected_feed(single)
    batch = feed("world_model")
    batch["mask"][:] = True  # so that all batches have the same weight
    halves = [
        {k: v[:2] for k, v in batch.items()},
        {k: v[2:] for k, v in batch.items()},
    ]
    single.update("world_model", [batch])
    accumulated.update("world_model", halves)
    for key, value in weights(single, "world_model").items():
        torch.testing.assert_close(
            value, weights(accumulated, "world_model")[key], atol=2e-4, rtol=0
        )


def test_metrics_of_accumulated_batches_are_means():
    agent = make_agent(settings(**{"iris.training.world_model.batch": 4}))
    feed = collected_feed(agent)
    one, other = feed("world_model"), feed("world_model")
    before = agent.state_dict()["world_model"]
    before = {k: v.clone() for k, v in before.items()}
    results = []
    for batches in ([one], [other], [one, other]):
        agent.world.dynamics.load_state_dict(before)
        results.append(agent.update("world_model", batches))
    key = "loss/world_model/latents"
    first, second, both = (float(metrics[key]) for metrics in results)
    assert first != second
    assert both == pytest.approx((first + second) / 2)
    one["reward"][:] = float("nan")
    agent.update("world_model", [one, other])
    assert agent.nonfinite()[0] == "loss/world_model/rewards"


def test_nonfinite_losses_of_any_component_are_reported():
    agent = make_agent(settings(**{"iris.behaviour": False}))
    feed = collected_feed(agent)
    agent.schedule.epoch = agent.config.schedule.epochs + 1  # nothing is due
    next(agent.world.tokenizer.decoder.parameters()).data.fill_(float("nan"))
    for count in (1, 2, 3):
        metrics = agent.train(feed)
        assert metrics["opt/consecutive_skips"] == count
    assert any(name.startswith("loss/tokenizer/") for name in agent.nonfinite())
    assert metrics["world_model/opt/loss"].isfinite()


def test_rollouts_longer_than_trained_sequences_give_a_warning():
    with pytest.warns(
        UserWarning, match=r"4 frames, but imagined rollouts have 5(.|\n)*length 5"
    ):
        make_agent(settings(**{"iris.training.world_model.length": 4}))


def test_the_target_network_is_a_moving_average():
    agent = make_agent(settings(**{"iris.actor_critic.target_rate": 0.005}))
    feed = collected_feed(agent)
    agent.actor_critic.online.actor.bias.data += 1
    before = agent.actor_critic.target.actor.bias.clone()
    agent.update("actor_critic", [feed("actor_critic")])
    change = agent.actor_critic.target.actor.bias - before
    torch.testing.assert_close(change, torch.full((3,), 0.005), atol=1e-6, rtol=0)


def test_a_nonfinite_batch_changes_no_weights():
    agent = make_agent()
    feed = collected_feed(agent)
    batch = feed("world_model")
    batch["reward"][:] = float("nan")
    before = weights(agent, "world_model")
    metrics = agent.update("world_model", [batch])
    assert metrics["opt/consecutive_skips"] == 1
    assert not changed(before, weights(agent, "world_model"))
    assert agent.nonfinite()[0] == "loss/world_model/rewards"


@pytest.mark.usefixtures("_without_onednn")
def test_the_low_precision_world_is_refreshed():
    env = make_env()
    agent = Iris(
        env.obs_space,
        env.act_space,
        settings(),
        BuildOptions(torch.device("cpu"), precision="bfloat16"),
    )
    feed = collected_feed(agent)
    agent.update("tokenizer", [feed("tokenizer")])
    agent.update("actor_critic", [feed("actor_critic")])
    assert agent.imagination_world is not agent.world
    assert next(agent.imagination_world.parameters()).dtype == torch.bfloat16
    codebook = agent.world.tokenizer.quantizer.codebook
    torch.testing.assert_close(
        agent.imagination_world.tokenizer.quantizer.codebook, codebook
    )


@pytest.mark.parametrize("burn_in", [0, 3])
def test_burn_in_on_real_frames_before_imagination(burn_in, monkeypatch):
    agent = make_agent(with_burn_in(burn_in))
    segment = agent._to_segment(collected_feed(agent)("actor_critic"))
    nets, contexts = agent.actor_critic, []
    burn_in_ = nets.burn_in
    monkeypatch.setattr(
        nets, "burn_in", lambda *x: contexts.append(x[0]) or burn_in_(*x)
    )
    losses, _ = agent.losses("actor_critic", segment)["actor_critic"]
    assert segment.image.shape[1] == burn_in + 1
    assert len(contexts) == 2  # of the network and the target network
    assert all(torch.equal(x, segment.image[:, :burn_in]) for x in contexts)
    assert all(loss.isfinite().all() for loss in losses.values())


def test_the_loss_uses_the_whole_rollout(monkeypatch):
    agent = make_agent()
    nets, rollouts, loss_args = agent.actor_critic, [], []
    imagine, loss = nets.imagine, nets.loss

    def record_rollout(*args, **kwargs):
        rollouts.append(imagine(*args, **kwargs))
        return rollouts[-1]

    monkeypatch.setattr(nets, "imagine", record_rollout)
    monkeypatch.setattr(nets, "loss", lambda *x: loss_args.extend(x) or loss(*x))
    agent.losses(
        "actor_critic", agent._to_segment(collected_feed(agent)("actor_critic"))
    )
    (rollout,), (_, frames, action, _) = rollouts, loss_args
    assert action.shape[1] == agent.config.actor_critic.horizon > 1
    assert torch.equal(action, rollout.actions["action"][:, :-1])
    for used, imagined in zip(frames, rollout.states, strict=True):
        assert torch.equal(used, imagined)


def test_imagination_without_the_last_action():
    agent = make_agent()
    segment = agent._to_segment(collected_feed(agent)("actor_critic"))
    rollouts = [
        agent.actor_critic.imagine(
            *(agent.world, segment.image, segment.action),
            Rng(0, "test", torch.device("cpu")),
            act_in_last_frame=acts,
        )
        for acts in (True, False)
    ]
    full, without_last = (rollout.actions["action"] for rollout in rollouts)
    assert full.any()
    assert torch.equal(without_last[:, :-1], full[:, :-1])
    assert not without_last[:, -1].any()
    assert torch.equal(rollouts[1].states.image, rollouts[0].states.image)


# Batches and time convention


def test_rewards_and_ends_belong_to_the_action_that_caused_them():
    """The conversion loses only the last observation."""
    length = 5
    image = torch.arange(1, length + 1, dtype=torch.uint8)
    image = image[:, None, None, None].expand(length, 4, 4, 3)[None]
    batch = {
        "image": image,
        "action": torch.tensor([[3, 1, 2, 4, 0]]),
        "reward": torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]]),
        "is_last": torch.tensor([[False] * 4 + [True]]),
        "is_terminal": torch.tensor([[False] * 5]),
        "mask": torch.ones(1, length, dtype=torch.bool),
    }
    segment = to_segment(batch, "image", "action", 0)
    assert segment.image[0, :, 0, 0, 0].tolist() == [1, 2, 3, 4]
    assert segment.action.tolist() == [[3, 1, 2, 4]]
    assert segment.reward.tolist() == [[1, 2, 3, 4]]
    assert segment.end.tolist() == [[False, False, False, True]]
    assert segment.real.all()
    back = torch.cat([torch.zeros(1, 1), segment.reward], 1)
    assert torch.equal(back, batch["reward"])
    # a time limit is an end, unless only terminal rows are
    assert not to_segment(batch, "image", "action", 0, "is_terminal").end.any()
    # actions may start from another number
    assert to_segment(batch, "image", "action", 1).action.tolist() == [[2, 0, 1, 3]]


def test_episodes_shorter_than_a_sequence_are_padded():
    """Episodes of catch have three steps; sequences have nine frames."""
    flags = {f"iris.training.{name}.length": 9 for name in ("tokenizer", "world_model")}
    flags["iris.world_model.transformer.blocks"] = 9
    agent = make_agent(settings(**flags))
    feed = collected_feed(agent)
    segment = agent._to_segment(feed("world_model"))
    assert segment.image.shape[1] == 9
    assert segment.real.sum(1).max() == 3
    assert not segment.image[~segment.real].any()
    for name in COMPONENTS:
        metrics = agent.update(name, [feed(name)])
        assert torch.isfinite(metrics[f"{name}/opt/loss"])


def test_the_window_of_the_actor_critic_ends_with_a_real_frame():
    agent = make_agent()
    feed = collected_feed(agent)
    assert isinstance(agent.windows["actor_critic"], Window)
    segment = agent._to_segment(feed("actor_critic"))
    assert segment.real[:, -1].all()
