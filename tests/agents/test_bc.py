"""Behavior cloning: losses, masks, action normalization and feature extractors."""

from __future__ import annotations

import pkgutil

import numpy as np
import pytest
import torch

from reverie import agents
from reverie.agents.actions import previous_actions
from reverie.agents.bc.agent import BC, BCConfig
from reverie.agents.bc.feature_extractor import check_keys
from reverie.agents.bc.head import (
    ActionNormalizer,
    BCHead,
    BCHeadConfig,
    GaussianMixture,
)
from reverie.agents.options import BuildOptions
from reverie.agents.random import RandomConfig
from reverie.api import UserError
from reverie.capabilities import KeyStatistics
from reverie.kernels import accelerate
from reverie.nets.blocks import MLP, initialize
from reverie.nets.encoder import EncoderConfig
from reverie.nets.optim.adam import AdamConfig
from reverie.run.config import resolve
from reverie.spaces import Space

CPU = torch.device("cpu")
FLAG = Space(np.bool_)
OBS = {
    "a": Space(np.float32, (2,)),
    "b": Space(np.float32, (2,)),
    "reward": Space(np.float32),
    "is_first": FLAG,
    "is_last": FLAG,
    "is_terminal": FLAG,
}
ACT = {"action": Space(np.float32, (2,), -1, 1)}
ENC = EncoderConfig(layers=1, units=32)
HEAD = BCHeadConfig(layers=1, units=32)
FAST = AdamConfig(lr=3e-3, clip=100.0, wd=0.0)


def config(**changes):
    return BCConfig(
        **{"batch_size": 64, "enc": ENC, "head": HEAD, "opt": FAST} | changes
    )


def make(settings=None, obs=OBS, act=ACT, **kwargs):
    return BC(obs, act, settings or config(), BuildOptions(CPU, **kwargs))


class FunctionFeed:
    """A feed whose batches are returned by a function."""

    def __init__(self, make):
        self.make = make

    def __call__(self, name, out=None):
        return self.make(name)

    def ready(self, name):
        return True

    def write_back(self, stepid, extras):
        raise AssertionError("behavior cloning has no extras")

    prioritize = count_uses = write_back


class EpisodeFeed(FunctionFeed):
    """Random episodes in which the action of row t is a function of row t.

    With `shift`, actions are taken from that many rows later.
    """

    def __init__(self, batch, length=1, shift=0, seed=0):
        self.batch, self.length, self.shift = batch, length, shift
        self.rng = np.random.default_rng(seed)

    def __call__(self, name, out=None):
        rows = self.length + abs(self.shift)
        a, b = (
            self.rng.uniform(-1, 1, (self.batch, rows, 2)).astype(np.float32)
            for _ in range(2)
        )
        action = 0.8 * np.concatenate([a[..., :1], b[..., 1:]], -1)
        first = np.arange(self.length) == 0
        shape = (self.batch, self.length)
        batch = {
            "a": a[:, : self.length],
            "b": b[:, : self.length],
            "action": action[:, self.shift : self.shift + self.length],
            "is_first": np.broadcast_to(first, shape).copy(),
            "is_last": np.zeros(shape, bool),
        }
        return {key: torch.as_tensor(value) for key, value in batch.items()}


def train(agent, feed, updates=250):
    return [float(agent.train(feed)["loss/action"]) for _ in range(updates)]


def test_the_loss_of_learnable_actions_goes_to_zero():
    losses = train(make(), EpisodeFeed(64))
    assert np.mean(losses[-10:]) < 0.01 < 0.15 < losses[0]


def test_fast_modules_and_optimizer_train_like_the_plain_ones(monkeypatch):
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(accelerate, "kernels_available", lambda device: True)
    plain, fast = make(), make(compile="step")
    assert fast.accelerator.has_kernels
    assert type(fast.head.mlp) is pkgutil.resolve_name(MLP.fast_version)
    expected = train(plain, EpisodeFeed(8), updates=4)
    assert train(fast, EpisodeFeed(8), updates=4) == pytest.approx(expected, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["step", "graph"])
