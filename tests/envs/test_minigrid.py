"""MiniGrid: observations and task names."""

from __future__ import annotations

import numpy as np
import pytest

from reverie import envs
from reverie.api import UserError
from reverie.envs import text_embedding
from reverie.envs.suites.minigrid import TASKS, MiniGrid, MiniGridConfig, _full_id
from reverie.spaces import agent_obs_space

pytest.importorskip("minigrid")


def test_images_contain_the_view_centered_on_black() -> None:
    env = MiniGrid("Empty-5x5")
    row = env.reset(seed=0)
    assert row["image"].shape == (64, 64, 3)
    view = env._unwrapped.get_frame(False, 9, agent_pov=True)  # 7 cells of 9 pixels
    assert np.array_equal(row["image"][:63, :63], view)
    assert not row["image"][63:].any()
    assert not row["image"][:, 63:].any()
    assert agent_obs_space(env.obs_space).keys() == {"image"}
    assert env.act_space["action"].classes == 7
    wide = MiniGrid("Empty-5x5", MiniGridConfig(size=(70, 90)))
    image = wide.reset(seed=0)["image"]
    assert image[:, 10:80].any()
    assert not image[:, :10].any()
    assert not image[:, 80:].any()


def test_symbols_are_object_color_state_and_direction() -> None:
    env = MiniGrid("DoorKey-5x5", MiniGridConfig(view="symbols"))
    row = env.reset(seed=1)
    assert agent_obs_space(env.obs_space).keys() == {
        "object",
        "color",
        "state",
        "direction",
    }
    values = env._unwrapped.gen_obs()["image"]
    for channel, key in enumerate(("object", "color", "state")):
        assert np.array_equal(row[key], values[..., channel])
        assert env.obs_space[key].problem(row[key]) is None
    assert row["direction"] == env._unwrapped.agent_dir


def test_the_mission_is_observed_only_if_it_varies() -> None:
    fetch = MiniGrid("Fetch-5x5-N2")
    row = fetch.reset(seed=0)
    assert np.array_equal(
        row["mission"], text_embedding.embed_text(fetch._unwrapped.mission)
    )
    missions = set()
    for _ in range(8):
        fetch.reset()
        missions.add(fetch._unwrapped.mission)
    assert len(missions) > 1
    assert "mission" in MiniGrid("BabyAI-GoToObj").obs_space
    assert "mission" not in MiniGrid("Empty-5x5").obs_space


def test_only_the_goal_is_terminal() -> None:
    env = MiniGrid("Empty-5x5")
    env.reset(seed=0)
    for action in (2, 2, 1, 2, 2):
        row = env.step({"action": np.int32(action)})
    assert row["is_last"]
    assert row["is_terminal"]
    assert row["reward"] > 0.9
    env.reset()
    for _ in range(100):
        row = env.step({"action": np.int32(0)})
    assert row["is_last"]
    assert not row["is_terminal"]
    env.close()


def test_tasks_are_named_without_prefix_and_version() -> None:
    assert _full_id("Empty-5x5") == "MiniGrid-Empty-5x5-v0"
    assert _full_id("MultiRoom-N4-S5") == "MiniGrid-MultiRoom-N4-S5-v1"  # the newest
    assert _full_id("MultiRoom-N4-S5-v0") == "MiniGrid-MultiRoom-N4-S5-v0"
    assert _full_id("MiniGrid-Empty-5x5-v0") == "MiniGrid-Empty-5x5-v0"
    assert _full_id("BabyAI-GoToObj") == "BabyAI-GoToObj-v0"
    for task in TASKS:
        assert _full_id(task)


@pytest.mark.parametrize(
    ("task", "hint"),
    [
        ("minigrid_Empty-5x", "minigrid_Empty-5x5"),
        ("minigrid_BabyAI-GoToNothing", "no task"),
        ("minigrid", "minigrid_TASK"),
    ],
)
def test_unknown_tasks_suggest_the_closest_name(task: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        envs.make(task)
