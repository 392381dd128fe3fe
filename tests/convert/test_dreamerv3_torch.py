"""Import of encoders of dreamerv3-torch."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from reverie.agents.bc.agent import BC, BCConfig
from reverie.agents.bc.head import BCHeadConfig
from reverie.agents.options import BuildOptions
from reverie.api import UserError
from reverie.capabilities import KeyStatistics
from reverie.convert.dreamerv3_torch.checkpoint import read_encoder, read_weights
from reverie.convert.dreamerv3_torch.sizes import infer_encoder
from reverie.nets.blocks import initialize
from reverie.nets.dreamerv3_torch.encoder import DreamerV3TorchEncoder
from reverie.nets.encoder import NO_KEYS, EncoderConfig
from reverie.run.config import resolve
from reverie.spaces import Space

ACTION = {"action": Space(np.float32, (2,), -1, 1)}
SPACES = {
    "image": Space(np.uint8, (16, 16, 3)),
    "b": Space(np.float32, (3,)),
    "a": Space(np.float32, (2,)),
}
CPU = torch.device("cpu")
FROZEN = {"run": "latest.pt", "enc_architecture": "dreamerv3_torch"}
SIZES = EncoderConfig(
    depth=4, mults=(1, 2), kernel=4, layers=2, units=6, norm="layer1em3"
)
"""Sizes of `original_state`."""


def original_state(prefix="_wm."):
    """Return a state of dreamerv3-torch: two convolutions, two layers for vectors."""
    g = torch.Generator().manual_seed(0)
    cnn, mlp = f"{prefix}encoder._cnn.layers", f"{prefix}encoder._mlp.layers"
    return {
        f"{cnn}.0.weight": torch.randn(4, 3, 4, 4, generator=g),
        f"{cnn}.1.norm.weight": torch.rand(4, generator=g),
        f"{cnn}.1.norm.bias": torch.rand(4, generator=g),
        f"{cnn}.3.weight": torch.randn(8, 4, 4, 4, generator=g),
        f"{cnn}.4.norm.weight": torch.rand(8, generator=g),
        f"{cnn}.4.norm.bias": torch.rand(8, generator=g),
        f"{mlp}.Encoder_linear0.weight": torch.randn(6, 5, generator=g),
        f"{mlp}.Encoder_norm0.weight": torch.rand(6, generator=g),
        f"{mlp}.Encoder_norm0.bias": torch.rand(6, generator=g),
        f"{mlp}.Encoder_linear1.weight": torch.randn(6, 6, generator=g),
        f"{mlp}.Encoder_norm1.weight": torch.rand(6, generator=g),
        f"{mlp}.Encoder_norm1.bias": torch.rand(6, generator=g),
        f"{prefix}dynamics.W": torch.zeros(1, 3),
        "_task_behavior.actor.x": torch.zeros(2),
    }


def save(path, prefix="_wm."):
    torch.save(
        {"agent_state_dict": original_state(prefix), "optims_state_dict": {}}, path
    )
    return path


def observe(rows=3):
    rng = np.random.default_rng(0)
    found = {
        "image": rng.integers(0, 256, (rows, 1, 16, 16, 3), np.uint8),
        "a": rng.normal(size=(rows, 1, 2)).astype(np.float32),
        "b": 10 * rng.normal(size=(rows, 1, 3)).astype(np.float32),
    }
    return {key: torch.as_tensor(value) for key, value in found.items()}


def expected_features(obs, order):
    """Compute the features directly; even sides are padded by one pixel."""
    state = original_state()
    weights = [v for k, v in state.items() if ".encoder." in k]
    x = (obs["image"][:, 0] / 255 - 0.5).permute(0, 3, 1, 2)
    for i in (0, 3):
        x = F.conv2d(F.pad(x, (1, 1, 1, 1)), weights[i], stride=2).permute(0, 2, 3, 1)
        x = F.layer_norm(x, x.shape[-1:], *weights[i + 1 : i + 3], eps=1e-3)
        x = F.silu(x).permute(0, 3, 1, 2)
    y = torch.cat([obs[key][:, 0] for key in order], -1)
    y = y.sign() * torch.log1p(y.abs())
    for i in (6, 9):
        y = F.layer_norm(y @ weights[i].T, (6,), *weights[i + 1 : i + 3], eps=1e-3)
        y = F.silu(y)
    return torch.cat([x.flatten(1), y], -1)


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_features_match_a_direct_computation(tmp_path, order):
    weights = read_encoder(save(tmp_path / "latest.pt"))
    encoder = DreamerV3TorchEncoder(SPACES, SIZES, ("image", *order))
    encoder.load_state_dict(weights)
    features = encoder(observe(), torch.float32)[:, 0]
    torch.testing.assert_close(features, expected_features(observe(), order))
    assert encoder.width == features.shape[-1] == 4 * 4 * 8 + 6


def test_compiled_and_plain_models_give_the_same_encoder(tmp_path):
    plain = read_encoder(save(tmp_path / "plain.pt"))
    compiled = read_encoder(save(tmp_path / "compiled.pt", "_wm._orig_mod."))
    assert plain.keys() == compiled.keys()
    assert all(torch.equal(plain[key], compiled[key]) for key in plain)


@pytest.mark.parametrize(
    ("side", "image", "both"), [(64, 4096, 5120), (78, 6400, 7424), (84, 9216, 10240)]
)
def test_default_sizes_match_the_original(side, image, both):
    spaces = {"image": Space(np.uint8, (side, side, 3))}
    sizes = resolve(["dreamerv3_torch"]).dreamer.enc
    assert DreamerV3TorchEncoder(spaces, sizes).width == image
    spaces["a"] = Space(np.float32, (2,))
    assert DreamerV3TorchEncoder(spaces, sizes).width == both


def test_a_policy_uses_the_frozen_encoder(tmp_path):
    weights = read_encoder(save(tmp_path / "latest.pt"))
    head = BCHeadConfig(layers=1, units=8)
    config = BCConfig(**FROZEN, enc=SIZES, head=head)
    agent = BC(SPACES, ACTION, config, BuildOptions(CPU))
    agent.load_base({"encoder": weights})
    assert agent.feature_extractor.keys == ["image", "a", "b"]
    assert not any(name.startswith("feature_extractor") for name in agent.opt.names)
    _, action, _ = agent.policy(
        agent.initial(3),
        {
            **{k: v[:, 0].numpy() for k, v in observe().items()},
            "is_first": np.ones(3, bool),
        },
        "eval",
    )
    assert action["action"].shape == (3, 2)
    wide = BCConfig(
        **FROZEN,
        enc=replace(SIZES, depth=8),
        head=head,
    )
    with pytest.raises(UserError, match="encoder"):
        BC(SPACES, ACTION, wide, BuildOptions(CPU)).load_base({"encoder": weights})


def test_other_files_and_pickled_code_are_errors(tmp_path):
    torch.save({"weights": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(UserError, match="not a checkpoint of dreamerv3-torch"):
        read_encoder(tmp_path / "other.pt")
    for other in ([1], {0: torch.zeros(2)}):
        torch.save(other, tmp_path / "other.pt")
        with pytest.raises(UserError, match="not a checkpoint of dreamerv3-torch"):
            read_encoder(tmp_path / "other.pt")
    torch.save({"agent_state_dict": print}, tmp_path / "malicious.pt")
    with pytest.raises(UserError):
        read_encoder(tmp_path / "malicious.pt")


def test_images_are_stacked_in_the_given_order():
    pixels = {k: torch.randint(0, 256, (2, 1, 16, 16, 3)) for k in ("left", "right")}
    spaces = {key: Space(np.uint8, (16, 16, 3)) for key in pixels}
    config = SIZES
    several = DreamerV3TorchEncoder(spaces, config, ("right", "left"))
    initialize(several, torch.Generator().manual_seed(0))
    stacked = {"image": Space(np.uint8, (16, 16, 6))}
    single = DreamerV3TorchEncoder(stacked, config)
    single.load_state_dict(several.state_dict())
    together = {"image": torch.cat([pixels["right"], pixels["left"]], -1)}
    torch.testing.assert_close(
        several(pixels, torch.float32), single(together, torch.float32)
    )
    assert several.keys == ["right", "left"]
    assert DreamerV3TorchEncoder(spaces, config).keys == ["left", "right"]


def test_images_of_different_sizes_are_an_error():
    spaces = {key: Space(np.uint8, (16, 16, 3)) for key in ("left", "right")}
    assert DreamerV3TorchEncoder(spaces, SIZES).convs[0].weight.shape[1] == 6
    spaces["right"] = Space(np.uint8, (32, 32, 3))
    with pytest.raises(UserError, match="different sizes"):
        DreamerV3TorchEncoder(spaces, SIZES)


def test_sizes_of_the_encoder_are_inferred(tmp_path):
    assert infer_encoder(read_weights(save(tmp_path / "latest.pt"))) == SIZES
    state = {k: v for k, v in original_state().items() if "_cnn" not in k}
    torch.save({"agent_state_dict": state}, tmp_path / "vectors.pt")
    sizes = infer_encoder(read_weights(tmp_path / "vectors.pt"))
    assert sizes.cnn_keys == NO_KEYS


def test_images_are_standardized_with_given_statistics(tmp_path):
    weights = read_encoder(save(tmp_path / "latest.pt"))
    sizes = replace(SIZES, standard="dataset")
    config = BCConfig(**FROZEN, enc=sizes)
    agent = BC(SPACES, ACTION, config, BuildOptions(CPU))
    agent.load_base({"encoder": weights})
    assert agent.needs_statistics
    rng = np.random.default_rng(1)
    mean, std = rng.random((2, 16, 16, 3))
    zeros = np.zeros(2)
    agent.set_statistics(
        {
            "image": KeyStatistics(mean, std, mean, mean),
            "action": KeyStatistics(zeros, zeros, zeros, zeros),
        }
    )
    obs = observe()
    image = (obs["image"] / 255 - torch.tensor(mean)) / torch.tensor(std).clamp(1e-3)
    shifted = 255 * (image.float() + 0.5)  # so that shifting gives the same input
    features = agent.feature_extractor.encoder(obs, torch.float32)[:, 0]
    expected = expected_features({**obs, "image": shifted}, ("a", "b"))
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", [("image", "a", "b"), ("image", "b", "a")])
def test_an_order_that_is_not_alphabetical_is_reported(tmp_path, order):
    weights = read_encoder(save(tmp_path / "latest.pt"))
    config = BCConfig(**FROZEN, enc=SIZES, keys=order)
    agent = BC(SPACES, ACTION, config, BuildOptions(CPU))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        agent.load_base({"encoder": weights})
    messages = [str(warning.message) for warning in found]
    assert any("b, a" in message for message in messages) == (order[1] == "b")
