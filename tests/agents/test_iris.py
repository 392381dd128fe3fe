"""Δ-IRIS as an agent: acting, learning part by part, keeping, and what it refuses."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import yaml

from reverie.agents.iris.agent import Iris, to_segment
from reverie.agents.iris.config import PARTS, IrisConfig
from reverie.agents.iris.report import from_first_frames
from reverie.api import Agent, UserError
from reverie.capabilities import HasEpisodeLosses, Profilable
from reverie.envs.suites.catch import Catch, CatchConfig
from reverie.envs.vector.vec_env import SyncVecEnv, VecEnvConfig
from reverie.nets.rng import Rng
from reverie.replay.buffer import Replay
from reverie.replay.config import ReplayConfig
from reverie.replay.feed import ReplayFeed
from reverie.rows import Rows, Window
from reverie.run.collectors import zero_last_actions
from reverie.run.config import resolve
from reverie.spaces import Space
from reverie.worlds.iris.world import IrisWorld

FLAG = Space(np.dtype(bool))
FLAGS = {
    "reward": Space(np.dtype(np.float32)),
    "is_first": FLAG,
    "is_last": FLAG,
    "is_terminal": FLAG,
}


UNNAMED = {
    "learn.tokenizer.opt.lr",
    "learn.tokenizer.opt.eps",
    "tokenizer.action_planes",
}
"""Settings of parts that do not know what they are called here."""


def watching(burn_in: int) -> IrisConfig:
    """Settings with so many frames before each dream."""
    names = ("learn.world_model.length", "world_model.transformer.blocks")
    longer = {f"iris.{name}": burn_in + 4 for name in names}
    return settings(**longer, **{"iris.actor_critic.burn_in": burn_in})


def settings(**flags) -> IrisConfig:
    return resolve(["iris_tiny"], flags={"task": "catch", **flags}).iris


def make_env(index=0):
    return Catch(CatchConfig(4, 4, (4, 4)), index)


def make_agent(config=None, seed=0, env=None, **spaces) -> Iris:
    env = env or make_env()
    return Iris(
        spaces.get("obs_space", env.obs_space),
        spaces.get("act_space", env.act_space),
        config or settings(),
        device=torch.device("cpu"),
        seed=seed,
    )


def lived(agent, steps=60, envs=3, seed=0):
    """A feed from a replay in which the agent has lived for a while."""
    pool = SyncVecEnv(make_env, envs, VecEnvConfig())
    replay = Replay(
        {**pool.obs_space, **pool.act_space},
        {},
        ReplayConfig(storage="ram"),
        capacity=1000,
        num_envs=envs,
        windows=agent.windows,
        directory=None,
        seed=seed,
    )
    obs, carry = pool.reset(), agent.initial(envs)
    for _ in range(steps):
        carry, action, _ = agent.policy(carry, obs)
        action = zero_last_actions(action, obs)
        rows_ = Rows({**obs, **action})
        replay.add(rows_.values)
        agent.schedule.add_env_steps(rows_.env_steps)
        obs = pool.step(action)
    return ReplayFeed(replay, agent.windows)


def weights(agent, name):
    return {k: v.clone() for k, v in agent.components()[name].state_dict().items()}


def changed(before, after):
    return any(not torch.equal(before[key], after[key]) for key in before)


def rows(images, first=False, last=False):
    count = len(images)
    return {
        "image": images,
        "reward": np.zeros(count, np.float32),
        "is_first": np.full(count, first),
        "is_last": np.full(count, last),
        "is_terminal": np.full(count, False),
    }


def frames(seed, count=2):
    return np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 3), np.uint8)


# The contract


def test_it_is_an_agent_with_a_diet_for_each_part():
    agent = make_agent()
    assert isinstance(agent, Agent)
    assert set(agent.windows) == {*PARTS, "report"}
    learn = agent.config.learn
    tokenizer, actor = agent.windows["tokenizer"], agent.windows["actor_critic"]
    # one row more than frames: the last one tells what became of the action before it
    assert tokenizer.length == learn.tokenizer.length + 1
    assert actor.length == agent.config.actor_critic.burn_in + 2
    assert (tokenizer.pad, actor.pad) == ("both", "left")
    assert (tokenizer.batch, actor.batch) == (
        learn.tokenizer.batch,
        learn.actor_critic.batch,
    )


def test_seeds_decide_weights():
    a, b, c = make_agent(), make_agent(), make_agent(seed=1)
    for name in PARTS:
        assert not changed(weights(a, name), weights(b, name))
        assert changed(weights(a, name), weights(c, name))
    critic = a.actor_critic.online.critic
    assert not critic.weight.any()
    assert not critic.bias.any()
    assert not changed(
        a.actor_critic.online.state_dict(), a.actor_critic.target.state_dict()
    )


def test_the_actor_critic_starts_small_and_expects_nothing():
    nets = make_agent().actor_critic
    bound = nets.config.width**-0.5
    for part in (nets.online.lstm, nets.online.actor):
        for name, values in part.named_parameters():
            largest = float(values.detach().abs().max())
            assert 0.3 * bound < largest <= bound, name
    assert not any(x.any() for x in nets.online.critic.parameters())
    assert not changed(nets.online.state_dict(), nets.target.state_dict())


def test_only_dense_weights_of_tokenizer_and_world_model_decay():
    agent = make_agent()
    for name in PARTS:
        found = agent.opts[name].decayed
        assert all(n.endswith(".weight") for n in found)
        assert not [n for n in found if ".layers." in n and "frame" in n]
    assert agent.opts["actor_critic"].config.wd == 0
    assert agent.opts["tokenizer"].decayed


# Acting


def test_the_first_epoch_acts_at_random_and_counts_its_actions():
    agent = make_agent(settings(**{"iris.schedule.first_steps": 40}))
    agent.actor_critic.online.actor.bias.data[:] = torch.tensor([99.0, 0.0, 0.0])
    obs, carry = rows(frames(0, 10)), agent.initial(10)
    chosen = []
    while agent.schedule.epoch == 1 and agent.schedule.should_collect:
        carry, action, _ = agent.policy(carry, obs)
        chosen += action["action"].tolist()
        agent.schedule.add_env_steps(10)
    assert len(chosen) == 40
    assert len(set(chosen)) == 3
    assert not agent.schedule.should_collect


def test_policy_and_train_do_not_advance_the_schedule():
    agent = make_agent(settings(**{"iris.schedule.first_steps": 30}))
    feed = lived(agent, steps=16)
    before = agent.schedule.state_dict()
    agent.policy(agent.initial(10), rows(frames(0, 10)))
    agent.train(feed)
    assert agent.schedule.state_dict() == before


def test_the_last_row_of_an_episode_is_not_an_environment_step():
    obs = rows(frames(0, 10), last=True)
    assert Rows(obs).env_steps == 0
    assert Rows(rows(frames(0, 10))).env_steps == 10


STILL = {"iris.acting.epsilon": 0.0, "iris.acting.eval_epsilon": 0.0}


def past_the_first(agent):
    agent.schedule.load_state_dict({**agent.schedule.state_dict(), "epoch": 2})
    return agent


@pytest.mark.parametrize("coin", ["vector", "each"])
def test_one_coin_for_all_or_one_for_each(coin):
    flags = {"iris.acting.epsilon": 0.5, "iris.acting.coin": coin}
    agent = past_the_first(make_agent(settings(**flags)))
    agent.actor_critic.online.actor.bias.data[:] = torch.tensor([99.0, 0.0, 0.0])
    obs, carry = rows(frames(0, 16)), agent.initial(16)
    mixed = 0
    for _ in range(40):
        carry, action, _ = agent.policy(carry, obs)
        explored = (action["action"] != 0).sum()
        mixed += 0 < explored < 5  # of 16, about 11 are not 0 when all explore
    assert (mixed > 5) == (coin == "each")


def test_the_likeliest_action_on_request():
    agent = make_agent(settings(**{"iris.acting.eval_sample": False}))
    obs, carry = rows(frames(3, 5)), agent.initial(5)
    first = agent.policy(carry, obs, mode="eval")[1]["action"]
    for _ in range(5):
        again = agent.policy(carry, obs, mode="eval")[1]["action"]
        np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize(
    ("name", "tame", "wild"), [("epsilon", 0.0, 1.0), ("temperature", 1e-3, 1e3)]
)
def test_collecting_and_evaluation_explore_each_in_their_own_way(name, tame, wild):
    obs = rows(frames(0, 64))
    for should_collect in (True, False):
        ways = (wild, tame) if should_collect else (tame, wild)
        flags = {f"iris.acting.{name}": ways[0], f"iris.acting.eval_{name}": ways[1]}
        agent = past_the_first(make_agent(settings(**{**STILL, **flags})))
        agent.actor_critic.online.actor.bias.data[:] = torch.tensor([20.0, 0.0, 0.0])
        for mode in ("train", "eval"):
            action = agent.policy(agent.initial(64), obs, mode)[1]["action"]
            assert action.any() == ((mode == "train") == should_collect)


def test_a_stretch_of_acting_begins_with_a_look_back():
    agent = past_the_first(make_agent())
    net, burn_in = agent.actor_critic, agent.config.actor_critic.burn_in
    a, b, c = frames(0), frames(1), frames(2)
    carry, *_ = agent.policy(agent.initial(2), rows(a, first=True))
    with torch.no_grad():
        black = net.burn_in(torch.zeros(2, burn_in, 4, 4, 3, dtype=torch.uint8))
        wanted, _ = net.online(black, torch.tensor(a)[:, None])
    torch.testing.assert_close(carry.recall.hidden, wanted.hidden)
    carry, *_ = agent.policy(carry, rows(b))
    with torch.no_grad():
        wanted, _ = net.online(wanted, torch.tensor(b)[:, None])
    torch.testing.assert_close(carry.recall.hidden, wanted.hidden)
    # the next epoch: forget, and watch the newest frames again
    agent.schedule.epoch += 1
    carry, *_ = agent.policy(carry, rows(c))
    newest = torch.stack([torch.tensor(x) for x in (a, b)], 1)[:, -burn_in:]
    with torch.no_grad():
        wanted, _ = net.online(net.burn_in(newest), torch.tensor(c)[:, None])
    torch.testing.assert_close(carry.recall.hidden, wanted.hidden)


def test_what_was_seen_at_random_is_looked_back_at():
    agent = make_agent(watching(3))
    a, b, c = frames(0), frames(1), frames(2)
    carry, *_ = agent.policy(agent.initial(2), rows(a, first=True))
    carry, *_ = agent.policy(carry, rows(b))
    carry, *_ = past_the_first(agent).policy(carry, rows(c))
    seen = torch.stack([torch.tensor(x) for x in (np.zeros_like(a), a, b)], 1)
    net = agent.actor_critic
    with torch.no_grad():
        wanted, _ = net.online(net.burn_in(seen), torch.tensor(c)[:, None])
    torch.testing.assert_close(carry.recall.hidden, wanted.hidden)


def test_an_episode_that_begins_on_the_way_begins_empty():
    agent = past_the_first(make_agent())
    carry, *_ = agent.policy(agent.initial(2), rows(frames(0), first=True))
    carry, *_ = agent.policy(carry, rows(frames(1), last=True))
    carry, *_ = agent.policy(carry, rows(frames(2), first=True))
    with torch.no_grad():
        net = agent.actor_critic.online
        wanted, _ = net(net.initial(2), torch.tensor(frames(2))[:, None])
    torch.testing.assert_close(carry.recall.hidden, wanted.hidden)
    assert torch.equal(carry.frames[:, -1], torch.tensor(frames(2)))
    assert not carry.frames[:, :-1].any()


def test_environments_do_not_see_each_other():
    agent = past_the_first(make_agent())
    both, _, _ = agent.policy(agent.initial(2), rows(frames(0), first=True))
    alone, _, _ = agent.policy(agent.initial(1), rows(frames(0)[1:], first=True))
    torch.testing.assert_close(both.recall.hidden[1:], alone.recall.hidden)


# Learning


@pytest.mark.parametrize("name", PARTS)
def test_an_update_changes_its_part_and_no_other(name):
    agent = make_agent()
    feed = lived(agent)
    before = {part: weights(agent, part) for part in PARTS}
    metrics = agent.update(name, [feed(name)])
    assert all(torch.isfinite(torch.as_tensor(x)).all() for x in metrics.values())
    assert metrics["opt/nonfinite_in_row"] == 0
    assert not any(getattr(x, "requires_grad", False) for x in metrics.values())
    for part in PARTS:
        assert changed(before[part], weights(agent, part)) == (part == name)


def test_the_parts_are_trained_in_turn():
    flags = {f"iris.learn.{name}.first_steps": 2 for name in PARTS}
    flags["iris.schedule.first_steps"] = 30
    agent = make_agent(settings(**flags))
    feed = lived(agent, steps=16)
    seen = []
    while not agent.schedule.should_collect:
        metrics = agent.train(feed)
        agent.schedule.add_update()
        seen += {key.split("/")[1] for key in metrics if key.startswith("loss/")}
    assert seen == [name for name in PARTS for _ in range(2)]
    assert agent.schedule.epoch == 2


def test_without_behaviour_only_the_world_is_learnt():
    agent = make_agent(settings(**{"iris.behaviour": False}))
    agent.schedule.add_env_steps(10_000)
    for _ in range(600):
        assert agent.schedule.part in ("tokenizer", "world_model", None)
        agent.schedule.add_update()
        agent.schedule.add_env_steps(10_000)


def test_each_part_can_be_timed_alone():
    agent = make_agent()
    feed = lived(agent)
    pieces = agent.sections(feed)
    assert isinstance(agent, Profilable)
    assert list(pieces) == list(PARTS)
    before = weights(agent, "world_model")
    pieces["world_model"]()
    assert changed(before, weights(agent, "world_model"))
    # and all together while nothing is due
    assert agent.schedule.should_collect
    losses = {key.split("/")[1] for key in agent.train(feed) if key[:5] == "loss/"}
    assert losses == set(PARTS)
    assert agent.schedule.done == 0


def test_uses_count_from_the_second_epoch_on():
    agent = make_agent()
    feed = lived(agent)
    cutter = feed.replay._cursors["tokenizer"].cutter
    agent.schedule.taken = 10**6
    agent.train(feed)
    assert not cutter.counts.any()
    agent.schedule.epoch = 2
    agent.train(feed)
    assert cutter.counts.sum() == agent.config.learn.tokenizer.batch


def test_accumulated_batches_are_one_larger_batch():
    config = settings(**{"iris.learn.world_model.batch": 4})
    once, twice = make_agent(config), make_agent(config)
    feed = lived(once)
    batch = feed("world_model")
    batch["mask"][:] = True  # so that all batches count the same
    halves = [
        {k: v[:2] for k, v in batch.items()},
        {k: v[2:] for k, v in batch.items()},
    ]
    once.update("world_model", [batch])
    twice.update("world_model", halves)
    for key, value in weights(once, "world_model").items():
        torch.testing.assert_close(
            value, weights(twice, "world_model")[key], atol=2e-4, rtol=0
        )


def test_what_accumulated_batches_say_is_the_mean_of_them():
    agent = make_agent(settings(**{"iris.learn.world_model.batch": 4}))
    feed = lived(agent)
    one, other = feed("world_model"), feed("world_model")
    before = agent.state_dict()["world_model"]
    before = {k: v.clone() for k, v in before.items()}
    alone = []
    for batches in ([one], [other], [one, other]):
        agent.world.dynamics.load_state_dict(before)
        alone.append(agent.update("world_model", batches))
    key = "loss/world_model/latents"
    first, second, both = (float(metrics[key]) for metrics in alone)
    assert first != second
    assert both == pytest.approx((first + second) / 2)
    one["reward"][:] = float("nan")
    agent.update("world_model", [one, other])
    assert agent.nonfinite()[0] == "loss/world_model/rewards"


def test_a_part_that_breaks_is_noticed_when_all_train_together():
    agent = make_agent(settings(**{"iris.behaviour": False}))
    feed = lived(agent)
    agent.schedule.epoch = agent.config.schedule.epochs + 1  # as without epochs
    next(agent.world.tokenizer.decoder.parameters()).data.fill_(float("nan"))
    for count in (1, 2, 3):
        metrics = agent.train(feed)
        assert metrics["opt/nonfinite_in_row"] == count
    assert any(name.startswith("loss/tokenizer/") for name in agent.nonfinite())
    assert metrics["world_model/opt/loss"].isfinite()


def test_places_that_nobody_teaches_are_told():
    with pytest.warns(UserWarning, match=r"4 frames and dreams of 5(.|\n)*length 5"):
        make_agent(settings(**{"iris.learn.world_model.length": 4}))


def test_the_target_follows_slowly():
    agent = make_agent(settings(**{"iris.actor_critic.target_rate": 0.005}))
    feed = lived(agent)
    agent.actor_critic.online.actor.bias.data += 1
    before = agent.actor_critic.target.actor.bias.clone()
    agent.update("actor_critic", [feed("actor_critic")])
    moved = agent.actor_critic.target.actor.bias - before
    torch.testing.assert_close(moved, torch.full((3,), 0.005), atol=1e-6, rtol=0)


def test_a_broken_batch_changes_no_weights():
    agent = make_agent()
    feed = lived(agent)
    batch = feed("world_model")
    batch["reward"][:] = float("nan")
    before = weights(agent, "world_model")
    metrics = agent.update("world_model", [batch])
    assert metrics["opt/nonfinite_in_row"] == 1
    assert not changed(before, weights(agent, "world_model"))
    assert agent.nonfinite()[0] == "loss/world_model/rewards"


@pytest.fixture
def _without_onednn():
    """Whose half precision ends the process on some machines."""
    before = torch.backends.mkldnn.set_flags(False)
    yield
    torch.backends.mkldnn.set_flags(*before)


@pytest.mark.usefixtures("_without_onednn")
def test_dreams_follow_the_world_in_half_precision():
    env = make_env()
    agent = Iris(
        env.obs_space,
        env.act_space,
        settings(),
        device=torch.device("cpu"),
        precision="bfloat16",
    )
    feed = lived(agent)
    agent.update("tokenizer", [feed("tokenizer")])
    agent.update("actor_critic", [feed("actor_critic")])
    assert agent.dreamt is not agent.world
    assert next(agent.dreamt.parameters()).dtype == torch.bfloat16
    mine = agent.world.tokenizer.quantizer.codebook
    torch.testing.assert_close(agent.dreamt.tokenizer.quantizer.codebook, mine)


@pytest.mark.parametrize("burn_in", [0, 3])
def test_the_real_frames_before_the_last_are_watched_before_a_dream(
    burn_in, monkeypatch
):
    agent = make_agent(watching(burn_in))
    segment = agent._segment(lived(agent)("actor_critic"))
    nets, watched = agent.actor_critic, []
    watch = nets.burn_in
    monkeypatch.setattr(nets, "burn_in", lambda *x: watched.append(x[0]) or watch(*x))
    losses, _ = agent.losses("actor_critic", segment)
    assert segment.image.shape[1] == burn_in + 1
    assert len(watched) == 2  # by the network, and by its slow copy
    assert all(torch.equal(x, segment.image[:, :burn_in]) for x in watched)
    assert all(loss.isfinite().all() for loss in losses.values())


def test_the_actor_critic_learns_from_all_it_has_dreamt(monkeypatch):
    agent = make_agent()
    nets, dreams, given = agent.actor_critic, [], []
    dream, loss = nets.dream, nets.loss

    def dream_and_tell(*args, **kwargs):
        dreams.append(dream(*args, **kwargs))
        return dreams[-1]

    monkeypatch.setattr(nets, "dream", dream_and_tell)
    monkeypatch.setattr(nets, "loss", lambda *x: given.extend(x) or loss(*x))
    agent.losses("actor_critic", agent._segment(lived(agent)("actor_critic")))
    (dreamt,), (_, image, action, *outcome, _) = dreams, given
    assert action.shape[1] == agent.config.actor_critic.horizon > 1
    assert torch.equal(action, dreamt.actions["action"][:, :-1])
    for mine, view in zip((image, *outcome), dreamt.states, strict=True):
        assert torch.equal(mine, view)


def test_the_last_action_of_a_dream_may_be_left_out():
    agent = make_agent()
    segment = agent._segment(lived(agent)("actor_critic"))
    found = [
        agent.actor_critic.dream(
            *(agent.world, segment.image, segment.action),
            Rng(0, "dream", torch.device("cpu")),
            acts_last=acts,
        )
        for acts in (True, False)
    ]
    whole, some = (dream.actions["action"] for dream in found)
    assert whole.any()
    assert torch.equal(some[:, :-1], whole[:, :-1])
    assert not some[:, -1].any()
    assert torch.equal(found[1].states.image, found[0].states.image)


# Time


def test_rewards_and_ends_belong_to_the_action_that_earned_them():
    """And back: nothing but the last observation is lost."""
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
    # a time limit is an end, unless told otherwise
    assert not to_segment(batch, "image", "action", 0, "is_terminal").end.any()
    # actions may count from another number
    assert to_segment(batch, "image", "action", 1).action.tolist() == [[2, 0, 1, 3]]


# Looking and keeping


def test_a_report_draws_what_the_world_sees_and_dreams():
    agent = make_agent()
    feed = lived(agent)
    before = {part: weights(agent, part) for part in PARTS}
    report = agent.report(feed)
    for key in ("reconstruction/image", "openloop/image", "dream/image"):
        assert report[key].ndim == 4
        assert report[key].dtype == np.uint8
    assert report["tokens/usage"].ndim == 3
    assert 0 <= report["codebook/entropy"] <= 5.01  # of 32 codes
    assert report["codebook/perplexity"] <= 32.1
    assert {f"loss/tokenizer/{k}" for k in ("l1", "l2", "worst", "commit")} <= set(
        report
    )
    for part in PARTS:
        assert not changed(before[part], weights(agent, part))


def test_pictures_begin_with_an_episode_and_not_in_the_dark_before_it():
    agent = make_agent()
    feed = lived(agent)
    segment = agent._segment(feed("report"))
    assert not segment.real[:, 0].all()  # some stick out on the left
    moved = from_first_frames(segment)
    assert moved.real[:, 0].all()
    counts = moved.real.sum(1)
    assert (counts == segment.real.sum(1).sort(descending=True).values).all()
    for column in zip(moved.image, moved.real, strict=True):
        image, real = column
        assert image[real].flatten(1).any(1).all()
        assert not image[~real].any()
    assert segment.reward.sum() == moved.reward.sum()
    assert segment.end.sum() == moved.end.sum()
    dream = agent.report(feed)["dream/image"][0]  # a game shows something everywhere
    side = dream.shape[0]
    assert all(dream[:, i : i + side].any() for i in range(0, dream.shape[1], side + 2))


def whole_episodes(count=4, seed=0):
    """Games of catch, in rows; the last is shorter, as if it had been cut."""
    games = []
    for i in range(count):
        env, rng = make_env(i), np.random.default_rng(seed + i)
        obs, rows_ = env.reset(i), []
        while True:
            action = env.act_space["action"].sample(rng)
            rows_.append({**obs, "action": action, "mask": np.bool_(True)})
            if obs["is_last"]:
                break
            obs = env.step({"action": action})
        games.append({key: np.stack([r[key] for r in rows_]) for key in rows_[0]})
    batch = {k: torch.tensor(np.stack([g[k] for g in games])) for k in games[0]}
    batch["mask"][-1, 3:] = False
    return batch


def test_episodes_are_judged_by_the_losses_of_training():
    agent = make_agent()
    batch = whole_episodes()
    losses, counts = agent.episode_losses(batch)
    assert isinstance(agent, HasEpisodeLosses)
    assert counts.tolist() == [[False, True, True, True]] * 3 + [
        [False, True, True, False]
    ]
    segment = agent._segment(batch)
    both = segment.real[:, :-1] & segment.real[:, 1:]
    trained = {
        "tokenizer": agent.world.tokenizer_loss(segment, agent.rng["report"], False),
        "world_model": agent.world.dynamics_loss(segment),
    }
    for part, name, where in (
        ("tokenizer", "l2", both),
        ("tokenizer", "worst", both),
        ("world_model", "rewards", segment.real),
        ("world_model", "ends", segment.real),
    ):
        found = losses[f"{part}/{name}"][:, 1:]
        wanted = trained[part].losses[name].mean()
        torch.testing.assert_close(found[:, : where.shape[1]][where].mean(), wanted)
    pulls = losses["tokenizer/commit"][:, 1 : 1 + both.shape[1]]  # counted everywhere
    torch.testing.assert_close(pulls[both], trained["tokenizer"].losses["commit"][both])
    # the change into the last row is not known, so it is as those before
    change = losses["tokenizer/l2"]
    torch.testing.assert_close(change[:3, 3], change[:3, 1:3].mean(1))


def test_what_comes_after_a_row_does_not_change_its_judgement():
    agent = make_agent()
    batch, other = whole_episodes(), whole_episodes(seed=9)
    changed_later = {
        key: torch.cat([value[:, :3], other[key][:, 3:]], 1)
        for key, value in batch.items()
    }
    changed_later["image"][:, 3] = 255 - changed_later["image"][:, 3]
    first, second = (
        agent.episode_losses(batch)[0],
        agent.episode_losses(changed_later)[0],
    )
    for key, loss in first.items():
        torch.testing.assert_close(loss[:, :3], second[key][:, :3], msg=key)
    # however short they are, all losses have a name
    for rows_ in (1, 2):
        short = {key: value[:, :rows_] for key, value in batch.items()}
        losses, counts = agent.episode_losses(short)
        assert losses.keys() == first.keys()
        assert counts.shape == (4, rows_)


def test_a_saved_agent_goes_on_as_it_would_have():
    agent = make_agent()
    feed = lived(agent)
    for name in PARTS:
        agent.update(name, [feed(name)])
    state = agent.state_dict()
    state = torch.utils._pytree.tree_map(
        lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state
    )
    twin = make_agent(seed=5)
    twin.load_state_dict(state)
    batches = {name: feed(name) for name in PARTS}
    for name in PARTS:
        agent.update(name, [batches[name]])
        twin.update(name, [batches[name]])
        assert not changed(weights(agent, name), weights(twin, name))


@pytest.mark.parametrize("name", PARTS)
def test_each_part_can_be_loaded_alone(name):
    source, target = make_agent(seed=1), make_agent(seed=2)
    before = {part: weights(target, part) for part in PARTS}
    assert target.load_weights(source.state_dict(), name) == [name]
    for part in PARTS:
        assert changed(before[part], weights(target, part)) == (part == name)
    assert not changed(weights(source, name), weights(target, name))


def test_parts_of_another_configuration_are_refused():
    other = make_agent(settings(**{"iris.actor_critic.width": 32}), seed=1)
    agent = make_agent()
    with pytest.raises(UserError, match=r"(?s)actor_critic\..*Fix:"):
        agent.load_weights(other.state_dict())
    assert agent.load_weights(other.state_dict(), "tokenizer|world_model") == [
        "tokenizer",
        "world_model",
    ]
    with pytest.raises(UserError, match="No component"):
        agent.load_weights(other.state_dict(), "encoder")


# What it refuses


def test_continuous_actions_are_refused():
    act = {"action": Space(np.dtype(np.float32), (2,), -1, 1)}
    with pytest.raises(UserError, match=r"(?s)continuous.*Fix:"):
        make_agent(act_space=act)


def test_several_actions_are_refused():
    choice = Space(np.dtype(np.int32), (), 0, 3)
    with pytest.raises(UserError, match="one discrete action"):
        make_agent(act_space={"action": choice, "switch": choice})
    with pytest.raises(UserError, match="one discrete action"):
        make_agent(act_space={"action": Space(np.dtype(np.int32), (2,), 0, 3)})


def test_images_are_needed_and_chosen():
    image = make_env().obs_space["image"]
    vector = {"vector": Space(np.dtype(np.float32), (3,)), **FLAGS}
    with pytest.raises(UserError, match="shows none"):
        make_agent(obs_space=vector)
    two = {"left": image, "right": image, **FLAGS}
    with pytest.raises(UserError, match="left, right"):
        make_agent(obs_space=two)
    assert (
        make_agent(settings(**{"iris.image": "right"}), obs_space=two).image == "right"
    )
    with pytest.raises(UserError, match="'up'"):
        make_agent(settings(**{"iris.image": "up"}), obs_space=two)
    assert make_agent(obs_space={**two, "image": image}).image == "image"


def test_sizes_that_do_not_work_are_named_with_those_that_do():
    crafter, tiny = resolve(["iris_crafter"]).iris, settings()
    for config, side, says in (
        (crafter, 60, "--env.resize 64 64 .*, or .* multiples of 16"),
        (crafter, 72, "multiples of 16"),  # nine by nine cannot be cut in four
        (crafter, 80, "--offline.read.size 64 64.*, or --iris.* 6"),
        (tiny, 6, "--env.resize 4 4 .*, or"),
    ):
        image = Space(np.dtype(np.uint8), (side, side, 3))
        with pytest.raises(UserError, match=rf"(?s)Images of.*Fix: .*{says}"):
            make_agent(config, obs_space={"image": image, **FLAGS})


@pytest.mark.parametrize("shape", [(80, 80), (48, 48), (64, 96)])
def test_the_settings_that_are_proposed_for_a_size_work(shape):
    image = Space(np.dtype(np.uint8), (*shape, 1))
    spaces = {"image": image, **FLAGS}
    with pytest.raises(UserError) as error:
        make_agent(resolve(["iris_crafter"]).iris, obs_space=spaces)
    flags = str(error.value).split(", or ")[1].split()
    names = [name.removeprefix("--") for name in flags[::2]]
    config = resolve(["iris_crafter"], flags=list(zip(names, flags[1::2], strict=True)))
    with torch.device("meta"):
        IrisWorld(
            image,
            3,
            tokenizer=config.iris.tokenizer,
            dynamics=config.iris.world_model,
        )


def test_images_that_are_too_large_are_pointed_to_settings_that_work():
    image = {"image": Space(np.dtype(np.uint8), (84, 84, 3)), **FLAGS}
    with pytest.raises(UserError, match="--configs iris_small") as caught:
        make_agent(obs_space=image)
    assert "resize 4 4" not in str(caught.value)  # nothing would be left to see
    config = resolve(["iris_small"])
    height, width = config.env.resize
    image["image"] = Space(np.dtype(np.uint8), (height, width, 3))
    agent = make_agent(config.iris, obs_space=image)
    seen = rows(np.zeros((2, height, width, 3), np.uint8), first=True)
    _, action, _ = agent.policy(agent.initial(2), seen)
    assert action["action"].shape == (2,)


def test_the_documented_settings_for_larger_images_work():
    flags = {"iris.world_model.frame.latent": 4}
    flags["iris.world_model.transformer.width"] = 576
    config = resolve(["iris_crafter"], flags=flags).iris
    image = Space(np.dtype(np.uint8), (96, 96, 3))
    agent = make_agent(config, obs_space={"image": image, **FLAGS})
    assert agent.world.dynamics.frame_norm is not None


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("actor_critic.horizon", 20, "longer than the 5"),
        ("learn.world_model.length", 11, "longer than the 5"),
        ("learn.tokenizer.length", 1, "at least 2"),
        ("learn.world_model.length", 1, "at least 2"),
        ("acting.temperature", 0.0, "above zero"),
        ("acting.eval_temperature", 0.0, "above zero"),
        ("acting.epsilon", 1.5, "probability"),
        ("acting.eval_epsilon", 2.0, "probability"),
        ("learn.tokenizer.accumulate", 0, "at least 1"),
        ("learn.world_model.accumulate", 0, "at least 1"),
        ("learn.actor_critic.batch", 0, "at least 1"),
        ("actor_critic.width", 0, "at least 1"),
        ("actor_critic.burn_in", -1, "at least 0"),
        ("actor_critic.horizon", 0, "at least 1"),
        ("schedule.steps", 0, "at least 1"),
        ("schedule.first_steps", -1, "at least 0"),
        ("learn.tokenizer.first_steps", -1, "at least 0"),
        ("learn.world_model.start_after", -1, "at least 0"),
        ("learn.actor_critic.steps", -1, "at least 0"),
        ("learn.tokenizer.alpha", -1.0, "at least 0"),
        ("learn.actor_critic.alpha", float("nan"), "no episode could be chosen"),
        ("learn.tokenizer.opt.lr", float("nan"), "negative"),
        ("learn.tokenizer.opt.eps", 0.0, "above zero"),
        ("acting.temperature", float("nan"), "above zero"),
        ("tokenizer.action_planes", -1, "negative"),
        ("actor_critic.discount", 1.5, "from 0 to 1"),
        ("actor_critic.lam", float("nan"), "from 0 to 1"),
        ("actor_critic.target_rate", -0.1, "from 0 to 1"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_some_that_do(name, value, why):
    flags = {f"iris.{name}": value}
    with pytest.raises(UserError, match=why) as caught:
        settings(**flags)
    fix = str(caught.value).partition("Fix: ")[2]
    found = dict(re.findall(r"--(iris\.[\w.]+) ([-\w.]+)", fix))
    if name in UNNAMED:
        assert not found
        return
    assert found
    better = {key: yaml.safe_load(text) for key, text in found.items()}
    settings(**{**flags, **better})


def test_half_floats_are_refused():
    env = make_env()
    with pytest.raises(UserError, match="float16"):
        Iris(
            env.obs_space,
            env.act_space,
            settings(),
            device=torch.device("cpu"),
            precision="float16",
        )


def test_episodes_shorter_than_a_sequence_are_padded():
    """Catch lasts three steps; sequences of nine frames see it whole."""
    flags = {f"iris.learn.{name}.length": 9 for name in ("tokenizer", "world_model")}
    flags["iris.world_model.transformer.blocks"] = 9
    agent = make_agent(settings(**flags))
    feed = lived(agent)
    segment = agent._segment(feed("world_model"))
    assert segment.image.shape[1] == 9
    assert segment.real.sum(1).max() == 3
    assert not segment.image[~segment.real].any()
    for name in PARTS:
        metrics = agent.update(name, [feed(name)])
        assert torch.isfinite(metrics[f"{name}/opt/loss"])


def test_the_window_of_the_actor_critic_ends_with_a_real_frame():
    agent = make_agent()
    feed = lived(agent)
    assert isinstance(agent.windows["actor_critic"], Window)
    segment = agent._segment(feed("actor_critic"))
    assert segment.real[:, -1].all()
