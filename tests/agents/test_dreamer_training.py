"""DreamerV3: updates, losses and their gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dreamer_helpers import (
    TINY,
    RandomFeed,
    changed,
    flatten,
    make,
    observations,
)

from reverie.agents.dreamer.actor_critic import ImaginedBatch
from reverie.agents.dreamer.config import ImagLossConfig
from reverie.api import UserError
from reverie.nets.heads import HeadConfig
from reverie.nets.normalize import NormalizeConfig
from reverie.nets.optim.laprop import LaPropConfig
from reverie.run.config import resolve


def has_gradient(loss, modules):
    parameters = [
        p for module in modules for p in module.parameters() if p.requires_grad
    ]
    grads = torch.autograd.grad(
        loss.sum(), parameters, retain_graph=True, materialize_grads=True
    )
    return any(bool(grad.any()) for grad in grads)


def loss_of(agent, seed=0, **flags):
    feed = RandomFeed(agent, seed=seed)
    feed.change = flags
    _, state, batch = agent.prepare_batch("train", feed("train"))
    return agent.loss(state, batch, agent.rng["train"], training=True)


def test_an_update_changes_all_components():
    agent = make(random_heads=True)
    before = flatten(agent.state_dict())
    feed = RandomFeed(agent)
    agent.train(feed)
    changed_keys = changed(before, flatten(agent.state_dict()))
    assert changed_keys >= {"enc", "dyn", "dec", "rew", "con", "pol", "val", "slowval"}
    assert changed_keys >= {"opt", "retnorm", "counters", "rng", "carry"}
    ((stepid, extras),) = feed.written
    assert torch.equal(stepid, feed.batches[0]["stepid"][:, 1:])
    assert extras["dyn/deter"].shape == (3, 6, 16)


def test_the_first_update_of_the_default_warmup_changes_no_weights():
    agent = make(replace(TINY, opt=LaPropConfig()))
    before = flatten(agent.state_dict())
    agent.train(RandomFeed(agent))
    changed_keys = changed(before, flatten(agent.state_dict()))
    assert not changed_keys & {"enc", "dyn", "dec", "rew", "con", "pol", "val"}


def test_losses_go_down():
    agent = make(replace(TINY, opt=LaPropConfig(lr=3e-3, warmup=0)))
    batch = RandomFeed(agent)("train")
    feed = RandomFeed(agent)
    feed.change = {key: lambda x, v=value: v for key, value in batch.items()}
    first = agent.train(feed)
    for _ in range(60):
        last = agent.train(feed)
    for key in ("loss/image", "loss/vector", "loss/con", "loss/rew"):
        assert float(last[key]) < float(first[key])


def with_nan(x):
    x = x.clone()
    x[0, 2] = torch.nan
    return x


def test_a_nonfinite_batch_is_skipped_without_changes():
    agent = make()
    feed = RandomFeed(agent)
    agent.train(feed)
    before = flatten(agent.state_dict())
    feed.change = {"reward": with_nan}
    metrics = agent.train(feed)
    after = flatten(agent.state_dict())
    changed_keys = {key for key in before if not torch.equal(before[key], after[key])}
    counters = {"opt/skipped/", "opt/consecutive_skips/"}
    assert changed_keys <= {*counters, "rng/train/state/"}
    assert float(metrics["opt/consecutive_skips"]) == 1
    assert "loss/rew" in agent.nonfinite()
    assert any(name.startswith("grad/rew.") for name in agent.nonfinite())
    _stepid, extras = feed.written[-1]
    for key in agent.extras:
        assert torch.equal(extras[key], feed.batches[-1][key][:, 1:])
    feed.change = {}
    metrics = agent.train(feed)
    assert float(metrics["opt/consecutive_skips"]) == 0
    assert float(metrics["opt/skipped"]) == 1
    assert agent.nonfinite() == []


def test_only_new_sequences_start_from_the_stored_state():
    def first_deter(consec, stored):
        agent = make()
        feed = RandomFeed(agent)
        feed.change = {
            "consec": lambda x: x + consec,
            "dyn/deter": lambda x: torch.full_like(x, stored),
            "is_first": torch.zeros_like,
        }
        agent.train(feed)
        return feed.written[0][1]["dyn/deter"][:, 0]

    assert not torch.allclose(first_deter(0, 0.1), first_deter(0, 0.9))
    assert torch.equal(first_deter(1, 0.1), first_deter(1, 0.9))


def test_consecutive_batches_continue_from_the_carried_state():
    agent = make()
    feed = RandomFeed(agent)
    agent.train(feed)
    last_state = agent.carry["train"].state.deter.clone()
    torch.testing.assert_close(last_state, feed.written[0][1]["dyn/deter"][:, -1])
    feed.change = {"consec": lambda x: x + 1}
    starts = []
    loss = agent.loss
    agent.loss = lambda state, *args, **kw: (
        starts.append(state) or loss(state, *args, **kw)
    )
    agent.train(feed)
    assert torch.equal(starts[0].deter, last_state)


def test_without_context_nothing_is_stored_and_the_last_action_is_carried():
    agent = make(replace(TINY, replay_context=0))
    assert agent.extras == {}
    feed = RandomFeed(agent)
    agent.train(feed)
    assert feed.written == []
    last = feed.batches[0]["action"][:, -1]
    assert torch.equal(agent.carry["train"].prevact["action"], last)


@pytest.mark.parametrize("signal", ["model", "rew", "image", "policy"])
def test_losses_as_priorities(signal):
    agent = make(replace(TINY, priosignal=signal))
    feed = RandomFeed(agent)
    agent.train(feed)
    ((stepid, priority),) = feed.priorities
    assert stepid.shape == priority.shape == (3, 6)
    assert torch.isfinite(priority).all()
    assert (priority >= 0).all()  # also of the policy loss, which has both signs


def test_an_unknown_priority_signal_is_an_error():
    for signal in ("surprise", "repval", "barlow", "infonce", "boundary"):
        with pytest.raises(UserError, match=r"is not a loss of each step(.|\n)*model"):
            make(replace(TINY, priosignal=signal))
    contrastive = replace(TINY, representation="infonce")
    with pytest.raises(UserError, match="infonce"):  # without a decoder
        make(replace(contrastive, priosignal="image"))
    with pytest.raises(UserError, match="model, con"):
        make(replace(TINY, behaviour=False, priosignal="policy"))
    for config in (
        replace(contrastive, priosignal="infonce"),
        replace(contrastive, draw=True, priosignal="image"),
        replace(TINY, world="vta", priosignal="boundary"),
    ):
        agent = make(config)
        feed = RandomFeed(agent)
        agent.train(feed)
        assert feed.priorities


def test_imagination_from_the_last_steps_only():
    agent = make(replace(TINY, imag_last=2))
    loss = loss_of(agent)
    assert loss.losses["policy"].shape == (3, 2)
    assert loss.losses["repval"].shape == (3, 1)
    assert loss.losses["rew"].shape == (3, 6)


@pytest.mark.parametrize(
    "setting",
    ["batch_size", "batch_length", "imag_length", "consec_train", "consec_report"],
)
def test_sizes_below_one_are_errors(setting):
    with pytest.raises(UserError, match=f"dreamer.{setting} must be at least 1, not 0"):
        replace(TINY, **{setting: 0})


def test_other_invalid_sizes_are_errors():
    for name, value in (("replay_context", -1), ("report_length", 1), ("horizon", 1)):
        with pytest.raises(UserError, match=f"dreamer.{name} must .* not {value}"):
            replace(TINY, **{name: value})


def test_the_replay_value_loss_needs_two_steps():
    with pytest.raises(UserError, match="imag_last"):
        replace(TINY, imag_last=1)


def test_imagined_losses_train_only_actor_and_critic():
    agent = make(random_heads=True)
    parts = agent.components()
    world = [parts[name] for name in ("enc", "dyn", "dec", "rew", "con")]
    losses = loss_of(agent).losses
    assert has_gradient(losses["policy"], [parts["pol"]])
    assert has_gradient(losses["value"], [parts["val"]])
    assert not has_gradient(losses["policy"], [*world, parts["val"]])
    assert not has_gradient(losses["value"], [*world, parts["pol"]])
    losses = loss_of(make(replace(TINY, ac_grads=True), random_heads=True)).losses
    assert losses["value"].requires_grad


def test_ac_grads_reach_the_start_states():
    agent = make(replace(TINY, ac_grads=True), random_heads=True)
    losses = loss_of(agent).losses
    assert has_gradient(losses["value"], [agent.world.enc])
    assert not has_gradient(losses["value"], [agent.world.rew])


def test_separate_optimizers_train_the_critic_on_the_replay_value_loss():
    critics = []
    for repval_loss in (True, False):
        config = replace(TINY, optimizers="separate", repval_loss=repval_loss)
        agent = make(config, random_heads=True)
        agent.train(RandomFeed(agent))
        weights = agent.components()["val"].parameters()
        critics.append(torch.cat([x.detach().flatten() for x in weights]))
    assert not torch.equal(*critics)


@pytest.mark.parametrize("repval_grad", [True, False])
def test_repval_grad_trains_the_encoder(repval_grad):
    agent = make(replace(TINY, repval_grad=repval_grad), random_heads=True)
    loss = loss_of(agent).losses["repval"]
    assert has_gradient(loss, [agent.world.enc]) == repval_grad
    assert has_gradient(loss, [agent.components()["val"]])


def test_without_the_replay_value_loss():
    agent = make(replace(TINY, repval_loss=False))
    assert "loss/repval" not in agent.train(RandomFeed(agent))


@pytest.mark.parametrize(
    ("name", "value"), [("imag_loss.lam", 1.5), ("repl_loss.lam", -0.1)]
)
def test_lambda_is_from_0_to_1(name, value):
    with pytest.raises(UserError, match="lam must be from 0 to 1"):
        resolve(flags={f"dreamer.{name}": value})


def test_a_slow_target_of_the_replay_loss_has_no_effect_and_is_refused():
    with pytest.raises(UserError, match="slowtar must be False"):
        resolve(flags={"dreamer.repl_loss.slowtar": True})


@pytest.mark.parametrize("slowtar", [False, True])
def test_returns_bootstrap_from_the_slow_critic_only_with_slowtar(slowtar):
    config = replace(TINY, imag_loss=ImagLossConfig(slowtar=slowtar))
    values = []
    for bias in (0.0, 5.0):
        agent = make(config, random_heads=True)
        agent.actor_critic.slowval.head["logits"].bias.data[0] = bias
        values.append(loss_of(agent).metrics["tar"])
    assert torch.equal(*values) != slowtar


def imagine(agent, con, reward=0.0, steps=4):
    ac = agent.actor_critic
    feat = torch.zeros(2, steps, agent.world.width)
    actions = {"action": torch.zeros(2, steps, dtype=torch.int32)}
    shape = (2, steps)
    rewards = torch.zeros(shape) + torch.as_tensor(reward)
    imagined = ImaginedBatch(actions, feat, rewards, torch.full(shape, con))
    return ac.imag_loss(imagined, True)


def test_imagined_weights_include_the_first_continue_probability():
    weight = imagine(make(), 0.5).weight
    assert weight[0].tolist() == [0.5, 0.25, 0.125, 0.0625]
    separate = imagine(make(replace(TINY, contdisc=False)), 0.5)
    discount = 1 - 1 / 333
    expected = [0.5, 0.25 * discount, 0.125 * discount**2, 0.0625 * discount**3]
    torch.testing.assert_close(separate.weight[0], torch.tensor(expected))


def test_advantages_are_divided_by_the_range_and_not_shifted():
    agent = make(replace(TINY, retnorm=NormalizeConfig("perc", 1.0, 1.0, debias=False)))
    reward = torch.tensor([[0.0, 100, 0, 0], [0, 0, 0, 0]])
    out = imagine(agent, 1.0, reward)
    # with rate 1 the range is that of these returns: updated before it is used
    low, high = torch.quantile(out.ret, torch.tensor([0.05, 0.95]))
    torch.testing.assert_close(out.adv, out.ret / (high - low))
    assert float(out.ret.max()) > 90


def test_small_returns_are_not_scaled_up():
    out = imagine(make(), 1.0, 0.01)
    torch.testing.assert_close(out.adv, out.ret)


def test_the_slow_critic_is_a_moving_average_of_the_updated_critic():
    agent = make()
    before = agent.actor_critic.slowval.mlp.linear0.weight.clone()
    agent.train(RandomFeed(agent))
    fast = agent.actor_critic.val.mlp.linear0.weight
    slow = agent.actor_critic.slowval.mlp.linear0.weight
    torch.testing.assert_close(slow, 0.02 * fast + 0.98 * before)


@pytest.mark.usefixtures("_without_onednn")
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains_float32_weights(precision):
    agent = make(precision=precision)
    feed = RandomFeed(agent)
    before = flatten(agent.state_dict())
    for _ in range(6):  # float16 first searches its loss scale
        metrics = agent.train(feed)
    assert "dyn" in changed(before, flatten(agent.state_dict()))
    assert ("opt/grad_scale" in metrics) == (precision == "float16")
    assert all(p.dtype == torch.float32 for p in agent.opt.tensors)
    assert feed.written[0][1]["dyn/deter"].dtype == torch.float32
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
    metrics = agent.train(RandomFeed(agent))
    assert float(metrics["opt/skipped"]) == 0
    assert torch.isfinite(torch.as_tensor(metrics["opt/grad_norm"]))
