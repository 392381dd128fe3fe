"""DreamerV3 as an agent: acting, learning, skipping, saving, and its surprises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from reverie import agents
from reverie.agents.dreamer.actor_critic import ImagLossConfig
from reverie.agents.dreamer.agent import Dreamer, DreamerConfig
from reverie.agents.dreamer.factory import make_actor_critic, make_rssm
from reverie.agents.weights import size_of, sizes
from reverie.api import UserError
from reverie.nets.decoder import DecoderConfig
from reverie.nets.encoder import EncoderConfig
from reverie.nets.heads import HeadConfig, PolicyConfig
from reverie.nets.normalize import NormalizeConfig
from reverie.nets.optim.laprop import LaPropConfig
from reverie.spaces import Space
from reverie.worlds.rssm.config import RSSMConfig

CPU = torch.device("cpu")
F32, I32, BOOL, U8 = (np.dtype(x) for x in ("float32", "int32", "bool", "uint8"))
FLAGS = {
    "reward": Space(F32),
    "is_first": Space(BOOL),
    "is_last": Space(BOOL),
    "is_terminal": Space(BOOL),
}
OBS = {"image": Space(U8, (12, 12, 1)), "vector": Space(F32, (3,)), **FLAGS}
ACT = {"action": Space(I32, (), 0, 4)}

TINY = DreamerConfig(
    batch_size=3,
    batch_length=6,
    report_length=5,
    rssm=RSSMConfig(deter=16, hidden=8, stoch=4, classes=3, blocks=4),
    enc=EncoderConfig(depth=8, mults=(1, 2), units=8, layers=1),
    dec=DecoderConfig(depth=8, mults=(1, 2), units=8, layers=1),
    rewhead=HeadConfig(1, 8, bins=15),
    conhead=HeadConfig(1, 8, output="binary", outscale=1.0),
    policy=PolicyConfig(1, 8),
    value=HeadConfig(1, 8, bins=15),
    imag_length=3,
    opt=LaPropConfig(lr=1e-3, warmup=0),
)


def make(config=TINY, obs=OBS, act=ACT, seed=0, precision="float32") -> Dreamer:
    return Dreamer(obs, act, config, device=CPU, precision=precision, seed=seed)


class Feed:
    """Random batches; keeps what comes back."""

    def __init__(self, agent, obs=OBS, act=ACT, seed=0):
        self.agent, self.rng = agent, np.random.default_rng(seed)
        self.spaces = {**obs, **act, **agent.extras}
        self.change = {}
        self.served, self.updates, self.priorities = [], [], []

    def __call__(self, name):
        window = self.agent.windows[name]
        rows, length = window.batch, window.context + window.length
        batch = {
            k: torch.tensor(s.sample(self.rng, rows, length))
            for k, s in self.spaces.items()
        }
        for key in ("is_first", "is_last", "is_terminal"):
            batch[key] = torch.tensor(self.rng.random((rows, length)) < 0.1)
        if "dyn/deter" in batch:
            batch["dyn/deter"] = torch.tanh(batch["dyn/deter"])
        batch["stepid"] = torch.arange(rows * length).reshape(rows, length)
        batch["consec"] = torch.zeros(rows, length, dtype=torch.int64)
        for key, change in self.change.items():
            batch[key] = change(batch[key])
        self.served.append(batch)
        return batch

    def ready(self, name):
        return True

    def write_back(self, stepid, extras):
        self.updates.append((stepid, extras))

    def prioritize(self, stepid, priority):
        self.priorities.append((stepid, priority))

    def count_uses(self, name, on):
        raise AssertionError("Dreamer chooses no episodes")


def flat(tree, prefix=""):
    if isinstance(tree, dict):
        items = [flat(v, f"{prefix}{k}/") for k, v in tree.items()]
        return {k: v for item in items for k, v in item.items()}
    return {prefix: torch.as_tensor(tree).clone()}


def changed(before, after):
    assert before.keys() == after.keys()
    return {
        key.split("/")[0] for key in before if not torch.equal(before[key], after[key])
    }


def observations(rows=2, obs=OBS, seed=0):
    rng = np.random.default_rng(seed)
    batch = {k: s.sample(rng, rows) for k, s in obs.items()}
    return batch | {"is_first": np.zeros(rows, bool), "is_last": np.zeros(rows, bool)}


# Sizes


WALKER = {
    "height": Space(F32),
    "orientations": Space(F32, (14,)),
    "velocity": Space(F32, (9,)),
    **FLAGS,
}
TASKS = {
    "crafter": ({"image": Space(U8, (64, 64, 3)), **FLAGS}, Space(I32, (), 0, 17)),
    "atari": ({"image": Space(U8, (96, 96, 1)), **FLAGS}, Space(I32, (), 0, 18)),
    "walker": (WALKER, Space(F32, (6,), -1, 1)),
}
COUNTS = {
    "size1m": (687_875, 769_762, 640_867),
    "size12m": (10_498_259, 11_808_850, 9_738_019),
    "size25m": (23_495_475, 26_444_402, 21_782_947),
    "size50m": (41_658_259, 46_900_882, 38_612_003),
    "size100m": (93_480_531, 105_276_626, 86_622_499),
    "size200m": (165_965_075, 186_936_082, 153_769_507),
    "size400m": (372_920_979, 420_106_130, 345_473_059),
}
PARTS = {
    ("crafter", "size12m"): {
        "dyn": 5_982_464,
        "enc": 220_416,
        "dec": 1_272_003,
        "rew": 721_407,
        "con": 656_129,
        "pol": 792_337,
        "val": 853_503,
    },
    ("walker", "size1m"): {
        "dyn": 364_416,
        "enc": 10_112,
        "dec": 51_096,
        "rew": 57_663,
        "con": 41_153,
        "pol": 50_316,
        "val": 66_111,
    },
}


def sized(size: str) -> DreamerConfig:
    """The config of a size block, laid over the defaults by hand."""
    block = sizes()[size]
    value = {
        key.rstrip("$").rsplit(".", 1)[1].strip("\\"): v for key, v in block.items()
    }
    config = DreamerConfig()
    names = ("deter", "hidden", "classes")
    config = replace(
        config, rssm=replace(config.rssm, **{name: value[name] for name in names})
    )
    both = {"depth": value["depth"], "units": value["units"]}
    config = replace(
        config, enc=replace(config.enc, **both), dec=replace(config.dec, **both)
    )
    heads = ("rewhead", "conhead", "policy", "value")
    return replace(
        config,
        **{
            name: replace(getattr(config, name), units=value["units"]) for name in heads
        },
    )


def count_parameters(task, config):
    obs, act = TASKS[task]
    with torch.device("meta"):
        world = make_rssm(config, obs, {"action": act}, torch.float32)
        actor_critic = make_actor_critic(config, world.width, {"action": act})
    return {
        name: sum(p.numel() for p in part.parameters() if p.requires_grad)
        for name, part in (*world.named_children(), *actor_critic.named_children())
    }


@pytest.mark.parametrize("size", COUNTS)
def test_parameter_counts(size):
    for task, expected in zip(TASKS, COUNTS[size], strict=True):
        counts = count_parameters(task, sized(size))
        assert sum(counts.values()) == expected
        for part, count in PARTS.get((task, size), {}).items():
            assert counts[part] == count


def test_the_default_is_size200m():
    assert sized("size200m") == DreamerConfig()


# Acting


def test_policy_answers_in_the_dtypes_of_the_spaces():
    act = {
        "move": Space(np.dtype("int64"), (), 0, 3),
        "tool": Space(I32, (2,), [1, 0], [3, 5]),
        "jump": Space(BOOL),
        "arm": Space(F32, (2,), -1, 1),
    }
    agent = make(act=act)
    carry, action, extras = agent.policy(agent.initial(2), observations())
    for key, space in act.items():
        assert action[key].dtype == space.dtype
        assert action[key].shape == (2, *space.shape)
    assert action["tool"][:, 0].min() >= 1
    for key, space in agent.extras.items():
        assert space.problem(extras[key][0]) is None
    carry, action, extras = agent.policy(carry, observations())
    metrics = agent.train(Feed(agent, act=act))
    assert {"ent/move", "ent/arm", "rand/move"} <= set(metrics)
    assert "rand/tool" not in metrics


def test_the_first_observation_of_an_episode_wipes_the_memory():
    obs = observations()
    one, other = make(), make()
    carry = one.initial(2)
    for seed in range(3):
        carry, _, _ = one.policy(carry, observations(seed=seed))
    obs["is_first"][:] = True
    one.rng["policy"].load_state_dict(other.rng["policy"].state_dict())
    (after, _), *_ = one.policy(carry, obs)
    (fresh, _), *_ = other.policy(other.initial(2), obs)
    torch.testing.assert_close(after.deter, fresh.deter)


def test_evaluation_samples_too_and_does_not_disturb_acting():
    agent, twin = make(), make()
    obs = observations(rows=64)
    actions = agent.policy(agent.initial(64), obs, "eval")[1]["action"]
    assert len(set(actions.tolist())) == 4
    ours = agent.policy(agent.initial(64), obs)[1]["action"]
    theirs = twin.policy(twin.initial(64), obs)[1]["action"]
    np.testing.assert_array_equal(ours, theirs)


def test_extra_observation_keys_are_ignored():
    plain = awake(make())
    agent = awake(make(obs={**OBS, "log/score": Space(F32)}))
    seen = observations(rows=64)
    extra = {**seen, "log/score": np.arange(64, dtype=np.float32)}
    np.testing.assert_array_equal(
        agent.policy(agent.initial(64), extra)[1]["action"],
        plain.policy(plain.initial(64), seen)[1]["action"],
    )


# Learning


def test_an_update_changes_what_it_should():
    agent = awake(make())
    before = flat(agent.state_dict())
    feed = Feed(agent)
    agent.train(feed)
    moved = changed(before, flat(agent.state_dict()))
    assert moved >= {"enc", "dyn", "dec", "rew", "con", "pol", "val", "slowval"}
    assert moved >= {"opt", "retnorm", "counters", "rng", "carry"}
    ((stepid, extras),) = feed.updates
    assert torch.equal(stepid, feed.served[0]["stepid"][:, 1:])
    assert extras["dyn/deter"].shape == (3, 6, 16)


def test_the_first_update_of_the_default_warmup_moves_no_weight():
    agent = make(replace(TINY, opt=LaPropConfig()))
    before = flat(agent.state_dict())
    agent.train(Feed(agent))
    moved = changed(before, flat(agent.state_dict()))
    assert not moved & {"enc", "dyn", "dec", "rew", "con", "pol", "val"}


def test_losses_go_down():
    agent = make(replace(TINY, opt=LaPropConfig(lr=3e-3, warmup=0)))
    batch = Feed(agent)("train")
    feed = Feed(agent)
    feed.change = {key: lambda x, v=value: v for key, value in batch.items()}
    first = agent.train(feed)
    for _ in range(60):
        last = agent.train(feed)
    for key in ("loss/image", "loss/vector", "loss/con", "loss/rew"):
        assert float(last[key]) < float(first[key])


def poison(x):
    x = x.clone()
    x[0, 2] = torch.nan
    return x


def test_a_batch_that_is_not_finite_leaves_nothing_behind():
    agent = make()
    feed = Feed(agent)
    agent.train(feed)
    before = flat(agent.state_dict())
    feed.change = {"reward": poison}
    metrics = agent.train(feed)
    after = flat(agent.state_dict())
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved <= {"opt/skipped/", "opt/nonfinite_in_row/", "rng/train/state/"}
    assert float(metrics["opt/nonfinite_in_row"]) == 1
    assert "loss/rew" in agent.nonfinite()
    assert any(name.startswith("grad/rew.") for name in agent.nonfinite())
    _stepid, extras = feed.updates[-1]
    for key in agent.extras:
        assert torch.equal(extras[key], feed.served[-1][key][:, 1:])
    feed.change = {}
    metrics = agent.train(feed)
    assert float(metrics["opt/nonfinite_in_row"]) == 0
    assert float(metrics["opt/skipped"]) == 1
    assert agent.nonfinite() == []


def test_sequences_begin_from_the_stored_state_unless_they_go_on():
    def first_deter(consec, stored):
        agent = make()
        feed = Feed(agent)
        feed.change = {
            "consec": lambda x: x + consec,
            "dyn/deter": lambda x: torch.full_like(x, stored),
            "is_first": torch.zeros_like,
        }
        agent.train(feed)
        return feed.updates[0][1]["dyn/deter"][:, 0]

    assert not torch.allclose(first_deter(0, 0.1), first_deter(0, 0.9))
    assert torch.equal(first_deter(1, 0.1), first_deter(1, 0.9))


def test_consecutive_batches_go_on_from_the_running_state():
    agent = make()
    feed = Feed(agent)
    agent.train(feed)
    ended = agent.carry["train"].state.deter.clone()
    torch.testing.assert_close(ended, feed.updates[0][1]["dyn/deter"][:, -1])
    feed.change = {"consec": lambda x: x + 1}
    seen = []
    loss = agent.loss
    agent.loss = lambda state, *rest, **kw: (
        seen.append(state) or loss(state, *rest, **kw)
    )
    agent.train(feed)
    assert torch.equal(seen[0].deter, ended)


def test_without_context_nothing_is_stored_and_the_last_action_goes_on():
    agent = make(replace(TINY, replay_context=0))
    assert agent.extras == {}
    feed = Feed(agent)
    agent.train(feed)
    assert feed.updates == []
    last = feed.served[0]["action"][:, -1]
    assert torch.equal(agent.carry["train"].prevact["action"], last)


@pytest.mark.parametrize("signal", ["model", "rew", "image", "policy"])
def test_a_loss_can_be_the_priority(signal):
    agent = make(replace(TINY, priosignal=signal))
    feed = Feed(agent)
    agent.train(feed)
    ((stepid, priority),) = feed.priorities
    assert stepid.shape == priority.shape == (3, 6)
    assert torch.isfinite(priority).all()
    assert (priority >= 0).all()  # also of the policy loss, which has both signs


def test_an_unknown_priority_signal_is_refused():
    agent = make(replace(TINY, priosignal="surprise"))
    with pytest.raises(UserError, match="model"):
        agent.train(Feed(agent))


def test_dreams_can_start_from_the_last_steps_only():
    agent = make(replace(TINY, imag_last=2))
    learned = loss_of(agent)
    assert learned.losses["policy"].shape == (3, 2)
    assert learned.losses["repval"].shape == (3, 1)
    assert learned.losses["rew"].shape == (3, 6)


@pytest.mark.parametrize(
    "setting",
    ["batch_size", "batch_length", "imag_length", "consec_train", "consec_report"],
)
def test_sizes_below_one_are_refused(setting):
    with pytest.raises(UserError, match=f"dreamer.{setting} is 0"):
        replace(TINY, **{setting: 0})


def test_other_impossible_sizes_are_refused():
    for name, value in (("replay_context", -1), ("report_length", 1), ("horizon", 1)):
        with pytest.raises(UserError, match=f"dreamer.{name} is {value}"):
            replace(TINY, **{name: value})


def test_weights_of_a_deeper_network_are_refused():
    deeper = replace(TINY, policy=replace(TINY.policy, layers=TINY.policy.layers + 1))
    with pytest.raises(UserError, match="no place"):
        make().load_weights(make(deeper).state_dict())


def test_a_component_pattern_that_is_no_pattern_is_refused():
    with pytest.raises(UserError, match="No component"):
        make().load_weights(make().state_dict(), "enc|dyn(")


def test_one_step_is_too_few_for_the_replay_value_loss():
    with pytest.raises(UserError, match="imag_last"):
        replace(TINY, imag_last=1)


def loss_of(agent, seed=0, **flags):
    feed = Feed(agent, seed=seed)
    feed.change = flags
    _, state, batch = agent._restore("train", feed("train"))
    return agent.loss(state, batch, agent.rng["train"], training=True)


def reaches(loss, parts):
    parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
    grads = torch.autograd.grad(
        loss.sum(), parameters, retain_graph=True, materialize_grads=True
    )
    return any(bool(grad.any()) for grad in grads)


def awake(agent):
    """Heads start at zero; give them something to say."""
    for part in (agent.world.rew, agent.actor_critic.val, agent.actor_critic.slowval):
        part.head["logits"].weight.data.normal_(generator=torch.manual_seed(0))
    return agent


def test_dreams_train_only_policy_and_critic():
    agent = awake(make())
    parts = agent.components()
    world = [parts[name] for name in ("enc", "dyn", "dec", "rew", "con")]
    losses = loss_of(agent).losses
    assert reaches(losses["policy"], [parts["pol"]])
    assert reaches(losses["value"], [parts["val"]])
    assert not reaches(losses["policy"], [*world, parts["val"]])
    assert not reaches(losses["value"], [*world, parts["pol"]])
    losses = loss_of(awake(make(replace(TINY, ac_grads=True)))).losses
    assert losses["value"].requires_grad


def test_ac_grads_reach_the_recorded_states():
    agent = awake(make(replace(TINY, ac_grads=True)))
    losses = loss_of(agent).losses
    assert reaches(losses["value"], [agent.world.enc])
    assert not reaches(losses["value"], [agent.world.rew])


@pytest.mark.parametrize("repval_grad", [True, False])
def test_recorded_values_shape_the_world_if_they_may(repval_grad):
    agent = awake(make(replace(TINY, repval_grad=repval_grad)))
    loss = loss_of(agent).losses["repval"]
    assert reaches(loss, [agent.world.enc]) == repval_grad
    assert reaches(loss, [agent.components()["val"]])


def test_replay_value_loss_can_be_left_out():
    agent = make(replace(TINY, repval_loss=False))
    assert "loss/repval" not in agent.train(Feed(agent))


@pytest.mark.parametrize("slowtar", [False, True])
def test_returns_bootstrap_from_the_fast_critic_unless_told_otherwise(slowtar):
    config = replace(TINY, imag_loss=ImagLossConfig(slowtar=slowtar))
    values = []
    for bias in (0.0, 5.0):
        agent = awake(make(config))
        agent.actor_critic.slowval.head["logits"].bias.data[0] = bias
        values.append(loss_of(agent).metrics["tar"])
    assert torch.equal(*values) != slowtar


def imagine(agent, con, reward=0.0, steps=4):
    ac = agent.actor_critic
    feat = torch.zeros(2, steps, agent.world.width)
    actions = {"action": torch.zeros(2, steps, dtype=torch.int32)}
    shape = (2, steps)
    rewards = torch.zeros(shape) + torch.as_tensor(reward)
    return ac.imag_loss(feat, actions, rewards, torch.full(shape, con), True)


def test_weights_of_dreams_begin_with_the_first_chance_to_go_on():
    weight = imagine(make(), 0.5).weight
    assert weight[0].tolist() == [0.5, 0.25, 0.125, 0.0625]
    apart = imagine(make(replace(TINY, contdisc=False)), 0.5)
    discount = 1 - 1 / 333
    expected = [0.5, 0.25 * discount, 0.125 * discount**2, 0.0625 * discount**3]
    torch.testing.assert_close(apart.weight[0], torch.tensor(expected))


def test_advantages_are_divided_by_the_range_but_never_shifted():
    agent = make(replace(TINY, retnorm=NormalizeConfig("perc", 1.0, 1.0, debias=False)))
    reward = torch.tensor([[0.0, 100, 0, 0], [0, 0, 0, 0]])
    out = imagine(agent, 1.0, reward)
    # with rate 1 the range is that of these very returns: updated before it is used
    low, high = torch.quantile(out.ret, torch.tensor([0.05, 0.95]))
    torch.testing.assert_close(out.adv, out.ret / (high - low))
    assert float(out.ret.max()) > 90


def test_small_returns_are_not_blown_up():
    out = imagine(make(), 1.0, 0.01)
    torch.testing.assert_close(out.adv, out.ret)


def test_the_slow_critic_follows_the_updated_fast_one():
    agent = make()
    before = agent.actor_critic.slowval.mlp.linear0.weight.clone()
    agent.train(Feed(agent))
    fast = agent.actor_critic.val.mlp.linear0.weight
    slow = agent.actor_critic.slowval.mlp.linear0.weight
    torch.testing.assert_close(slow, 0.02 * fast + 0.98 * before)


@pytest.fixture
def plain_kernels():
    """Some virtual machines name matrix instructions that they do not allow."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_learns_with_float32_weights(precision, plain_kernels):
    agent = make(precision=precision)
    feed = Feed(agent)
    before = flat(agent.state_dict())
    for _ in range(6):  # float16 may first look for its loss scale
        metrics = agent.train(feed)
    assert "dyn" in changed(before, flat(agent.state_dict()))
    assert ("opt/grad_scale" in metrics) == (precision == "float16")
    assert all(p.dtype == torch.float32 for p in agent.opt.tensors)
    assert feed.updates[0][1]["dyn/deter"].dtype == torch.float32
    agent.policy(agent.initial(2), observations())
    agent.report(feed)


