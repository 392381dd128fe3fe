"""Cloning: what is learnt, from which rows, through whose eyes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie import agents
from reverie.agents.bc.agent import BC, BCConfig, led_to
from reverie.agents.bc.feature_extractor import check_order
from reverie.agents.bc.head import ActionScale, CloneHead, CloneHeadConfig, Mixture
from reverie.agents.random import RandomConfig
from reverie.api import UserError
from reverie.capabilities import Moments
from reverie.kernels import accelerate
from reverie.nets.blocks import MLP, initialize
from reverie.nets.encoder import EncoderConfig
from reverie.nets.optim.adam import AdamConfig
from reverie.run.config import resolve
from reverie.spaces import Space

CPU = torch.device("cpu")
FLAG = Space(np.bool_)
SEEN = {
    "a": Space(np.float32, (2,)),
    "b": Space(np.float32, (2,)),
    "reward": Space(np.float32),
    "is_first": FLAG,
    "is_last": FLAG,
    "is_terminal": FLAG,
}
DONE = {"action": Space(np.float32, (2,), -1, 1)}
ENC = EncoderConfig(layers=1, units=32)
HEAD = CloneHeadConfig(layers=1, units=32)
FAST = AdamConfig(lr=3e-3, clip=100.0, wd=0.0)


def config(**changes):
    return BCConfig(
        **{"batch_size": 64, "enc": ENC, "head": HEAD, "opt": FAST} | changes
    )


def make(settings=None, obs=SEEN, act=DONE, **more):
    return BC(obs, act, settings or config(), device=CPU, **more)


class Served:
    """A feed that serves what a function makes."""

    def __init__(self, make):
        self.make = make

    def __call__(self, name, out=None):
        return self.make(name)

    def ready(self, name):
        return True

    def write_back(self, stepid, extras):
        raise AssertionError("a clone has no extras")

    prioritize = count_uses = write_back


class Rows(Served):
    """An endless feed of single episodes where action t is a function of row t.

    With `shift` the actions are those of one row later, as if misread.
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
        cut = {
            "a": a[:, : self.length],
            "b": b[:, : self.length],
            "action": action[:, self.shift : self.shift + self.length],
            "is_first": np.broadcast_to(first, shape).copy(),
            "is_last": np.zeros(shape, bool),
        }
        return {key: torch.as_tensor(value) for key, value in cut.items()}


def learn(agent, feed, updates=250):
    return [float(agent.train(feed)["loss/action"]) for _ in range(updates)]


def test_what_was_done_on_seeing_a_row_is_learnt():
    losses = learn(make(), Rows(64))
    assert np.mean(losses[-10:]) < 0.01 < 0.15 < losses[0]


def test_fast_modules_and_optimizer_train_like_the_plain_ones(monkeypatch):
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(accelerate, "available", lambda device: True)
    plain, fast = make(), make(compile="step")
    assert fast.fast.has_kernels
    assert type(fast.head.mlp) is MLP.fast_version()
    expected = learn(plain, Rows(8), updates=4)
    assert learn(fast, Rows(8), updates=4) == pytest.approx(expected, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["step", "graph"])
def test_updates_in_a_graph_train_like_the_plain_ones(compile):
    def feed():
        rows, cuda = Rows(8), torch.device("cuda")
        return Served(lambda name: {k: x.to(cuda) for k, x in rows(name).items()})

    def build(compile):
        device = torch.device("cuda")
        return BC(SEEN, DONE, config(), device=device, compile=compile)

    expected = learn(build("none"), feed(), updates=8)
    agent = build(compile)
    assert learn(agent, feed(), updates=8) == pytest.approx(expected, rel=1e-2)
    if compile == "graph":
        assert agent.update.can_capture


def test_actions_that_are_off_by_one_row_are_not_learnt():
    """Whoever misreads recordings sees it at once: the loss stays at the variance."""
    losses = learn(make(), Rows(64, shift=1))
    assert np.mean(losses[-10:]) > 0.15


def test_permuted_features_are_noticed_by_the_loss():
    agent = make()
    learn(agent, Rows(64))
    batch = Rows(64, seed=1)("train")
    right = float(agent.episode_losses(batch)[0]["action"].mean())
    wrong = {**batch, "a": batch["b"], "b": batch["a"]}
    assert float(agent.episode_losses(wrong)[0]["action"].mean()) > 10 * right


def test_last_rows_and_padding_do_not_count():
    agent = make()
    batch = Rows(4, 3)("train")
    batch["is_last"][:, 2] = True
    _, real = agent.episode_losses(batch)
    assert real.tolist() == [[True, True, False]] * 4
    batch["mask"] = torch.tensor([[True, False, False]] * 4)
    assert agent.episode_losses(batch)[1].sum() == 4
    before = {k: v.clone() for k, v in agent.head.state_dict().items()}
    batch["action"][:, 1:] = 100.0
    batch["is_last"][:, 1:] = True
    one = make()
    loss_with = float(one.train(Served(lambda name: batch))["loss/action"])
    batch["action"][:, 1:] = -100.0
    assert float(make().train(Served(lambda name: batch))["loss/action"]) == loss_with
    assert all(torch.equal(v, before[k]) for k, v in agent.head.state_dict().items())


