"""Recurrent VTA, the VTA world for Dreamer."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from reverie.agents.open_loop import open_loop_videos
from reverie.evaluation.episodes import evaluate
from reverie.nets.blocks import initialize
from reverie.nets.decoder import DecoderConfig
from reverie.nets.encoder import EncoderConfig
from reverie.nets.heads import HeadConfig
from reverie.nets.rng import Rng
from reverie.render.open_loop import (
    BOUNDARY_COLOR,
    INSIDE_COLOR,
    LABELS,
    MARKER,
    TITLE,
)
from reverie.run.config import resolve
from reverie.run.train import train
from reverie.spaces import Space
from reverie.worlds.latent import WorldNetworksConfig
from reverie.worlds.vta.config import RecurrentVTAConfig
from reverie.worlds.vta.dynamics import RecurrentVTAState
from reverie.worlds.vta.recurrent import RecurrentVTA

OBS = {
    "image": Space(np.uint8, (8, 8, 3), 0, 256),
    "reward": Space(np.float32),
    **{key: Space(bool) for key in ("is_first", "is_last", "is_terminal")},
}
ACT = {"action": Space(np.int32, (), 0, 3)}
SIZES = {
    "abs_belief": 8,
    "abs_stoch": 3,
    "obs_belief": 8,
    "obs_stoch": 4,
    "hidden": 6,
}
B, T = 2, 6


def make_world(dtype=torch.float32, **settings) -> RecurrentVTA:
    networks = WorldNetworksConfig(
        enc=EncoderConfig(depth=2, mults=(2,), units=6, layers=1, kernel=3),
        dec=DecoderConfig(depth=2, mults=(2,), units=6, layers=1, kernel=3, bspace=0),
        rewhead=HeadConfig(1, units=6, bins=5),
        conhead=HeadConfig(1, units=6, output="binary"),
        discount=0.99,
        reward_grad=True,
    )
    config = RecurrentVTAConfig(**{**SIZES, **settings})
    world = RecurrentVTA(OBS, ACT, config, networks, dtype)
    initialize(world, torch.Generator().manual_seed(0))
    return world


def make_batch(length=T):
    rng = np.random.default_rng(0)
    batch = {
        "image": torch.tensor(rng.integers(0, 256, (B, length, 8, 8, 3), np.uint8)),
        "reward": torch.tensor(rng.standard_normal((B, length)).astype(np.float32)),
        "prevact": {
            "action": torch.tensor(rng.integers(0, 3, (B, length)), dtype=torch.int32)
        },
    }
    for key in ("is_first", "is_last", "is_terminal"):
        batch[key] = torch.zeros(B, length, dtype=torch.bool)
    return batch


def rng() -> Rng:
    return Rng(0, "test", torch.device("cpu"))


def policy(state):
    return {"action": torch.zeros(len(state.segment_length), dtype=torch.int32)}


def test_the_same_generator_gives_the_same_weights():
    one, two = make_world().state_dict(), make_world().state_dict()
    for key, value in one.items():
        assert torch.equal(value, two[key]), key


def test_extras_restore_the_state():
    world = make_world().eval()
    states = world.observe(world.initial(B), make_batch(), rng())
    extras = world.to_replay(states)
    assert extras.keys() == world.extras.keys()
    for key, space in world.extras.items():
        assert tuple(extras[key].shape[2:]) == space.shape
    for old, new in zip(states, world.from_replay(extras), strict=True):
        torch.testing.assert_close(old.detach(), new)


def test_single_observations_use_the_mode_of_the_prior_flag():
    world = make_world().train()
    batch = make_batch(1)
    start = world.initial(B)._replace(obs_belief=torch.randn(B, 8))
    logits = world.dyn.prior_flag(start)
    for _ in range(3):
        state = world.observe(start, batch, rng())
        expected = (logits[:, 0] >= logits[:, 1]).float()
        assert torch.equal(state.boundary[:, 0], expected)
    assert world.training


def test_only_a_training_loss_updates_batch_norm_statistics():
    world = make_world().train()
    before = [b.clone() for b in world.buffers()]
    world.observe(world.initial(B), make_batch(), rng())
    assert all(map(torch.equal, before, world.buffers()))
    world.loss(world.initial(B), make_batch(), rng())
    assert not all(map(torch.equal, before, world.buffers()))


def test_is_first_resets_the_state():
    world = make_world().eval()
    batch = make_batch()
    batch["is_first"][:, 3] = True
    logits = world.dyn.detector(world.enc(batch, torch.float32))

    def observe(start, rows):
        tokens = world.enc(batch, torch.float32)[:, rows]
        acts = {"action": batch["prevact"]["action"][:, rows]}
        first = batch["is_first"][:, rows]
        return world.dyn.observe(start, tokens, logits[:, rows], acts, first, rng())

    full = observe(world.initial(B), slice(0, 6))[1]
    part = observe(world.initial(B), slice(3, 6))[1]
    torch.testing.assert_close(full.prior_obs.mean[:, 3], part.prior_obs.mean[:, 0])
    torch.testing.assert_close(full.prior_flag[:, 3], part.prior_flag[:, 0])


def test_the_upper_level_is_copied_where_no_segment_begins():
    world = make_world().train()
    states = world.loss(world.initial(B), make_batch(40), rng()).states
    copied = states.boundary[:, 1:] == 0
    assert copied.any()
    assert not copied.all()
    for value in (states.abs_belief, states.abs_stoch):
        same = (value[:, 1:] == value[:, :-1]).all(-1)
        assert torch.equal(same, copied)
    assert (states.segment_length[states.boundary == 1] == 1).all()


def test_segments_respect_the_limits():
    world = make_world(max_segment=3, max_segments=4).train()
    states = world.imagine(world.initial(B), policy, 40, rng()).states
    assert states.segment_count.max() == 4
    before_limit = states.segment_count < 4
    assert states.segment_length[before_limit].max() <= 3
    assert states.segment_length.max() > 3  # no further segment may begin


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"imagination": "jumpy"}, [0, 1, 1, 1, 1, 1]),
        ({"imagined_boundaries": "none"}, [0, 0, 0, 0, 0, 0]),
        ({"imagined_boundaries": "fixed", "max_segment": 3}, [0, 0, 0, 1, 0, 1]),
    ],
)
def test_imagined_boundaries(settings, expected):
    world = make_world(**settings)
    states = world.imagine(world.initial(B), policy, 5, rng()).states
    assert states.boundary[0].tolist() == expected
    assert world.boundaries(states)[0].tolist() == [bool(x) for x in expected]


def test_losses_are_named_finite_and_per_row():
    world = make_world(boundary_rate=0.1, reward_to_detector=True).train()
    result = world.loss(world.initial(B), make_batch(), rng())
    assert result.losses.keys() == {
        "image",
        "rew",
        "con",
        "dyn",
        "rep",
        "boundary",
        "boundary_rate",
    }
    for key, loss in result.losses.items():
        assert loss.shape == (B, T), key
        assert torch.isfinite(loss).all(), key
    total = sum(loss.mean() for loss in result.losses.values())
    total.backward()
    assert float(world.dyn.detector.out.weight.grad.abs().sum()) > 0
    for name, parameter in world.named_parameters():
        assert parameter.grad is not None or not parameter.requires_grad, name


def test_bfloat16_keeps_counters_exact_and_losses_close():
    with torch.backends.mkldnn.flags(enabled=False):  # see run/device.py
        worlds = [make_world(dtype) for dtype in (torch.float32, torch.bfloat16)]
        for world in worlds:
            world.eval()
        one, two = (w.loss(w.initial(B), make_batch(), rng()) for w in worlds)
    assert two.states.obs_belief.dtype == torch.bfloat16
    assert two.states.segment_length.dtype == torch.float32
    for key, loss in one.losses.items():
        torch.testing.assert_close(two.losses[key], loss, atol=0.05, rtol=0.05)
    extras = worlds[1].to_replay(two.states)
    back = worlds[1].from_replay(extras)
    assert [x.dtype for x in back] == [x.dtype for x in two.states]


def test_report_videos_mark_segment_boundaries():
    world = make_world().eval()
    video = open_loop_videos(world, world.initial(B), make_batch(), rng())[
        "openloop/image"
    ]
    marks = {INSIDE_COLOR, BOUNDARY_COLOR}
    row = TITLE + MARKER + 2 + 8 * 6  # below the enlarged true frames
    columns = {tuple(frame[row + 1, LABELS]) for frame in video}
    assert columns <= marks
    assert columns


@pytest.mark.parametrize(
    "settings",
    [{"hidden": 0}, {"temperature": 0.0}, {"boundary_rate": 1.0}, {"layers": -1}],
)
def test_invalid_configs_are_refused(settings):
    with pytest.raises(ValueError, match="must be"):
        RecurrentVTAConfig(**settings)


def test_features_concatenate_both_levels():
    world = make_world()
    state = RecurrentVTAState(
        *(torch.full_like(x, i) for i, x in enumerate(world.initial(1)))
    )
    values = [0.0] * 8 + [1.0] * 3 + [2.0] * 8 + [3.0] * 4
    assert world.features(state)[0].tolist() == values
    assert world.width == len(values)


def test_dreamer_trains_with_recurrent_vta(tmp_path):
    flags = {
        "logdir": str(tmp_path / "run"),
        "device": "cpu",
        "logger.outputs": "jsonl",
        "run.steps": 160,
        "run.clock": "steps",
        "run.log_every": 80,
        "run.report_every": 0,
        "run.save_every": 160,
        "dreamer.vta.max_segment": 3,
    }
    path = train(resolve(["catch", "vta_tiny"], flags=flags))
    rows = [json.loads(x) for x in (path / "metrics.jsonl").read_text().splitlines()]
    assert any(0 < row.get("train/boundary_ratio", 0) < 1 for row in rows)
    assert any("train/loss/boundary" in row for row in rows)
    assert np.isfinite(evaluate(path, 2).summary["score"])


@pytest.mark.parametrize(
    "name", ["temperature", "min_std", "boundary_rate", "free_nats"]
)
def test_nan_in_configs_is_refused(name):
    with pytest.raises(ValueError, match=name):
        RecurrentVTAConfig(**{name: float("nan")})