@pytest.mark.parametrize(
    "config",
    [
        replace(TINY, valnorm=NormalizeConfig("meanstd", debias=True)),
        replace(TINY, advnorm=NormalizeConfig("meanstd", debias=True)),
        replace(TINY, contdisc=False),
        replace(TINY, rewhead=HeadConfig(1, 8, output="symlog_mse")),
        replace(
            TINY,
            enc=replace(TINY.enc, norm="layer"),
            rssm=replace(TINY.rssm, norm="layer"),
        ),
        replace(TINY, dec=replace(TINY.dec, bspace=0, strided=True)),
    ],
)
def test_options_train(config):
    agent = make(config)
    metrics = agent.train(Feed(agent))
    assert float(metrics["opt/skipped"]) == 0
    assert torch.isfinite(torch.as_tensor(metrics["opt/grad_norm"]))


# Looking


def test_report_has_every_loss_and_a_video_and_changes_nothing():
    agent = make()
    feed = Feed(agent)
    trained = agent.train(feed)
    before = flat(agent.state_dict())
    report = agent.report(feed)
    after = flat(agent.state_dict())
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert all(key.startswith(("rng/report", "carry/report")) for key in moved)
    missing = [k for k in trained if not k.startswith("opt/") and k not in report]
    assert missing == []
    video = report["openloop/image"]
    assert video.dtype == np.uint8
    assert video.shape == (5 + 5, 3 * 12 + 4, 3 * (12 + 4), 3)


