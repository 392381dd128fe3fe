"""Environment and world model are stepped together, in all modes of all agents."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.api import UserError
from reverie.play import load as loading
from reverie.play import simulation as simulations
from reverie.play.history import ENTRY_OVERHEAD, History
from reverie.play.simulation import Simulation

LEFT, STAY, RIGHT = ({"action": np.int32(n)} for n in range(3))


def play(simulation: Simulation, steps: int, action=STAY) -> list[np.ndarray]:
    """Return the first imagined image of every step."""
    images = []
    for _ in range(steps):
        if simulation.end_reason:
            break
        simulation.step(lambda: action)
        images.append(simulation.snapshot().imagined["image"][0])
    return images


@pytest.mark.parametrize("loaded", ["dreamer", "vta", "iris"], indirect=True)
@pytest.mark.parametrize("mode", loading.MODES)
def test_every_mode_steps_real_and_imagined_rows(loaded, mode):
    assert loaded.unavailable_reasons()[mode] == ""
    simulation = Simulation(loaded, seed=1)
    simulation.start(mode)
    assert simulation.human == (mode in (loading.HUMAN_ENV, loading.HUMAN_MODEL))
    play(simulation, 2, LEFT)
    snapshot = simulation.snapshot()
    size = loaded.obs_space["image"].shape
    assert snapshot.real["image"].shape == size
    assert snapshot.imagined["image"].shape == (1, *size)
    assert {"predicted reward", "value", "entropy"} <= set(snapshot.scalars)
    assert snapshot.inspection.probs["action"].sum() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("loaded", ["dreamer", "iris"], indirect=True)
def test_actions_of_a_human_move_the_paddle_of_the_environment(loaded):
    simulation = Simulation(loaded, seed=1)
    positions = {}
    for name, action in (("left", LEFT), ("right", RIGHT)):
        simulation.start(loading.HUMAN_ENV, seed=1)
        play(simulation, 2, action)
        row = simulation.snapshot().real["image"][-1]
        positions[name] = int(np.flatnonzero(row[:, 2] == 255).mean())
    assert positions["left"] < positions["right"]


@pytest.mark.parametrize("loaded", ["dreamer", "iris"], indirect=True)
def test_the_same_seed_gives_the_same_rollout(loaded):
    simulation = Simulation(loaded)
    rollouts = []
    for seed in (5, 5, 6):
        simulation.start(loading.HUMAN_MODEL, seed=seed)
        simulation.imagined[0]["is_terminal"][:] = False
        rollouts.append(np.stack(play(simulation, 3)))
    np.testing.assert_array_equal(rollouts[0], rollouts[1])
    count = min(map(len, rollouts))
    assert not np.array_equal(rollouts[0][:count], rollouts[2][:count])


def test_the_environment_follows_the_actions_in_the_world_model(loaded):
    """Both start from the same frame and get the same actions."""
    simulation = Simulation(loaded, seed=2)
    simulation.start(loading.HUMAN_MODEL)
    snapshot = simulation.snapshot()
    np.testing.assert_array_equal(snapshot.real["image"], snapshot.imagined["image"][0])
    simulation.step(lambda: RIGHT)
    assert int(simulation.rows[0]["action"]) == 2
    assert int(simulation.imagined[0]["action"][0]) == 2
    assert simulation.snapshot().real is not None


def test_a_fork_starts_from_the_real_frame(loaded):
    simulation = Simulation(loaded, seed=2)
    simulation.start(loading.AGENT_ENV)
    play(simulation, 3)
    assert simulation.imagined.start == 0
    assert simulation.imagination.imagined_steps == 3
    simulation.fork()
    snapshot = simulation.snapshot()
    assert simulation.imagined.start == 3
    assert simulation.imagination.imagined_steps == 0
    np.testing.assert_array_equal(snapshot.real["image"], snapshot.imagined["image"][0])


def test_rollouts_fork_again_after_some_steps(loaded):
    simulation = Simulation(loaded, seed=2)
    simulation.fork_every = 2
    simulation.start(loading.AGENT_ENV)
    play(simulation, 4)
    assert simulation.imagination.imagined_steps == 0
    assert simulation.imagined.start == 4


def test_several_rollouts_share_the_start_and_the_actions(loaded):
    simulation = Simulation(loaded, seed=2)
    simulation.rollouts = 4
    simulation.start(loading.HUMAN_MODEL)
    simulation.step(lambda: LEFT)
    rows = simulation.snapshot().imagined
    assert rows["image"].shape[0] == 4
    assert set(simulation.imagined[0]["action"].tolist()) == {0}


def test_stored_steps_are_shown_again_after_seeking_back(loaded):
    simulation = Simulation(loaded, seed=2)
    simulation.start(loading.HUMAN_ENV)
    play(simulation, 4, LEFT)
    frames = [simulation.rows[step]["image"] for step in range(5)]
    simulation.seek(1)
    assert simulation.cursor == 1
    assert not simulation.is_live
    simulation.fork()
    play(simulation, 3, RIGHT)  # not taken: these steps were already played
    assert simulation.is_live
    assert [int(simulation.rows[step]["action"]) for step in range(4)] == [0] * 4
    np.testing.assert_array_equal(simulation.snapshot().real["image"], frames[4])
    assert simulation.imagined.start == 1


def test_a_fork_in_the_world_model_continues_from_the_imagined_frame(loaded):
    simulation = Simulation(loaded, seed=2)
    simulation.start(loading.HUMAN_MODEL)
    for _ in range(3):
        step_without_end(simulation)
    frame = simulation.imagined[1]["image"][0].copy()
    simulation.seek(1)
    simulation.fork()
    assert simulation.imagined.stop == 2
    np.testing.assert_array_equal(simulation.snapshot().imagined["image"][0], frame)
    simulation.imagined[1]["is_terminal"][:] = False
    simulation.step(lambda: STAY)
    assert simulation.snapshot().real is None  # the environment cannot go back


@pytest.mark.parametrize("mode", [loading.AGENT_ENV, loading.AGENT_MODEL])
def test_a_human_takes_over_and_returns_control_to_the_agent(loaded, mode):
    simulation = Simulation(loaded, seed=2)
    simulation.start(mode)
    simulation.set_human(True)
    simulation.step(lambda: RIGHT)
    history = simulation.imagined if "model" in mode else simulation.rows
    assert np.ravel(history[0]["action"])[0] == 2
    simulation.set_human(False)
    assert simulation.mode == mode
    if "model" in mode:
        history[1]["is_terminal"][:] = False  # the agent is not trained
    simulation.step(lambda: pytest.fail("the agent acts"))


def test_the_carry_contains_the_actions_of_the_human(loaded):
    """The latent state is computed from the actions that were really taken."""
    simulation = Simulation(loaded, seed=2)
    simulation.start(loading.HUMAN_ENV)
    simulation.step(lambda: LEFT)
    before = simulation.policy_state.carry
    simulation.policy_state._replace_action(simulation.rows[0])
    assert simulation.policy_state.carry.prevact["action"].tolist() == [0]
    assert before.prevact["action"].shape == (1,)


def test_any_step_of_a_recorded_episode_can_be_shown(loaded):
    simulation = Simulation(loaded, seed=2)
    table = loaded.episodes.table()
    assert table
    assert table[0]["source"] == "replay"
    simulation.open_recorded(loaded.episodes.read("replay", table[0]["number"]))
    last = table[0]["rows"] - 1
    simulation.seek(last)
    assert simulation.end_reason == "end of the recording"
    simulation.seek(0)
    play(simulation, 10)
    assert simulation.cursor == last


def test_the_context_of_a_transformer_is_cleared_when_it_is_full(run_folder):
    loaded = loading.load_run(run_folder("iris"))
    simulation = Simulation(loaded, seed=2)
    simulation.start(loading.HUMAN_MODEL)
    used = []
    for _ in range(12):
        step_without_end(simulation)
        used.append(simulation.snapshot().inspection.context[0])
    assert simulation.imagination.context_resets >= 1
    assert min(np.diff(used)) < 0
    loaded.close()


def step_without_end(simulation: Simulation) -> None:
    """Step in the world model, even if it has predicted the end of the episode."""
    simulation.imagined[simulation.cursor]["is_terminal"][:] = False
    simulation.step(lambda: STAY)


def step_bytes(loaded) -> int:
    """Return the size of a real row, an imagined row and the scalars of a step."""
    return 2 * int(np.prod(loaded.obs_space["image"].shape)) + 3 * ENTRY_OVERHEAD


@pytest.mark.parametrize(
    ("name", "save"),
    [("MAX_HISTORY", False), ("MAX_BYTES", False), ("MAX_SAVED_BYTES", True)],
)
def test_memory_does_not_grow_without_limit(loaded, monkeypatch, name, save):
    max_bytes = 4.5 * step_bytes(loaded)
    limit = 4 if name == "MAX_HISTORY" else max_bytes
    monkeypatch.setattr(simulations, name, limit)
    simulation = Simulation(loaded, seed=2)
    simulation.keep_all = save
    simulation.start(loading.HUMAN_MODEL)
    for _ in range(8):
        step_without_end(simulation)
    assert simulation.imagined.stop - simulation.imagined.start in (4, 5)
    assert simulation.rows.num_bytes + simulation.imagined.num_bytes <= max_bytes
    assert simulation.rows.start == simulation.imagined.start
    simulation.seek(0)
    assert simulation.cursor == simulation.imagined.start


def test_saved_episodes_keep_rows_and_drop_the_scalars_of_old_steps(
    loaded, monkeypatch
):
    monkeypatch.setattr(simulations, "MAX_HISTORY", 3)
    simulation = Simulation(loaded, seed=2)
    simulation.keep_all = True
    simulation.start(loading.HUMAN_MODEL)
    for _ in range(6):
        step_without_end(simulation)
    assert simulation.imagined.start == 0
    assert simulation.step_data.start == 4
    simulation.seek(0)
    assert simulation.snapshot().imagined is not None


def test_all_rows_of_a_long_recording_are_kept(loaded, monkeypatch):
    monkeypatch.setattr(simulations, "MAX_HISTORY", 3)
    monkeypatch.setattr(simulations, "MAX_BYTES", 3 * step_bytes(loaded))
    simulation = Simulation(loaded, seed=2)
    simulation.fork_every = 0
    simulation.start(loading.RECORDED)
    steps = simulation.rows.stop - 1
    assert steps > 4
    play(simulation, steps)
    assert simulation.end_reason == "end of the recording"
    assert simulation.imagined.stop - simulation.imagined.start <= 3
    simulation.seek(0)
    assert simulation.cursor == 0


def test_rollouts_start_from_recordings_without_a_simulator(loaded):
    loaded.env.close()
    loaded.env, loaded.missing["env"] = None, "there is no simulator"
    modes = loaded.unavailable_reasons()
    assert (
        modes[loading.AGENT_ENV] == modes[loading.HUMAN_ENV] == "there is no simulator"
    )
    assert (
        modes[loading.HUMAN_MODEL]
        == modes[loading.AGENT_MODEL]
        == modes[loading.RECORDED]
        == ""
    )
    simulation = Simulation(loaded, seed=2)
    for mode in (loading.HUMAN_MODEL, loading.AGENT_MODEL):
        simulation.start(mode)
        simulation.step(lambda: STAY)
        assert simulation.snapshot().imagined["image"].shape[0] == 1
    with pytest.raises(UserError, match="Agent in the environment is not possible"):
        simulation.start(loading.AGENT_ENV)


def test_agents_without_a_world_model_play_in_the_environment(tmp_path):
    from reverie.run.config import resolve
    from reverie.run.train import train

    flags = {"task": "catch", "agent": "random", "run.steps": 80, "device": "cpu"}
    logdir = train(resolve([], flags={**flags, "logdir": str(tmp_path / "run")}))
    loaded = loading.load_run(logdir)
    modes = loaded.unavailable_reasons()
    assert "no world model" in modes[loading.HUMAN_MODEL]
    assert "no world model" in modes[loading.AGENT_MODEL]
    simulation = Simulation(loaded, seed=2)
    simulation.start(loading.AGENT_ENV)
    simulation.step(lambda: STAY)
    assert simulation.snapshot().imagined is None
    simulation.start(loading.RECORDED)
    loaded.close()


def test_history_keeps_the_newest_entries():
    history = History(3)
    for entry in "abcd":
        history.append(entry)
    assert (history.start, history.stop, history[3], history[-1]) == (3, 7, "a", "d")
    history.drop_before(5)
    assert (history.start, history.get(4), history.get(5)) == (5, None, "c")
    history.truncate(6)
    assert history.stop == 6
    with pytest.raises(IndexError, match="step 9"):
        history[9]