def test_updates_in_a_graph_train_like_the_plain_ones(compile):
    def feed():
        episodes, cuda = EpisodeFeed(8), torch.device("cuda")
        return FunctionFeed(
            lambda name: {k: x.to(cuda) for k, x in episodes(name).items()}
        )

    def build(compile):
        device = torch.device("cuda")
        return BC(OBS, ACT, config(), BuildOptions(device, compile=compile))

    expected = train(build("none"), feed(), updates=8)
    agent = build(compile)
    assert train(agent, feed(), updates=8) == pytest.approx(expected, rel=1e-2)
    if compile == "graph":
        assert agent._run_update.can_capture


def test_actions_of_another_row_cannot_be_learned():
    """The loss stays at the variance of the actions."""
    losses = train(make(), EpisodeFeed(64, shift=1))
    assert np.mean(losses[-10:]) > 0.15


def test_swapped_observation_keys_increase_the_loss():
    agent = make()
    train(agent, EpisodeFeed(64))
    batch = EpisodeFeed(64, seed=1)("train")
    right = float(agent.episode_losses(batch)[0]["action"].mean())
    wrong = {**batch, "a": batch["b"], "b": batch["a"]}
    assert float(agent.episode_losses(wrong)[0]["action"].mean()) > 10 * right


def test_last_rows_and_padding_have_no_loss():
    agent = make()
    batch = EpisodeFeed(4, 3)("train")
    batch["is_last"][:, 2] = True
    _, mask = agent.episode_losses(batch)
    assert mask.tolist() == [[True, True, False]] * 4
    batch["mask"] = torch.tensor([[True, False, False]] * 4)
    assert agent.episode_losses(batch)[1].sum() == 4
    before = {k: v.clone() for k, v in agent.head.state_dict().items()}
    batch["action"][:, 1:] = 100.0
    batch["is_last"][:, 1:] = True
    loss = float(make().train(FunctionFeed(lambda name: batch))["loss/action"])
    batch["action"][:, 1:] = -100.0
    assert float(make().train(FunctionFeed(lambda name: batch))["loss/action"]) == loss
    assert all(torch.equal(v, before[k]) for k, v in agent.head.state_dict().items())


def test_a_mixture_represents_two_modes():
    """Demonstrations go left or right; a single prediction goes straight."""
    agent = make(config(head=BCHeadConfig(kind="mixture", layers=1, units=32)))
    rng, point = np.random.default_rng(0), make()

    def feed(name):
        batch = EpisodeFeed(64, seed=int(rng.integers(1e6)))("train")
        side = torch.as_tensor(rng.choice([-0.7, 0.7], (64, 1, 1)).astype(np.float32))
        batch["action"] = side.expand(64, 1, 2).clone()
        return batch

    for _ in range(200):
        agent.train(FunctionFeed(feed))
        point.train(FunctionFeed(feed))
    obs = {k: v[:8, 0].numpy() for k, v in feed("train").items()}
    _, action, _ = agent.policy(agent.initial(8), obs, "eval")
    assert (np.abs(np.abs(action["action"]) - 0.7) < 0.1).all()
    _, mean, _ = point.policy(point.initial(8), obs, "eval")
    assert (np.abs(mean["action"]) < 0.4).all()


def test_the_likelihood_of_a_mixture():
    mean = torch.tensor([[[0.0], [2.0]]])
    mixture = GaussianMixture(torch.zeros(1, 2), mean, torch.ones(1, 2, 1))
    density = torch.distributions.Normal(mean[0, :, 0], torch.ones(2))
    target = torch.tensor([[0.5]])
    expected = -(0.5 * density.log_prob(target[0]).exp()).sum().log()
    torch.testing.assert_close(mixture.loss(target)[0], expected)


def test_a_recurrent_head_is_reset_at_the_start_of_an_episode():
    head = BCHead(3, ACT, BCHeadConfig(layers=0, recurrent=5))
    initialize(head, torch.Generator().manual_seed(0))
    feat = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1))
    first = torch.zeros(2, 6, dtype=torch.bool)
    first[:, 3] = True
    both, _ = head(head.initial(2, CPU), feat, first)
    second, _ = head(head.initial(2, CPU), feat[:, 3:], first[:, 3:])
    no_reset, _ = head(head.initial(2, CPU), feat, torch.zeros_like(first))
    value = both["action"].mode()
    torch.testing.assert_close(value[:, 3:], second["action"].mode())
    assert not torch.allclose(value[:, 3:], no_reset["action"].mode()[:, 3:])


