"""Whole checkpoints of dreamerv3-torch: settings, evaluation, further training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from dreamerv3_torch_networks import make_options, make_state, with_copies
from dreamerv3_torch_reference import make_optimizers

import reverie
from reverie.api import UserError
from reverie.capabilities import KeyStatistics
from reverie.cli import main as cli
from reverie.convert.dreamerv3_torch.sizes import infer_settings
from reverie.datasets.episode_format import from_steps
from reverie.datasets.readers.npz import write_npz_episode
from reverie.datasets.statistics import save_statistics
from reverie.run import checkpoint
from reverie.run.config import resolve
from reverie.run.load import open_run
from reverie.run.offline.train import offline
from reverie.run.train import train
from reverie.spaces import Space
from reverie.storage.run_spaces import RunSpaces

LRS = (1e-4, 3e-5, 3e-5)
ACTIONS = {"action": Space(np.dtype(np.int32), (), 0, 3)}
SIZES = ["--dreamer.dreamerv3_torch.stoch", "4"]
"""Flags with the number of categorical variables, which cannot be inferred. Each has
three classes."""
QUICK = {"run.steps": 40, "run.envs": 2, "device": "cpu", "logger.outputs": "jsonl"}
QUICK |= {"dreamer.batch_size": 2, "dreamer.batch_length": 8, "run.train_ratio": 16}
QUICK |= {"dreamer.report_length": 4, "dreamer.imag_length": 3}


@pytest.fixture(scope="module")
def state():
    """An agent for `catch` with its 12 x 12 images of three channels."""
    return make_state(make_options(), {"image": (12, 12, 3)}, actions=3)


@pytest.fixture(scope="module", params=["plain", "compiled"])
def latest(request, state, tmp_path_factory):
    compiled = request.param == "compiled"
    path = tmp_path_factory.mktemp(request.param) / "latest.pt"
    content = {
        "agent_state_dict": with_copies(state, compiled),
        "optims_state_dict": make_optimizers(state, LRS, compiled=compiled),
    }
    torch.save(content, path)
    return path


def config_of(latest, *words):
    flags = [("run.from_checkpoint", str(latest)), ("task", "catch"), *words]
    return resolve(flags=flags)


def test_learning_rates_are_those_of_the_optimizers(state, tmp_path):
    optimizers = make_optimizers(state, (2e-4, 5e-5, 6e-5))
    optimizers["_wm._model_opt._opt"]["param_groups"][0]["eps"] = 1e-7
    path = tmp_path / "latest.pt"
    content = {"agent_state_dict": state, "optims_state_dict": optimizers}
    torch.save(content, path)
    stoch = ("dreamer.dreamerv3_torch.stoch", 4)
    dreamer = config_of(path, stoch).dreamer
    parts = (dreamer.world_opt, dreamer.actor_opt, dreamer.critic_opt)
    assert [part.lr for part in parts] == [2e-4, 5e-5, 6e-5]
    assert [part.eps for part in parts] == [1e-7, 1e-5, 1e-5]
    given = config_of(path, stoch, ("dreamer.actor_opt.lr", 1e-4)).dreamer
    assert (given.actor_opt.lr, given.critic_opt.lr) == (1e-4, 6e-5)


def test_sizes_are_inferred(latest):
    dreamer = config_of(latest, ("dreamer.dreamerv3_torch.stoch", 4)).dreamer
    world = dreamer.dreamerv3_torch
    assert (dreamer.world, dreamer.actor_critic) == ("dreamerv3_torch",) * 2
    assert (world.deter, world.hidden, world.stoch, world.classes) == (16, 8, 4, 3)
    assert (dreamer.enc.depth, dreamer.enc.mults, dreamer.enc.kernel) == (4, (1, 2), 4)
    assert dreamer.dec.depth, dreamer.dec.mults == (4, (1, 2))
    for head in (dreamer.rewhead, dreamer.conhead, dreamer.policy, dreamer.value):
        assert (head.layers, head.units, head.norm) == (2, 8, "layer1em3")


@pytest.mark.parametrize("order", [["b", "c"], ["c", "b"]])
def test_an_order_of_keys_that_is_not_sorted_is_inferred(order):
    shapes = {"a": (2,), "b": (3,), "c": (4,)}
    options = make_options(decoder={"mlp_keys": "b|c"})
    state = make_state(options, shapes, actions=2)
    layer = "_wm.heads.decoder._mlp.mean_layer"
    outputs = {k: v for k, v in state.items() if k.startswith(layer)}
    rest = {k: v for k, v in state.items() if k not in outputs}
    for key in order:
        rest |= {k: v for k, v in outputs.items() if k.startswith(f"{layer}.{key}.")}
    inferred = infer_settings(rest, stoch=4).get("dreamer.dreamerv3_torch.key_order")
    assert inferred == (None if order == ["b", "c"] else order)


def test_what_cannot_be_inferred_is_asked_for(latest, capsys):
    assert cli.main(["eval", str(latest), "--task", "catch"]) == 2
    message = capsys.readouterr().err
    assert "12 entries" in message
    assert "dyn_stoch and dyn_discrete" in message
    words = message.partition("for example ")[2].split()
    assert cli.main(["eval", str(latest), *SIZES, "--episodes", "1"]) == 2
    assert "--task" in capsys.readouterr().err
    run = ["eval", str(latest), "--task", "catch", "--episodes", "2"]
    assert cli.main([*run, *words]) == 0  # the example has the right product
    assert cli.main([*run, "--dreamer.dreamerv3_torch.stoch", "5"]) == 2


def test_a_checkpoint_is_evaluated(latest, capsys):
    run = ["eval", str(latest), "--task", "catch", "--episodes", "3", *SIZES]
    assert cli.main(run) == 0
    assert "3 episodes" in capsys.readouterr().out
    result = json.loads((latest.parent / "eval.json").read_text())
    assert result["checkpoint"] == "latest.pt"
    assert cli.main([*run, "--configs", "catch", "dreamerv3_torch"]) == 0


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_its_config_gives_the_other_sizes(latest, tmp_path, form):
    options = {"dyn_stoch": 4, "dyn_discrete": 3, "unimix_ratio": 0.02}
    if form == "json":
        name = str(tmp_path / "config.json")
        Path(name).write_text(json.dumps({"dyn_deter": 512, **options}))
    else:
        path = tmp_path / "configs.yaml"
        presets = {"defaults": {"dyn_deter": 512, "dyn_stoch": 32}, "small": options}
        path.write_text(yaml.safe_dump(presets))
        name = f"{path}:small"
        with pytest.raises(UserError, match="no preset 'large'"):
            resolve(files=[f"{path}:large"])
    flags = [("run.from_checkpoint", str(latest)), ("task", "catch")]
    world = resolve(files=[name], flags=flags).dreamer.dreamerv3_torch
    assert (world.deter, world.stoch, world.classes) == (16, 4, 3)
    assert world.unimix == 0.02
    words = ["--task", "catch", "--episodes", "1", "--config", name]
    assert cli.main(["eval", str(latest), *words]) == 0


def test_python_plays_a_checkpoint(latest):
    settings = {"dreamer__dreamerv3_torch__stoch": 4, "task": "catch"}
    result = reverie.evaluate(latest, episodes=2, **settings)
    assert -1 <= result.summary["score"] <= 1


@pytest.mark.extended_except("compiled")
def test_training_continues_with_weights_and_optimizers(latest, state, tmp_path):
    flags = {**QUICK, "dreamer.dreamerv3_torch.stoch": 4, "logdir": str(tmp_path)}
    flags |= {"run.from_checkpoint": str(latest), "task": "catch", "run.steps": 4}
    path = train(resolve(flags=list(flags.items())))
    run = open_run(path)
    saved = checkpoint.read_part(run.checkpoint, "agent")
    weight = saved["dyn"]["gru.weight"]
    assert torch.equal(weight, state["_wm.dynamics._cell.layers.GRU_linear.weight"])
    assert float(saved["opt"]["world"]["step"]) == 5
    assert float(saved["retnorm"]["hi"]) == pytest.approx(1.9)
    flags |= {"logdir": str(tmp_path / "longer"), "run.steps": 40}
    longer = open_run(train(resolve(flags=list(flags.items()))))
    saved = checkpoint.read_part(longer.checkpoint, "agent")
    assert float(saved["opt"]["world"]["step"]) > 5
    assert float(saved["opt"]["actor"]["step"]) > 5


@pytest.fixture
def standardized(tmp_path) -> str:
    """A config of the fork whose images are standardized."""
    path = tmp_path / "configs.yaml"
    options = {"dyn_deter": 16, "dyn_stoch": 4, "dyn_discrete": 3}
    options |= {"image_standardize": True, "image_standardize_dataset": True}
    path.write_text(yaml.safe_dump({"defaults": {**options, "image_std_min": 1e-2}}))
    return str(path)


def test_statistics_of_standardized_images_are_asked_for(latest, standardized, capsys):
    words = ["--task", "catch", "--config", standardized]
    assert cli.main(["eval", str(latest), *words]) == 2
    assert "--offline.stats" in capsys.readouterr().err
    logdir = str(latest.parent / "online")
    start = ["--run.from_checkpoint", str(latest), "--logdir", logdir]
    assert cli.main(["train", *words, *start]) == 2
    assert "dataset statistics" in capsys.readouterr().err
    assert not Path(logdir).exists()


def test_statistics_of_standardized_images_are_given(
    state, standardized, tmp_path, capsys
):
    latest, file = tmp_path / "latest.pt", tmp_path / "stats.npz"
    torch.save({"agent_state_dict": state}, latest)
    mean, std = np.random.default_rng(0).random((2, 12, 12, 3))
    save_statistics(file, {"image": KeyStatistics(mean, std, mean, mean)})
    words = ["--task", "catch", "--config", standardized, "--offline.stats", str(file)]
    assert cli.main(["eval", str(latest), "--episodes", "1", *words]) == 0
    assert "pixels / 255" not in capsys.readouterr().err
    flags = [("task", "catch"), ("device", "cpu"), ("offline.stats", str(file))]
    agent = open_run(latest, flags, files=[standardized]).load_agent(
        RunSpaces({"image": Space(np.uint8, (12, 12, 3))}, ACTIONS)
    )
    encoder = agent.state_dict()["enc"]
    (name,) = (k for k in encoder if k.startswith("standard") and k.endswith("mean"))
    np.testing.assert_allclose(encoder[name], mean, rtol=1e-6)
    save_statistics(file, {"vector": KeyStatistics(mean, std, mean, mean)})
    assert cli.main(["eval", str(latest), *words]) == 2
    assert "no statistics for 'image'" in capsys.readouterr().err
    unused = ["--task", "catch", *SIZES, "--offline.stats", str(file)]
    assert cli.main(["eval", str(latest), *unused]) == 2
    assert "--offline.stats has no effect" in capsys.readouterr().err


def test_the_preprocessing_of_images_is_stated(state, tmp_path, capsys):
    torch.save({"agent_state_dict": state}, tmp_path / "latest.pt")
    words = ["eval", str(tmp_path / "latest.pt"), "--task", "catch", *SIZES]
    assert cli.main([*words, "--episodes", "1"]) == 0
    note = capsys.readouterr().err
    assert "pixels / 255 - 0.5" in note
    assert "image_standardize" in note


def test_statistics_of_standardized_images_are_those_of_the_data(
    latest, standardized, tmp_path
):
    rng = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for number in range(3):
        image = rng.integers(0, 255, (6, 12, 12, 3), np.uint8)
        action, zeros = rng.integers(0, 3, 5), np.zeros(5, np.float32)
        episode = from_steps({"image": image}, {"action": action}, zeros, zeros)
        write_npz_episode(tmp_path / "data", str(number), episode, ACTIONS)
    flags = {k: v for k, v in QUICK.items() if k not in ("run.envs", "run.train_ratio")}
    flags |= {"offline.data": str(tmp_path / "data"), "logdir": str(tmp_path / "run")}
    flags |= {"run.from_checkpoint": str(latest), "run.steps": 1}
    flags |= {"dreamer.batch_length": 4, "run.report_every": 0}
    config = resolve(["offline"], [standardized], flags)
    assert config.dreamer.dec.standard == "dataset"
    assert config.dreamer.dec.minstd == 0.01
    path = checkpoint.find_checkpoint(offline(config))
    encoder = checkpoint.read_part(path, "agent")["enc"]
    (name,) = (k for k in encoder if k.startswith("standard") and k.endswith("mean"))
    assert encoder[name].mean() == pytest.approx(0.5, abs=0.05)
