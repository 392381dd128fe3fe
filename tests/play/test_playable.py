"""Which runs can be played in which modes, and why others cannot."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from original_checkpoints import write_dreamerv3, write_iris

from reverie.api import UserError
from reverie.capabilities import HasWorldModelEnv
from reverie.cli.main import main
from reverie.play import load, server
from reverie.play.session import Session
from reverie.play.simulation import Simulation
from reverie.run.config import resolve
from reverie.run.offline.train import offline
from reverie.run.trust import allow

SMALL = {
    "device": "cpu",
    "logger.outputs": ["jsonl"],
    "run.steps": 2,
    "run.report_every": 0,
    "offline.epochs": 0,
    "bc.batch_size": 2,
    r"dreamer\.(enc|dec)\.mults": (1, 1),
    "dreamer.dec.depth": 8,
}


def available(loaded) -> set[str]:
    """Return the modes that are available."""
    return {mode for mode, reason in loaded.unavailable_reasons().items() if not reason}


def play(loaded, mode: str, steps: int = 2) -> Simulation:
    """Play some steps; the actions of a human are zero."""
    simulation = Simulation(loaded, seed=1)
    simulation.start(mode)
    zeros = {key: space.zeros() for key, space in loaded.act_space.items()}
    for _ in range(steps):
        if simulation.end_reason:
            simulation.start(mode)
        simulation.step(lambda: zeros)
    return simulation


def train_offline(run_folder, logdir, *presets: str, **flags):
    """Train on the replay of the small run of DreamerV3."""
    data = {"offline.data": str(run_folder("dreamer")), "logdir": str(logdir)}
    return offline(
        resolve(["debug", "offline", *presets], flags={**SMALL, **data, **flags})
    )


@pytest.mark.parametrize("loaded", ["dreamerv3_torch"], indirect=True)
@pytest.mark.parametrize("mode", load.MODES)
def test_the_world_model_of_dreamerv3_torch_is_played(loaded, mode):
    snapshot = play(loaded, mode).snapshot()
    assert snapshot.imagined["image"].shape == (1, *loaded.obs_space["image"].shape)
    assert {"predicted reward", "value", "entropy"} <= set(snapshot.scalars)
    if mode in (load.AGENT_ENV, load.HUMAN_ENV, load.RECORDED):
        assert snapshot.scalars["KL"] >= 0


@pytest.mark.parametrize("loaded", ["vta"], indirect=True)
@pytest.mark.parametrize("mode", [load.AGENT_ENV, load.AGENT_MODEL])
def test_the_probability_of_a_segment_boundary_is_shown(loaded, mode):
    assert 0 <= play(loaded, mode).snapshot().scalars["boundary"] <= 1


@pytest.mark.parametrize("loaded", ["random"], indirect=True)
def test_an_agent_without_a_world_model_acts_in_the_environment(loaded):
    assert available(loaded) == {load.AGENT_ENV, load.HUMAN_ENV, load.RECORDED}
    for mode in (load.AGENT_MODEL, load.HUMAN_MODEL):
        assert (
            loaded.unavailable_reasons()[mode]
            == "the agent 'random' has no world model"
        )
    for mode in (load.AGENT_ENV, load.HUMAN_ENV, load.RECORDED):
        snapshot = play(loaded, mode).snapshot()
        assert snapshot.imagined is None
        assert snapshot.real is not None
    session = Session(loaded)
    assert session.describe()["max_rollouts"] == 0
    session._apply({"type": "mode", "mode": load.AGENT_ENV})
    session._apply({"type": "step"})
    assert [image.pane for image in session.view.images] == ["real"]


def test_a_behavior_cloned_agent_is_played_in_the_environment(run_folder, tmp_path):
    base = {"bc.run": str(run_folder("dreamer"))}
    clone = train_offline(run_folder, tmp_path / "clone", "bc", **base)
    without = load.load_run(clone)
    assert available(without) == {load.RECORDED}
    assert "without a simulator" in without.unavailable_reasons()[load.AGENT_ENV]
    loaded = load.load_run(clone, [("task", "catch")])
    assert available(loaded) == {load.AGENT_ENV, load.HUMAN_ENV, load.RECORDED}
    problems = loaded.unavailable_reasons()
    assert problems[load.AGENT_MODEL] == "the agent 'bc' has no world model"
    snapshot = play(loaded, load.AGENT_ENV).snapshot()
    assert snapshot.action["action"] in (0, 1, 2)
    assert snapshot.imagined is None
    loaded.close()


def test_rollouts_of_an_offline_world_model_start_from_recordings(run_folder, tmp_path):
    world = train_offline(run_folder, tmp_path / "world")
    loaded = load.load_run(world)
    assert loaded.env is None
    assert load.HUMAN_MODEL in available(loaded)
    for mode in (load.AGENT_ENV, load.HUMAN_ENV):
        assert "without a simulator" in loaded.unavailable_reasons()[mode]
    assert "no trained policy" in loaded.unavailable_reasons()[load.AGENT_MODEL]
    simulation = play(loaded, load.HUMAN_MODEL)
    snapshot = simulation.snapshot()
    assert snapshot.imagined["image"].shape == (1, *loaded.obs_space["image"].shape)
    assert snapshot.real is None
    with pytest.raises(UserError, match="Agent in the world model is not possible"):
        simulation.set_human(False)
    starts = []
    for seed in (1, 1, 2, 3):
        simulation.start(load.HUMAN_MODEL, seed)
        starts.append(simulation.rows[0]["image"])
    np.testing.assert_array_equal(starts[0], starts[1])
    assert any(not np.array_equal(starts[0], start) for start in starts[2:])
    assert play(loaded, load.RECORDED).snapshot().imagined is not None


def test_an_offline_agent_with_a_policy_acts_in_its_world_model(run_folder, tmp_path):
    flags = {"dreamer.behaviour": True}
    world = train_offline(run_folder, tmp_path / "world", **flags)
    loaded = load.load_run(world)
    assert available(loaded) == {load.AGENT_MODEL, load.HUMAN_MODEL, load.RECORDED}
    assert play(loaded, load.AGENT_MODEL).snapshot().action["action"] in (0, 1, 2)
    assert load.load_run(world, [("task", "catch")]).env is not None


@pytest.mark.parametrize(
    ("write", "task", "flags"),
    [
        (write_iris, "iris_env", [("iris.world_model.transformer.heads", 4)]),
        (write_dreamerv3, "dreamerv3_env", [("dreamer.rssm.stoch", 4)]),
    ],
)
def test_checkpoints_of_other_implementations_are_played(write, task, flags, tmp_path):
    path = write(tmp_path)
    name = f"original_checkpoints:{task}"
    with allow([name]):
        loaded = load.load_run(path, [("task", name), ("device", "cpu"), *flags])
    assert available(loaded) == {
        load.AGENT_ENV,
        load.HUMAN_ENV,
        load.AGENT_MODEL,
        load.HUMAN_MODEL,
    }
    assert (
        loaded.unavailable_reasons()[load.RECORDED]
        == "the run has no recorded episodes"
    )
    for mode in (load.AGENT_ENV, load.HUMAN_MODEL, load.AGENT_MODEL):
        snapshot = play(loaded, mode).snapshot()
        assert snapshot.imagined["image"].shape[1:] == loaded.obs_space["image"].shape
    loaded.close()


PLUGIN = """
from reverie.agents.random import RandomAgent, RandomConfig