def test_discrete_actions_are_learned():
    act = {"action": Space(np.int32, (), 1, 4)}
    agent = make(act=act)

    def feed(name):
        batch = EpisodeFeed(64, seed=int(torch.randint(10**6, ())))("train")
        batch["action"] = 1 + (batch["a"][..., 0] > 0).int() + (batch["b"][..., 0] > 0)
        return batch

    for _ in range(150):
        agent.train(FunctionFeed(feed))
    batch = feed("train")
    obs = {k: v[:, 0].numpy() for k, v in batch.items()}
    _, action, _ = agent.policy(agent.initial(64), obs, "eval")
    assert action["action"].dtype == np.int32
    assert (action["action"] == batch["action"][:, 0].numpy()).mean() > 0.9


@pytest.mark.parametrize("kind", ["bounds", "moments"])
def test_actions_are_normalized_and_denormalized(kind):
    agent = make(config(normalize=kind), act={"action": Space(np.float32, (2,))})
    low, high = np.array([-10, 2], np.float32), np.array([30, 2], np.float32)
    agent.set_statistics(
        {"action": KeyStatistics((low + high) / 2, np.array([5.0, 0]), low, high)}
    )
    assert agent.needs_statistics
    actions = torch.tensor([[[30.0, 2.0]]])
    normalized = agent.normalizer.normalize({"action": actions})["action"]
    assert float(normalized[0, 0, 0]) == pytest.approx(
        {"bounds": 1, "moments": 4}[kind]
    )
    assert float(normalized[0, 0, 1]) == 0  # constant in the dataset
    torch.testing.assert_close(
        agent.normalizer.denormalize("action", normalized), actions
    )
    other = make(config(normalize=kind), act={"action": Space(np.float32, (2,))})
    other.load_state_dict(agent.state_dict())
    assert torch.equal(
        other.normalizer.normalize({"action": actions})["action"], normalized
    )


def test_discrete_actions_are_not_normalized():
    normalizer = ActionNormalizer({"move": Space(np.int32, (), 0, 3)})
    assert normalizer.normalize({"move": torch.tensor([2])})["move"].tolist() == [2]


def test_a_restored_agent_acts_and_trains_the_same():
    agent = make()
    train(agent, EpisodeFeed(64), 5)
    other = make(seed=3)
    other.load_state_dict(agent.state_dict())
    obs = {k: v[:, 0].numpy() for k, v in EpisodeFeed(3)("train").items()}
    expected, actual = (x.policy(x.initial(3), obs, "eval")[1] for x in (agent, other))
    np.testing.assert_array_equal(actual["action"], expected["action"])
    assert train(agent, EpisodeFeed(64, seed=5), 3) == train(
        other, EpisodeFeed(64, seed=5), 3
    )


def test_other_observation_keys_in_a_checkpoint_are_an_error():
    state = make().state_dict()
    assert state["keys"] == ["a", "b"]
    state["keys"] = ["b", "a"]
    with pytest.raises(UserError, match="it needs the order b, a, not a, b"):
        make().load_weights(state)
    with pytest.raises(UserError, match="it needs c and it does not use b"):
        check_keys(["a", "b"], ["a", "c"], "The checkpoint")


TINY = [
    ("agent", "dreamer"),
    ("dreamer.replay_context", 0),
    ("dreamer.behaviour", "False"),
    ("dreamer.batch_size", 4),
    ("dreamer.batch_length", 4),
]


def dreamer(obs=OBS):
    from reverie.agents.dreamer.agent import Dreamer

    settings = resolve(["debug"], flags=TINY).dreamer
    return Dreamer(obs, ACT, settings, BuildOptions(CPU))