def test_gradient_norms_on_demand():
    agent = make(replace(TINY, report_gradnorms=True))
    before = flat(agent.state_dict())
    report = agent.report(Feed(agent))
    assert float(report["gradnorm/image"]) > 0
    assert {"gradnorm/policy", "gradnorm/repval"} <= set(report)
    assert "dyn" not in changed(before, flat(agent.state_dict()))


def test_metrics_have_no_graph():
    agent = make()
    metrics = agent.train(Feed(agent))
    assert not any(getattr(x, "requires_grad", False) for x in metrics.values())


# Keeping


def test_same_seed_same_run_and_other_seed_other_run():
    def run(seed):
        agent = make(seed=seed)
        feed = Feed(agent)
        agent.train(feed)
        agent.policy(agent.initial(2), observations())
        return flat(agent.state_dict())

    assert changed(run(0), run(0)) == set()
    assert "pol" in changed(run(0), run(1))


def test_saved_and_restored_goes_on_bit_for_bit():
    agent = make()
    feed = Feed(agent)
    for _ in range(2):
        agent.train(feed)
    agent.report(feed)
    saved = agent.state_dict()
    saved = dict(clone(saved).items())
    twin = make(seed=7)
    twin.load_state_dict(saved)
    assert changed(flat(saved), flat(twin.state_dict())) == set()
    other = Feed(twin)
    feed.rng = np.random.default_rng(5)
    other.rng = np.random.default_rng(5)
    one, two = agent.train(feed), twin.train(other)
    assert {k: float(v) for k, v in one.items()} == {
        k: float(v) for k, v in two.items()
    }
    assert changed(flat(agent.state_dict()), flat(twin.state_dict())) == set()