def test_a_mixture_keeps_two_ways_apart():
    """Experts go left or right; the mean would go straight on."""
    agent = make(config(head=CloneHeadConfig(kind="mixture", layers=1, units=32)))
    rng, point = np.random.default_rng(0), make()

    def feed(name):
        batch = Rows(64, seed=int(rng.integers(1e6)))("train")
        side = torch.as_tensor(rng.choice([-0.7, 0.7], (64, 1, 1)).astype(np.float32))
        batch["action"] = side.expand(64, 1, 2).clone()
        return batch

    for _ in range(200):
        agent.train(Served(feed))
        point.train(Served(feed))
    obs = {k: v[:8, 0].numpy() for k, v in feed("train").items()}
    _, chosen, _ = agent.policy(agent.initial(8), obs, "eval")
    assert (np.abs(np.abs(chosen["action"]) - 0.7) < 0.1).all()
    _, mean, _ = point.policy(point.initial(8), obs, "eval")
    assert (np.abs(mean["action"]) < 0.4).all()


def test_the_likelihood_of_a_mixture_is_that_of_its_parts():
    mean = torch.tensor([[[0.0], [2.0]]])
    mixture = Mixture(torch.zeros(1, 2), mean, torch.ones(1, 2, 1))
    density = torch.distributions.Normal(mean[0, :, 0], torch.ones(2))
    target = torch.tensor([[0.5]])
    expected = -(0.5 * density.log_prob(target[0]).exp()).sum().log()
    torch.testing.assert_close(mixture.loss(target)[0], expected)


def test_a_recurrent_head_remembers_and_forgets_with_the_episode():
    head = CloneHead(3, DONE, CloneHeadConfig(layers=0, recurrent=5))
    initialize(head, torch.Generator().manual_seed(0))
    feat = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1))
    first = torch.zeros(2, 6, dtype=torch.bool)
    first[:, 3] = True
    whole, _ = head(head.initial(2, CPU), feat, first)
    alone, _ = head(head.initial(2, CPU), feat[:, 3:], first[:, 3:])
    unaware, _ = head(head.initial(2, CPU), feat, torch.zeros_like(first))
    value = whole["action"].mode()
    torch.testing.assert_close(value[:, 3:], alone["action"].mode())
    assert not torch.allclose(value[:, 3:], unaware["action"].mode()[:, 3:])


def test_discrete_actions_are_cloned_by_their_classes():
    act = {"action": Space(np.int32, (), 1, 4)}
    agent = make(act=act)

    def feed(name):
        batch = Rows(64, seed=int(torch.randint(10**6, ())))("train")
        batch["action"] = 1 + (batch["a"][..., 0] > 0).int() + (batch["b"][..., 0] > 0)
        return batch

    for _ in range(150):
        agent.train(Served(feed))
    batch = feed("train")
    obs = {k: v[:, 0].numpy() for k, v in batch.items()}
    _, chosen, _ = agent.policy(agent.initial(64), obs, "eval")
    assert chosen["action"].dtype == np.int32
    assert (chosen["action"] == batch["action"][:, 0].numpy()).mean() > 0.9


@pytest.mark.parametrize("how", ["bounds", "moments"])
def test_actions_are_scaled_and_come_back(how):
    agent = make(config(normalize=how), act={"action": Space(np.float32, (2,))})
    low, high = np.array([-10, 2], np.float32), np.array([30, 2], np.float32)
    agent.set_statistics(
        {"action": Moments((low + high) / 2, np.array([5.0, 0]), low, high)}
    )
    assert agent.needs_statistics
    wide = torch.tensor([[[30.0, 2.0]]])
    narrow = agent.scale.narrow({"action": wide})["action"]
    assert float(narrow[0, 0, 0]) == pytest.approx({"bounds": 1, "moments": 4}[how])
    assert float(narrow[0, 0, 1]) == 0  # an entry that never changes
    torch.testing.assert_close(agent.scale.widen("action", narrow), wide)
    fresh = make(config(normalize=how), act={"action": Space(np.float32, (2,))})
    fresh.load_state_dict(agent.state_dict())
    assert torch.equal(fresh.scale.narrow({"action": wide})["action"], narrow)


def test_scaling_leaves_integers_alone():
    scale = ActionScale({"move": Space(np.int32, (), 0, 3)})
    assert scale.narrow({"move": torch.tensor([2])})["move"].tolist() == [2]