def test_a_new_encoder_uses_the_order_of_the_keys():
    images = {key: Space(np.uint8, (16, 16, 3)) for key in ("c", "d")}
    order = ("d", "b", "c", "a")
    encoder = EncoderConfig(layers=1, units=8, depth=4, mults=(1, 2))
    agent = make(config(keys=order, enc=encoder), OBS | images)
    assert agent.feature_extractor.keys == ["d", "c", "b", "a"]
    other = make(config(enc=encoder), OBS | images)
    assert other.feature_extractor.keys == ["c", "d", "a", "b"]
    other.feature_extractor.load_state_dict(agent.feature_extractor.state_dict())
    values = {key: torch.rand(2, 1, 2) for key in ("a", "b")}
    values |= {k: torch.randint(0, 256, (2, 1, 16, 16, 3)).byte() for k in images}
    swapped = dict(zip("dcba", (values[key] for key in "cdab"), strict=True))
    torch.testing.assert_close(
        agent.feature_extractor((), values, agent.rng["eval"])[0],
        other.feature_extractor((), swapped, agent.rng["eval"])[0],
    )


def test_keys_in_another_order_than_those_of_the_world_are_an_error():
    with pytest.raises(UserError, match="order"):
        make(config(keys=("b", "a"), run_agent="dreamer"), base=dreamer())
    make(config(keys=("a", "b"), run_agent="dreamer"), base=dreamer())
    with pytest.raises(UserError, match=r"bc\.keys has c"):
        make(config(keys=("c",)))


@pytest.mark.parametrize("features", ["encoder", "state"])
def test_the_world_changes_only_if_it_is_finetuned(features):
    for finetune in (False, True):
        base = dreamer()
        before = {k: v.clone() for k, v in base.world.state_dict().items()}
        agent = make(
            config(features=features, finetune=finetune, length=3, run_agent="dreamer"),
            base=base,
        )
        train(agent, EpisodeFeed(8, 3), 2)
        same = all(
            torch.equal(v, before[k]) for k, v in base.world.state_dict().items()
        )
        assert same is not finetune


def test_load_base_loads_the_weights_of_the_world():
    trained, agent = dreamer(), make(config(run_agent="dreamer"), base=dreamer())
    with torch.no_grad():
        for parameter in trained.world.parameters():
            parameter.add_(1)
    agent.load_base(trained.state_dict())
    for name, value in trained.world.enc.state_dict().items():
        assert torch.equal(agent.feature_extractor.encoder.state_dict()[name], value)


def test_state_features_are_the_same_step_by_step():
    agent = make(
        config(features="state", length=4, run_agent="dreamer"), base=dreamer()
    )
    batch = EpisodeFeed(2, 4)("train")
    agent.rng["eval"].categorical = agent.rng["train"].categorical = first_class
    rows = {**batch, "prevact": previous_actions(batch, ACT)}
    feat, _ = agent.feature_extractor(
        agent.feature_extractor.initial(2), rows, agent.rng["eval"]
    )
    carry = agent.initial(2)
    for t in range(4):
        step = {k: v[:, t : t + 1] for k, v in batch.items()}
        step["prevact"] = {k: v[:, t : t + 1] for k, v in rows["prevact"].items()}
        one, last = agent.feature_extractor(
            carry.feature_extractor, step, agent.rng["eval"]
        )
        carry = carry._replace(feature_extractor=last)
        torch.testing.assert_close(one[:, 0], feat[:, t])


def test_state_features_do_not_contain_the_action_of_their_row():
    """An action affects only states from the next row on."""
    agent = make(
        config(features="state", length=4, run_agent="dreamer"), base=dreamer()
    )
    agent.rng["eval"].categorical = first_class
    batch = EpisodeFeed(2, 4)("train")
    changed = {**batch, "action": batch["action"].clone()}
    changed["action"][:, 1] += 0.5
    before, after = (
        agent.feature_extractor(
            agent.feature_extractor.initial(2),
            {**rows, "prevact": previous_actions(rows, ACT)},
            agent.rng["eval"],
        )[0]
        for rows in (batch, changed)
    )
    torch.testing.assert_close(after[:, :2], before[:, :2])
    assert (after[:, 2] != before[:, 2]).any()


def first_class(probs):
    return torch.zeros(probs.shape[:-1], dtype=torch.int64)


def test_recurrent_policies_need_sequences():
    with pytest.raises(UserError, match="length 1"):
        config(features="state")
    with pytest.raises(UserError, match="length 1"):
        config(head=BCHeadConfig(recurrent=4))


def test_a_base_agent_without_world_is_an_error():
    random = agents.make("random", OBS, ACT, RandomConfig(), BuildOptions(CPU))
    with pytest.raises(UserError, match="no world model with an encoder"):
        make(config(run_agent="random"), base=random)
