"""Offline training and behavior cloning with checkpoints of dreamerv3-torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dreamerv3_torch_networks import make_options, make_state, with_copies
from dreamerv3_torch_reference import make_optimizers
from offline_helpers import SIDE, agent_state, settings

from reverie.api import UserError
from reverie.cli.train import command_config
from reverie.datasets.episodes import open_episodes
from reverie.evaluation.episodes import evaluate
from reverie.run.offline.train import offline

SIZES = {"dreamer.dreamerv3_torch.stoch": 4}
SIZES |= {f"dreamer.{net}.depth": 4 for net in ("enc", "dec")}
SIZES |= {f"dreamer.{net}.mults": (1, 2) for net in ("enc", "dec")}
"""The number of variables, and the sizes of images, which the other flags change."""
GRU = "_wm.dynamics._cell.layers.GRU_linear.weight"


@pytest.fixture
def state(data):
    reader = open_episodes(data)
    (action,) = reader.act_space.values()
    proprio = reader.obs_space["proprio"].shape[0]
    conv = {"minres": SIDE // 4}
    actor = {"dist": "normal", "std": "learned"}
    options = make_options(size=[SIDE] * 2, encoder=conv, decoder=conv, actor=actor)
    shapes = {"image": (SIDE, SIDE, 3), "proprio": (proprio,)}
    return make_state(options, shapes, int(np.prod(action.shape)))


@pytest.fixture
def latest(state, tmp_path):
    content = {
        "agent_state_dict": with_copies(state),
        "optims_state_dict": make_optimizers(state, (1e-4, 3e-5, 3e-5)),
    }
    torch.save(content, tmp_path / "latest.pt")
    return tmp_path / "latest.pt"


def test_world_model_training_continues(data, state, latest, tmp_path):
    flags = {"run.from_checkpoint": str(latest), "run.steps": 1, **SIZES}
    run = offline(settings(data, tmp_path / "run", **flags))
    saved = agent_state(run)
    assert float(saved["opt"]["world"]["step"]) == 6
    assert not torch.equal(saved["dyn"]["gru.weight"], state[GRU])
    torch.testing.assert_close(
        saved["dyn"]["gru.weight"], state[GRU], rtol=0, atol=1e-3
    )
    assert torch.equal(
        saved["pol"]["mlp.layers.0.weight"],
        state["_task_behavior.actor.layers.Actor_linear0.weight"],
    )


@pytest.mark.parametrize("features", ["encoder", "state"])
def test_a_clone_uses_the_frozen_world_model(data, state, latest, tmp_path, features):
    flags = {"bc.run": str(latest), "run.steps": 2, "bc.features": features}
    flags |= {"bc.dreamerv3_torch.images": "shift", "bc.length": 4}
    if features == "state":  # the encoder needs no sizes of the world model
        flags |= SIZES
    run = offline(settings(data, tmp_path / "run", "bc", **flags))
    saved = agent_state(run)["feature_extractor"]
    conv = state["_wm.encoder._cnn.layers.0.weight"]
    name = "world.enc" if features == "state" else "encoder"
    assert torch.equal(saved[f"{name}.convs.0.weight"], conv)
    if features == "state":
        assert torch.equal(saved["world.dyn.gru.weight"], state[GRU])
    size = ("env.reach.size", (SIDE, SIDE))
    assert "success" in evaluate(run, 1, [("task", "reach"), size]).summary


def test_the_state_needs_images_that_are_not_standardized(data, latest, tmp_path):
    flags = {"bc.run": str(latest), "bc.features": "state", "bc.length": 4, **SIZES}
    flags["bc.dreamerv3_torch.images"] = "standardize"
    with pytest.raises(UserError, match=r"--bc\.features encoder"):
        offline(settings(data, tmp_path / "run", "bc", **flags))


def test_sizes_that_cannot_be_inferred_may_be_flags_of_behavior_cloning(latest):
    words = ["--offline.data", "x", "--bc.run", str(latest), "--bc.length", "4"]
    words += ["--bc.dreamerv3_torch.images", "shift"]
    state, stoch = ["--bc.features", "state"], "--dreamer.dreamerv3_torch.stoch"
    with pytest.raises(UserError, match=f"for example {stoch}") as error:
        command_config("bc", [*words, *state])
    example = str(error.value).partition("for example ")[2].split()
    config = command_config("bc", [*words, *state, *example])
    world = config.dreamer.dreamerv3_torch
    assert world.stoch * world.classes == 12
    with pytest.raises(UserError, match=r"no effect.*\n  Fix: --bc\.opt\.lr 1"):
        command_config("bc", [*words, *state, *example, "--dreamer.opt.lr", "1"])
    with pytest.raises(UserError, match="no effect"):  # the encoder needs no sizes
        command_config("bc", [*words, *example])