def clone(tree):
    if isinstance(tree, dict):
        return {k: clone(v) for k, v in tree.items()}
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


def test_state_dict_is_made_of_tensors_and_numbers():
    for value in flat(make().state_dict()).values():
        assert isinstance(value, torch.Tensor)


def test_weights_of_some_components_only():
    source, agent = make(seed=1), make(seed=2)
    before = flat(agent.state_dict())
    agent.load_weights(source.state_dict(), "enc|dyn")
    assert changed(before, flat(agent.state_dict())) == {"enc", "dyn"}
    with pytest.raises(UserError, match="No component"):
        agent.load_weights(source.state_dict(), "brain")


def test_weights_of_another_size_name_the_tensor_and_the_size_that_fits():
    block = sized("size1m")
    small = replace(TINY, rssm=block.rssm, value=block.value)
    obs = {"vector": OBS["vector"], **FLAGS}
    big = make(small, obs=obs)
    state = big.state_dict()
    assert size_of(state) == "size1m"
    agent = make(obs=obs)
    before = flat(agent.state_dict())
    with pytest.raises(UserError, match=r"(?s)\(.*\).*\(.*\).*--configs size1m"):
        agent.load_state_dict(state)
    assert changed(before, flat(agent.state_dict())) == set()


def test_weights_of_an_unnamed_size_are_refused_too():
    other = make(replace(TINY, rssm=replace(TINY.rssm, hidden=16)))
    with pytest.raises(UserError, match="this agent wants"):
        make().load_state_dict(other.state_dict())


# Refusing


def test_bad_input_is_refused():
    with pytest.raises(UserError, match="encoder has no inputs"):
        make(obs=FLAGS)
    with pytest.raises(UserError, match="sides of"):
        make(obs={"image": Space(U8, (64, 200, 3)), **FLAGS})
    with pytest.raises(UserError, match="no policy supports"):
        make(act={"action": Space(U8, (4, 4, 3))})
    with pytest.raises(UserError, match="bfloat16"):
        make(precision="half")
    with pytest.raises(UserError, match="used for another thing"):
        make(obs={**OBS, "value": Space(F32)})
    with pytest.raises(UserError, match="rssm"):
        make(replace(TINY, world="sphere"))
    with pytest.raises(UserError, match="dreamer"):
        agents.make("dreamr", OBS, ACT, TINY, device=CPU, precision="float32", seed=0)