def test_a_saved_clone_does_the_same():
    agent = make()
    learn(agent, Rows(64), 5)
    other = make(seed=3)
    other.load_state_dict(agent.state_dict())
    obs = {k: v[:, 0].numpy() for k, v in Rows(3)("train").items()}
    ours, theirs = (x.policy(x.initial(3), obs, "eval")[1] for x in (agent, other))
    np.testing.assert_array_equal(ours["action"], theirs["action"])
    assert learn(agent, Rows(64, seed=5), 3) == learn(other, Rows(64, seed=5), 3)


def test_another_order_of_keys_is_refused():
    state = make().state_dict()
    assert state["order"] == ["a", "b"]
    state["order"] = ["b", "a"]
    with pytest.raises(UserError, match="the order was b, a, now it is a, b"):
        make().load_weights(state)
    with pytest.raises(UserError, match=r"it has c besides and it knows no b"):
        check_order(["a", "b"], ["a", "c"], "The checkpoint")


TINY = [
    ("agent", "dreamer"),
    ("dreamer.replay_context", 0),
    ("dreamer.behaviour", "False"),
    ("dreamer.batch_size", 4),
    ("dreamer.batch_length", 4),
]


def dreamer(obs=SEEN):
    from reverie.agents.dreamer.agent import Dreamer

    settings = resolve(["debug"], flags=TINY).dreamer
    return Dreamer(obs, DONE, settings, device=CPU)


def test_keys_named_in_another_order_than_the_world_reads_them_are_refused():
    with pytest.raises(UserError, match="order"):
        make(config(keys=("b", "a"), on="dreamer"), base=dreamer())
    make(config(keys=("a", "b"), on="dreamer"), base=dreamer())
    with pytest.raises(UserError, match="names c"):
        make(config(keys=("c",)))


@pytest.mark.parametrize("see", ["encoder", "state"])
def test_frozen_eyes_stay_as_they_are_and_tuned_ones_do_not(see):
    for tune in (False, True):
        base = dreamer()
        before = {k: v.clone() for k, v in base.world.state_dict().items()}
        agent = make(config(see=see, tune=tune, length=3, on="dreamer"), base=base)
        learn(agent, Rows(8, 3), 2)
        same = all(
            torch.equal(v, before[k]) for k, v in base.world.state_dict().items()
        )
        assert same is not tune


def test_eyes_take_over_the_weights_of_a_run():
    trained, agent = dreamer(), make(config(on="dreamer"), base=dreamer())
    with torch.no_grad():
        for parameter in trained.world.parameters():
            parameter.add_(1)
    agent.load_base(trained.state_dict())
    for name, value in trained.world.enc.state_dict().items():
        assert torch.equal(agent.eyes.encoder.state_dict()[name], value)


def test_acting_on_states_is_what_was_trained():
    """Step by step with a carry, or whole sequences at once: the same features."""
    agent = make(config(see="state", length=4, on="dreamer"), base=dreamer())
    batch = Rows(2, 4)("train")
    agent.rng["eval"].categorical = agent.rng["train"].categorical = first_class
    rows = {**batch, "prevact": led_to(batch, DONE)}
    feat, _ = agent.eyes(agent.eyes.initial(2), rows, agent.rng["eval"])
    carry = agent.initial(2)
    for t in range(4):
        step = {k: v[:, t : t + 1] for k, v in batch.items()}
        step["prevact"] = {k: v[:, t : t + 1] for k, v in rows["prevact"].items()}
        one, eyes = agent.eyes(carry.eyes, step, agent.rng["eval"])
        carry = carry._replace(eyes=eyes)
        torch.testing.assert_close(one[:, 0], feat[:, t])


def test_a_clone_on_states_is_not_shown_what_it_is_to_guess():
    """An action reaches the state of the row it leads to, and none before."""
    agent = make(config(see="state", length=4, on="dreamer"), base=dreamer())
    agent.rng["eval"].categorical = first_class
    batch = Rows(2, 4)("train")
    changed = {**batch, "action": batch["action"].clone()}
    changed["action"][:, 1] += 0.5
    before, after = (
        agent.eyes(
            agent.eyes.initial(2),
            {**rows, "prevact": led_to(rows, DONE)},
            agent.rng["eval"],
        )[0]
        for rows in (batch, changed)
    )
    torch.testing.assert_close(after[:, :2], before[:, :2])
    assert (after[:, 2] != before[:, 2]).any()


def first_class(probs):
    return torch.zeros(probs.shape[:-1], dtype=torch.int64)


def test_a_memory_needs_sequences():
    with pytest.raises(UserError, match="single rows"):
        config(see="state")
    with pytest.raises(UserError, match="single rows"):
        config(head=CloneHeadConfig(recurrent=4))


def test_agents_without_eyes_say_so():
    random = agents.make(
        "random", SEEN, DONE, RandomConfig(), device=CPU, precision="float32", seed=0
    )
    with pytest.raises(UserError, match="no encoder to clone on"):
        make(config(on="random"), base=random)
