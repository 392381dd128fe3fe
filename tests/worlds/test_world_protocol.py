"""Every world meets `api.World`, and those for Dreamer `api.LatentWorld`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from protocol_checks import check_members

from reverie.api import LatentWorld, World
from reverie.capabilities import (
    HasBoundaries,
    HasEncoder,
    ObsEncoder,
    ProfilableWorld,
)
from reverie.nets.blocks import initialize
from reverie.nets.decoder import DecoderConfig
from reverie.nets.encoder import EncoderConfig
from reverie.nets.heads import HeadConfig
from reverie.nets.residual import FrameConfig
from reverie.nets.rng import Rng
from reverie.nets.transformer import TransformerConfig
from reverie.spaces import Space
from reverie.worlds.iris.config import (
    DynamicsConfig,
    QuantizerConfig,
    TokenizerConfig,
)
from reverie.worlds.iris.world import IrisWorld
from reverie.worlds.latent import WorldNetworksConfig
from reverie.worlds.rssm.config import RSSMConfig
from reverie.worlds.rssm.world import RSSM
from reverie.worlds.vta.config import RecurrentVTAConfig, VTAConfig
from reverie.worlds.vta.recurrent import RecurrentVTA
from reverie.worlds.vta.world import VTA

SIDE, ACTIONS, N, H = 8, 3, 2, 4
OBS = {
    "image": Space(np.uint8, (SIDE, SIDE, 3)),
    "reward": Space(np.float32),
    **{key: Space(bool) for key in ("is_first", "is_last", "is_terminal")},
}
ACT = {"action": Space(np.int64, (), 0, ACTIONS)}


def networks() -> WorldNetworksConfig:
    size = {"depth": 2, "mults": (2,), "units": 6, "layers": 1, "kernel": 3}
    return WorldNetworksConfig(
        enc=EncoderConfig(**size),
        dec=DecoderConfig(**size, bspace=0),
        rewhead=HeadConfig(1, units=6, bins=5),
        conhead=HeadConfig(1, units=6, output="binary"),
        discount=0.99,
        reward_grad=True,
    )


def make_rssm():
    config = RSSMConfig(deter=16, hidden=8, stoch=4, classes=3, blocks=4)
    world = RSSM(OBS, ACT, config, networks())
    initialize(world, torch.Generator().manual_seed(0))
    return world


def make_recurrent_vta():
    config = RecurrentVTAConfig(8, 3, 8, 4, 6)
    world = RecurrentVTA(OBS, ACT, config, networks())
    initialize(world, torch.Generator().manual_seed(0))
    return world


def make_vta():
    config = VTAConfig(context=2, length=5, belief=8, state=3, layers=1)
    world = VTA({"image": OBS["image"]}, ACT, config)
    world.initialize(torch.Generator().manual_seed(0))
    return world


def make_iris():
    def frame(latent):
        return FrameConfig(32, latent, (1,), (1,))

    tokenizer = TokenizerConfig(
        action_planes=2,
        encoder=frame(4),
        frame=frame(3),
        decoder=frame(1),
        quantizer=QuantizerConfig(8, 4),
    )
    dynamics = DynamicsConfig(TransformerConfig(1, 2, 32, 5), frame(2))
    world = IrisWorld(OBS["image"], ACTIONS, tokenizer=tokenizer, dynamics=dynamics)
    initialize(world, torch.Generator().manual_seed(0))
    return world


LATENT = {"rssm": make_rssm, "recurrent_vta": make_recurrent_vta}
WORLDS = {**LATENT, "vta": make_vta, "iris": make_iris}


def make_rng() -> Rng:
    return Rng(0, "test", torch.device("cpu"))


def start_state(world):
    """A state `(N, ...)` to imagine from."""
    image = torch.randint(0, 256, (N, 2, SIDE, SIDE, 3), dtype=torch.uint8)
    if isinstance(world, IrisWorld):
        return world.state_from_frames(image, torch.zeros(N, 1, dtype=torch.int64))
    if isinstance(world, VTA):
        return world.state_from_frames(image, make_rng())
    return world.initial(N)


def make_batch(length=3):
    rng = np.random.default_rng(0)
    spaces = {**OBS, **ACT}
    batch = {k: torch.tensor(s.sample(rng, N, length)) for k, s in spaces.items()}
    for key in ("is_first", "is_last", "is_terminal"):
        batch[key] = torch.zeros(N, length, dtype=torch.bool)
    batch["prevact"] = {"action": batch.pop("action")}
    return batch


@pytest.mark.parametrize("make", WORLDS.values(), ids=WORLDS)
def test_every_world_has_the_members_of_a_world(make):
    check_members(make(), World)


@pytest.mark.parametrize("make", LATENT.values(), ids=LATENT)
def test_latent_worlds_have_the_members_of_a_latent_world(make):
    check_members(make(), LatentWorld)


@pytest.mark.parametrize("make", WORLDS.values(), ids=WORLDS)
@torch.no_grad()
def test_rollouts_hold_the_start_state_and_horizon_steps(make):
    world, actions = make().eval(), []

    def policy(state):
        assert all(len(x) == N for x in state if isinstance(x, torch.Tensor) and x.ndim)
        actions.append(torch.full((N,), len(actions) % ACTIONS))
        return {"action": actions[-1]}

    start = start_state(world)
    first = {key: getattr(start, key).clone() for key in start._fields[:2]}
    rollout = world.imagine(start, policy, H, make_rng())
    assert rollout.actions["action"].shape == (N, H + 1)
    assert torch.equal(rollout.actions["action"], torch.stack(actions, 1))
    for value in rollout.states:
        assert value.shape[:2] == (N, H + 1)
    for key, value in first.items():
        assert torch.equal(getattr(rollout.states, key)[:, 0], value)
    decoded = world.decode(rollout.states)
    assert set(world.image_keys) == {"image"}
    for key in world.image_keys:
        assert decoded[key].shape == (N, H + 1, SIDE, SIDE, 3)
        assert 0 <= decoded[key].min() <= decoded[key].max() <= 1


@pytest.mark.parametrize("make", LATENT.values(), ids=LATENT)
def test_latent_worlds_observe_and_restore_states(make):
    world, batch = make(), make_batch()
    states = world.observe(world.initial(N), batch, make_rng())
    feat = world.features(states)
    assert feat.shape == (N, 3, world.width)
    reward, cont = world.reward_and_cont(feat)
    assert reward.shape == cont.shape == (N, 3)
    extras = world.to_replay(states)
    assert extras.keys() == world.extras.keys()
    for key, space in world.extras.items():
        assert extras[key].shape == (N, 3, *space.shape)
    restored = world.features(world.from_replay(extras))
    torch.testing.assert_close(restored, feat.detach())
    for loss in world.loss(world.initial(N), batch, make_rng()).losses.values():
        assert loss.shape == (N, 3)


@pytest.mark.parametrize("make", WORLDS.values(), ids=WORLDS)
def test_optional_protocols(make):
    world, batch = make(), make_batch()
    if isinstance(world, HasEncoder):
        check_members(world, HasEncoder)
        assert isinstance(world.encoder, ObsEncoder)
        assert world.encoder.keys == ["image"]
        embed = world.encoder(batch, torch.float32)
        assert embed.shape == (N, 3, world.encoder.width)
    if isinstance(world, HasBoundaries):
        check_members(world, HasBoundaries)
        states = world.observe(world.initial(N), batch, make_rng())
        assert world.boundaries(states).shape == (N, 3)
        assert world.boundaries(states).dtype == torch.bool
    if isinstance(world, ProfilableWorld):
        check_members(world, ProfilableWorld)
        for section in world.sections(world.initial(N), batch, make_rng()).values():
            assert all(x.requires_grad for x in section.forward()[-1:])


def test_which_worlds_have_optional_protocols():
    worlds = {name: make() for name, make in WORLDS.items()}

    def names(protocol):
        return {name for name, world in worlds.items() if isinstance(world, protocol)}

    assert names(HasEncoder) == {"rssm", "recurrent_vta", "iris"}
    assert names(HasBoundaries) == {"recurrent_vta"}
    assert names(ProfilableWorld) == {"rssm"}