class Planner(RandomAgent):
    Config = RandomConfig
"""


@pytest.fixture
def served(monkeypatch):
    """Collects the servers that would be started."""
    calls = []
    monkeypatch.setattr(server, "serve", lambda *a, **k: calls.append(a))
    return calls


def test_a_plugin_is_played_if_its_code_is_trusted(
    tmp_path, monkeypatch, served, capsys
):
    (tmp_path / "play_planner.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--agent", "play_planner:Planner", "--task", "catch", "--device", "cpu"]
    words += ["--run.steps", "20", "--logger.outputs", "jsonl"]
    assert main(["train", "--logdir", str(tmp_path / "own"), *words]) == 0
    assert main(["play", str(tmp_path / "own"), "--no-open"]) == 0
    assert len(served) == 1
    other = tmp_path / "other"
    (tmp_path / "own").rename(other)
    (other / "run_id").unlink()  # as if another user had made it
    capsys.readouterr()
    assert main(["play", str(other), "--no-open"]) == 2
    assert "--trust" in capsys.readouterr().err
    assert len(served) == 1
    assert main(["play", str(other), "--no-open", "--trust"]) == 0
    assert len(served) == 2


@pytest.mark.parametrize("loaded", ["two groups"], indirect=True)
def test_every_entry_of_a_multi_discrete_action_has_its_own_keys(loaded):
    controls = loaded.controls
    assert [len(control.value_names) for control in controls] == [3, 4]
    session = Session(loaded, load.HUMAN_ENV)
    session._apply({"type": "mode", "mode": load.HUMAN_ENV})
    held = [controls[0].key_combinations[2][0], controls[1].key_combinations[3][0]]
    session._apply({"type": "keys", "held": held})
    session._apply({"type": "step"})
    data = session.view.data
    assert (data["action"], data["chosen"]) == ("2 3", [2, 3])
    assert data["vectors"]["real"] == [2.0, 3.0]
    assert [len(probs) for probs in data["probs"]] == [3, 4]


@pytest.mark.parametrize("loaded", ["sliders"], indirect=True)
def test_sliders_set_continuous_actions_of_a_session(loaded):
    assert [(c.low, c.high) for c in loaded.controls] == [(-1.0, 1.0)] * 2
    session = Session(loaded, load.HUMAN_ENV)
    session._apply({"type": "mode", "mode": load.HUMAN_ENV})
    session._apply({"type": "slider", "number": 1, "value": 0.5, "timestamp": 2.0})
    session._apply({"type": "step"})
    data = session.view.data
    assert data["action"] == "0.00 0.50"
    assert data["vectors"]["real"] == [0.0, 1.0]
    assert data["timestamp"] == 2.0
    session._apply({"type": "slider", "number": 7, "value": 0.5})
    session._apply({"type": "step"})
    assert session.view.data["action"] == "0.00 0.50"


def test_a_policy_in_units_of_the_environment_declares_its_world_model(
    run_folder, tmp_path
):
    """Since Python 3.12, `isinstance` does not call `__getattr__`."""
    flags = {"dreamer.behaviour": True, "task": "catch"}
    world = load.load_run(train_offline(run_folder, tmp_path / "world", **flags))
    assert isinstance(world.policy, HasWorldModelEnv)
    inspect.getattr_static(world.policy, "world_model_env")
    base = {"bc.run": str(run_folder("dreamer")), "task": "catch"}
    clone = load.load_run(train_offline(run_folder, tmp_path / "clone", "bc", **base))
    assert not isinstance(clone.policy, HasWorldModelEnv)
    for loaded in (world, clone):
        loaded.close()
