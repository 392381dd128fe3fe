"""The RSSM: resets, losses, rollouts and replay extras."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from reverie.api import UserError
from reverie.nets.blocks import initialize
from reverie.nets.decoder import DecoderConfig
from reverie.nets.encoder import EncoderConfig
from reverie.nets.heads import HeadConfig
from reverie.nets.rng import Rng
from reverie.nets.standardize import standardizers
from reverie.spaces import Space
from reverie.worlds.latent import WorldNetworksConfig
from reverie.worlds.rssm.config import RSSMConfig
from reverie.worlds.rssm.dynamics import RSSMState
from reverie.worlds.rssm.world import RSSM

F32, I32, BOOL = np.dtype("float32"), np.dtype("int32"), np.dtype(bool)
OBS = {
    "vector": Space(F32, (5,)),
    "reward": Space(F32),
    "is_first": Space(BOOL),
    "is_last": Space(BOOL),
    "is_terminal": Space(BOOL),
}
ACT = {"action": Space(I32, (), 0, 3)}
SIZE = RSSMConfig(deter=16, hidden=8, stoch=4, classes=3, blocks=4)


def make(config=SIZE, act=ACT, obs=OBS, **options) -> RSSM:
    networks = {
        "enc": EncoderConfig(units=8, layers=1),
        "dec": DecoderConfig(units=8, layers=1),
        "rewhead": HeadConfig(1, 8),
        "conhead": HeadConfig(1, 8, output="binary", outscale=1.0),
        "discount": 1 - 1 / 333,
        "reward_grad": True,
    }
    world = RSSM(obs, act, config, WorldNetworksConfig(**{**networks, **options}))
    initialize(world, torch.Generator().manual_seed(0))
    return world


def batch(rows=2, length=6, act=ACT, seed=0):
    rng = np.random.default_rng(seed)
    spaces = {**OBS, **dict(act.items())}
    data = {k: torch.tensor(s.sample(rng, rows, length)) for k, s in spaces.items()}
    data |= {k: torch.zeros(rows, length, dtype=torch.bool) for k in list(OBS)[2:]}
    data["prevact"] = {k: data.pop(k) for k in act}
    return data


def rng(seed=0) -> Rng:
    return Rng(seed, "test", torch.device("cpu"))


class ModeRng(Rng):
    """Returns the mode instead of a sample."""

    def __init__(self) -> None:
        pass

    def categorical(self, probs):
        return probs.argmax(-1)


def test_is_first_resets_the_state():
    world, data = make(), batch()
    data["is_first"][:, 3] = True
    full = world.observe(world.initial(2), data, ModeRng())
    part = {k: v[:, 3:] for k, v in data.items() if k != "prevact"}
    part["prevact"] = {"action": data["prevact"]["action"][:, 3:]}
    alone = world.observe(world.initial(2), part, ModeRng())
    torch.testing.assert_close(full.deter[:, 3:], alone.deter)
    torch.testing.assert_close(full.stoch[:, 3:], alone.stoch)


def test_rows_without_extras_restore_the_initial_state():
    world = make()
    zeros = {key: torch.tensor(space.zeros(2)) for key, space in world.extras.items()}
    state, first = world.from_replay(zeros), world.initial(2)
    assert torch.equal(state.deter, first.deter)
    assert torch.equal(state.stoch, first.stoch)
    states = world.observe(first, batch(), rng())
    restored = world.from_replay(world.to_replay(states))
    torch.testing.assert_close(restored.stoch, states.stoch)


def test_observe_does_not_update_image_statistics():
    obs = {"image": Space(np.dtype(np.uint8), (4, 4, 3)), **OBS}
    small = {"units": 8, "layers": 1, "depth": 2, "mults": (1,), "outer": True}
    world = make(
        obs=obs,
        enc=EncoderConfig(**small, standard="batch"),
        dec=DecoderConfig(**small, bspace=0),
    ).train()
    (layer,) = standardizers(world.enc, "batch")
    for shade in (0, 255):
        rows = {**batch(1, 1), "image": torch.full((1, 1, 4, 4, 3), shade).byte()}
        world.observe(world.initial(1), rows, rng())
        assert not layer.get_buffer("seen")
        assert world.training
        assert layer.training


def test_is_first_replaces_a_state_that_is_not_finite():
    world, data = make(), batch()
    data["is_first"][:, 0] = True
    invalid = RSSMState(*(torch.full_like(x, torch.nan) for x in world.initial(2)))
    assert torch.isfinite(world.observe(invalid, data, rng()).deter).all()


def test_the_action_before_a_reset_is_zero_and_not_class_zero():
    world, data = make(), batch(length=1)
    data["is_first"][:] = True
    states = []
    for action in (0, 2):
        data["prevact"]["action"][:] = action
        states.append(world.observe(world.initial(2), data, ModeRng()).deter)
    torch.testing.assert_close(states[0], states[1])
    data["is_first"][:] = False  # from the zero state, but with a real action 0
    data["prevact"]["action"][:] = 0
    real = world.observe(world.initial(2), data, ModeRng()).deter
    assert not torch.allclose(states[0], real)


def test_large_actions_are_scaled_to_one_and_keep_their_gradient():
    act = {"arm": Space(F32, (2,), -10, 10)}
    world = make(act=act)
    state = world.initial(1)
    action = torch.tensor([[5.0, -0.5]], requires_grad=True)
    same = torch.tensor([[1.0, -0.5]])
    big = world.dyn.embed_action({"arm": action}, None, state.deter)
    torch.testing.assert_close(
        big, world.dyn.embed_action({"arm": same}, None, state.deter)
    )
    (grad,) = torch.autograd.grad(big.sum(), action)
    assert grad[0, 0] != 0


def test_hidden_norm_spans_all_blocks_and_gates_are_split_inside_each():
    world = make()
    dyn, config = world.dyn, SIZE
    state = RSSMState(
        torch.randn(3, 16), F.one_hot(torch.randint(3, (3, 4)), 3).float()
    )
    action = torch.randn(3, 8)
    blocks, width = config.blocks, config.deter // config.blocks

    def rms(x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-4)

    x0 = F.silu(rms(dyn.dynin0(state.deter)))
    x1 = F.silu(rms(dyn.dynin1(state.stoch.flatten(1))))
    shared = torch.cat([x0, x1, action], -1)
    hidden = []
    for k in range(blocks):
        own = state.deter[:, k * width : (k + 1) * width]
        hidden.append(torch.cat([own, shared], -1) @ dyn.dynhid0.weight[k])
    x = F.silu(rms(torch.cat(hidden, -1)))  # over all blocks together
    after = []
    for k in range(blocks):
        block = slice(k * width, (k + 1) * width)
        reset, candidate, update = (x[:, block] @ dyn.dyngru.weight[k]).chunk(3, -1)
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        update = torch.sigmoid(update - 1)
        after.append(update * candidate + (1 - update) * state.deter[:, block])
    torch.testing.assert_close(dyn.core(state, action), torch.cat(after, -1))


def test_further_recurrent_layers_have_the_width_of_deter():
    world = make(replace(SIZE, dynlayers=2))
    assert world.dyn.dynhid1.weight.shape == (4, 4, 4)
    states = world.observe(world.initial(2), batch(), rng())
    assert torch.isfinite(states.deter).all()


def test_an_absolute_posterior_depends_on_the_observation_only():
    world = make(replace(SIZE, absolute=True))
    tokens = torch.randn(2, world.enc.width)
    one = world.dyn.posterior_logits(torch.randn(2, 16), tokens)
    other = world.dyn.posterior_logits(torch.randn(2, 16), tokens)
    assert torch.equal(one, other)


def test_free_nats_apply_to_the_sum_over_categoricals():
    world = make(replace(SIZE, free_nats=0.5))
    data = batch()
    losses = world.loss(world.initial(2), data, rng()).losses
    unclipped = make(replace(SIZE, free_nats=0.0))
    raw = unclipped.loss(unclipped.initial(2), data, rng()).losses
    torch.testing.assert_close(losses["dyn"], raw["dyn"].clamp(min=0.5))
    assert raw["dyn"].max() > 0.5 > raw["dyn"].max() / SIZE.stoch


def test_dyn_trains_the_prior_and_rep_the_posterior():
    world, data = make(replace(SIZE, free_nats=0.0)), batch()
    result = world.loss(world.initial(2), data, rng())
    prior, post = world.dyn.priorlogit.weight, world.dyn.obslogit.weight
    for name, trained, fixed in (("dyn", prior, post), ("rep", post, prior)):
        loss = result.losses[name][
            :, :1
        ].sum()  # one step, so there is no recurrent gradient
        grads = torch.autograd.grad(
            loss, [trained, fixed], retain_graph=True, materialize_grads=True
        )
        assert grads[0].any()
        assert not grads[1].any()


def test_the_continue_target_is_the_discount():
    world, data = make(), batch()
    data["is_terminal"][0, 2] = True
    targets = []
    forward = world.con.forward

    class RecordTarget:
        def __init__(self, out):
            self.out = out

        def loss(self, target):
            targets.append(target)
            return self.out.loss(target)

    world.con.forward = lambda feat: RecordTarget(forward(feat))
    world.loss(world.initial(2), data, rng())
    assert float(targets[0][0, 2]) == 0
    assert float(targets[0][0, 3]) == pytest.approx(1 - 1 / 333)


@pytest.mark.parametrize("reward_grad", [True, False])
def test_reward_grad_controls_the_gradient_of_the_reward_loss(reward_grad):
    world, data = make(reward_grad=reward_grad), batch()
    world.rew.head["logits"].weight.data.normal_()
    loss = world.loss(world.initial(2), data, rng()).losses["rew"].sum()
    grads = torch.autograd.grad(
        loss, list(world.enc.parameters()), materialize_grads=True
    )
    assert any(grad.any() for grad in grads) == reward_grad


def test_features_begin_with_deter():
    world = make()
    state = RSSMState(torch.ones(1, 16), torch.zeros(1, 4, 3))
    assert world.features(state)[0].tolist() == [1] * 16 + [0] * 12


def test_rollouts_begin_with_the_start_state():
    world = make()
    start = RSSMState(
        torch.randn(5, 16), F.one_hot(torch.randint(3, (5, 4)), 3).float()
    )
    action = {"action": torch.zeros(5, dtype=torch.int32)}
    rollout = world.imagine(start, lambda state: action, 4, rng())
    assert rollout.states.deter.shape == (5, 5, 16)
    assert rollout.actions["action"].shape == (5, 5)
    assert torch.equal(rollout.states.deter[:, 0], start.deter)
    expected = world.dyn.core(start, world.dyn.embed_action(action, None, start.deter))
    torch.testing.assert_close(rollout.states.deter[:, 1], expected)


@pytest.mark.parametrize("store", ["float32", "float16"])
def test_extras_restore_the_state(store):
    world = make(replace(SIZE, store=store))
    states = world.observe(world.initial(2), batch(), rng())
    extras = world.to_replay(states)
    for key, space in world.extras.items():
        assert extras[key].shape == (2, 6, *space.shape)
        assert space.problem(extras[key][0, 0].numpy()) is None
    back = world.from_replay(extras)
    assert torch.equal(back.stoch, states.stoch)
    exact = store == "float32"
    torch.testing.assert_close(
        back.deter, states.deter, rtol=0, atol=0 if exact else 1e-3
    )


def test_extras_store_one_byte_per_categorical():
    extras = make(replace(SIZE, stoch=32, classes=64)).extras
    assert extras["dyn/stoch"].nbytes == 32


def test_samples_are_exactly_one_hot():
    world = make()
    stoch = world.observe(world.initial(2), batch(), rng()).stoch
    assert set(stoch.unique().tolist()) == {0.0, 1.0}


def test_widths_that_do_not_divide_into_blocks_are_refused():
    with pytest.raises(UserError, match="3 blocks"):
        make(replace(SIZE, blocks=3))
