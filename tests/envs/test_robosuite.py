"""robosuite on a stand-in for the simulator; `make test-envs` runs the real one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reverie import envs
from reverie.api import UserError
from reverie.cli.main import main
from reverie.datasets.episodes import open_episodes
from reverie.envs import opengl
from reverie.envs.suites import robosuite
from reverie.envs.suites.robosuite import RobosuiteConfig
from reverie.run.config import resolve
from reverie.spaces import agent_obs_space

OPTIONS = """
    robots controller_configs has_renderer has_offscreen_renderer use_camera_obs
    camera_names camera_heights camera_widths use_object_obs reward_shaping control_freq
    horizon hard_reset seed"""
CAMERAS = ("agentview", "robot0_eye_in_hand", "frontview")


class Arm:
    """What the adapter uses of a robosuite environment, with its refusals."""

    def __init__(self, task: str, **options: Any):
        assert options.keys() == set(OPTIONS.split())
        self.task, self.options = task, options
        names = options["camera_names"]
        self.cameras = [names] if isinstance(names, str) else names
        if unknown := set(self.cameras) - set(CAMERAS):
            raise ValueError(f"No camera {unknown}")
        self.rng = np.random.default_rng(options["seed"])
        self.place = 0.0
        self.steps = 0
        self.is_done = self.is_closed = False
        self.sim = SimpleNamespace(
            get_state=lambda: SimpleNamespace(flatten=lambda: np.zeros(3)),
            set_state_from_flattened=self._set,
            forward=lambda: None,
            data=SimpleNamespace(
                site_xpos=np.array([[0.1, 0, 1.0]]),
                site_xmat=np.diag([1.0, -1, -1]).reshape(1, 9),
                body_xpos=np.array([[0, 0, 0.82]]),
                body_xmat=np.eye(3).reshape(1, 9),
                qpos=np.array([0.04, -0.04]),
            ),
        )
        fingers = {"right": [0, 1]}
        robot = SimpleNamespace(
            eef_site_id={"right": 0}, _ref_gripper_joint_pos_indexes=fingers
        )
        self.robots, self.cube_body_id = [robot], 0

    @property
    def action_dim(self) -> int:
        return 7 * len(self.options["robots"])

    @property
    def action_spec(self) -> tuple[np.ndarray, np.ndarray]:
        return -np.ones(self.action_dim), np.ones(self.action_dim)

    def observation_spec(self) -> dict[str, Any]:
        return self._get_observations()

    def reset(self) -> dict[str, Any]:
        self.steps, self.is_done = 0, False
        self.place = float(self.rng.random())
        return self._get_observations()

    def step(self, action: np.ndarray) -> Any:
        assert action.shape == (self.action_dim,)
        assert not self.is_done, "executing action in terminated episode"
        self.steps += 1
        self.is_done = self.steps >= self.options["horizon"]
        return self._get_observations(), 0.25, self.is_done, {}

    def close(self) -> None:
        self.is_closed = True

    def _check_success(self) -> bool:
        return self.steps == 3

    def _set(self, state: np.ndarray) -> None:
        self.place = float(state[0])

    def _get_observations(self, force_update: bool = False) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for robot in (f"robot{i}" for i in range(len(self.options["robots"]))):
            for name, size in (("joint_pos", 7), ("joint_vel", 7), ("eef_pos", 3)):
                seen[f"{robot}_{name}"] = np.full(size, self.place)
            for name in ("gripper_qpos", "gripper_qvel"):
                if "Peg" not in self.task:  # held by the arms themselves
                    fingers = 0 if self.task == "Wipe" else 2
                    seen[f"{robot}_{name}"] = np.zeros(fingers)
            seen[f"{robot}_joint_pos_sin"] = np.sin(seen[f"{robot}_joint_pos"])
            seen[f"{robot}_joint_pos_cos"] = np.cos(seen[f"{robot}_joint_pos"])
        if self.options["use_object_obs"]:
            seen["object-state"] = np.zeros(14 if "Can" in self.task else 10)
        if self.options["use_camera_obs"]:
            assert self.options["has_offscreen_renderer"]
            shape = (self.options["camera_heights"], self.options["camera_widths"], 3)
            for number, camera in enumerate(self.cameras, 1):
                seen[f"{camera}_image"] = np.zeros(shape, np.uint8)
                seen[f"{camera}_image"][-1] = number  # the sky, drawn below
        return seen


@pytest.fixture(autouse=True)
def arms(monkeypatch: pytest.MonkeyPatch) -> list[Arm]:
    """A pretended `robosuite` package; the list holds what it has made."""
    made: list[Arm] = []

    def make(task: str, **options: Any) -> Arm:
        made.append(Arm(task, **options))
        return made[-1]

    def whole(robot: str) -> dict[str, Any]:
        arm = {"type": "OSC_POSE", "input_ref_frame": "base", "gripper": {"type": "G"}}
        return {"type": "BASIC", "body_parts": {"right": arm, "base": {}}}

    package = ModuleType("robosuite")
    package.__spec__ = SimpleNamespace(name="robosuite")  # type: ignore[assignment]
    package.make = make  # type: ignore[attr-defined]
    package.ALL_ROBOTS = ["Panda", "Sawyer"]  # type: ignore[attr-defined]
    controllers: Any = ModuleType("robosuite.controllers")
    controllers.load_composite_controller_config = whole
    controllers.load_part_controller_config = lambda default_controller: {
        "type": default_controller
    }
    monkeypatch.setitem(sys.modules, "robosuite", package)
    monkeypatch.setitem(sys.modules, "robosuite.controllers", controllers)
    monkeypatch.setattr(opengl, "probe_backend", lambda name: "")
    monkeypatch.setenv("MUJOCO_GL", "egl")
    return made


def make(task: str = "robosuite_Lift", **config: Any) -> Any:
    return envs.make(task, envs.EnvConfig(robosuite=RobosuiteConfig(**config)))


def zero(env: Any) -> dict[str, np.ndarray]:
    return {"action": env.act_space["action"].zeros()}


def test_the_settings_are_those_of_the_specification(arms: list[Arm]) -> None:
    config = resolve(["robosuite"])
    assert config.task == "robosuite_Lift"
    assert (config.run.envs, config.run.train_ratio, config.run.steps) == (1, 512, 5e4)
    env = envs.make(config.task, config.env)
    options = arms[-1].options
    assert options["robots"] == ["Panda"]
    assert options["control_freq"] == 20
    assert options["horizon"] == 100
    assert options["reward_shaping"]
    assert options["camera_names"] == ["agentview"]
    assert not options["has_renderer"]
    arm = options["controller_configs"][0]["body_parts"]["right"]
    assert (arm["type"], arm["input_ref_frame"]) == ("OSC_POSE", "base")
    shapes = {key: space.shape for key, space in agent_obs_space(env.obs_space).items()}
    assert shapes == {
        "image": (84, 84, 3),
        "robot0_joint_pos": (7,),
        "robot0_joint_vel": (7,),
        "robot0_gripper_qpos": (2,),
        "robot0_gripper_qvel": (2,),
        "aux_robot0_joint_pos_sin": (7,),
        "aux_robot0_joint_pos_cos": (7,),
    }
    assert env.act_space["action"].shape == (7,)


def test_cameras_are_stacked_in_order_and_upright() -> None:
    env = make(cameras=("robot0_eye_in_hand", "agentview"), size=(32, 48))
    image = env.reset()["image"]
    assert image.shape == (32, 48, 6)
    assert image[0, 0].tolist() == [1, 1, 1, 2, 2, 2]
    assert not image[1:].any()


def test_short_names_are_those_of_the_datasets(arms: list[Arm]) -> None:
    assert make("robosuite_Can", object=True).obs_space["object"].shape == (14,)
    make("robosuite_Square")
    assert [arm.task for arm in arms[1::2]] == ["PickPlaceCan", "NutAssemblySquare"]
    assert make("robosuite_Lift", object=True).obs_space["object"].shape == (10,)


def test_the_horizon_is_not_terminal_and_success_is_told() -> None:
    env = make(horizon=5)
    rows = [env.reset()] + [env.step(zero(env)) for _ in range(5)]
    assert [float(row["log/success"]) for row in rows] == [0, 0, 0, 1, 0, 0]
    assert [bool(row["is_last"]) for row in rows] == [False] * 5 + [True]
    assert not rows[-1]["is_terminal"]
    assert env.reset()["is_first"]


def test_success_ends_an_episode_when_asked_to() -> None:
    env = make(end_on_success=True)
    env.reset()
    rows = [env.step(zero(env)) for _ in range(3)]
    assert rows[-1]["is_last"]
    assert rows[-1]["is_terminal"]
    assert not rows[-2]["is_last"]


def test_the_first_step_is_taken_before_there_is_an_opengl_context(
    arms: list[Arm],
) -> None:
    make()
    first, second = arms
    assert first.steps == 1
    assert first.is_closed
    assert not first.options["has_offscreen_renderer"]
    assert second.options["has_offscreen_renderer"]


def test_a_seed_reaches_everyone_who_holds_the_dice(arms: list[Arm]) -> None:
    env = make(cameras=())
    rng = arms[-1].rng
    places = [env.reset(seed)["robot0_joint_pos"][0] for seed in (3, 4, 3)]
    assert arms[-1].rng is rng
    assert places[0] == places[2] != places[1]


def test_an_episode_begins_in_a_recorded_state() -> None:
    env = make()
    assert env.reset_to(np.array([9.0, 0, 0]))["robot0_joint_pos"][0] == 9
    with pytest.raises(UserError, match=r"shape \(4,\), this task has \(3,\)"):
        env.reset_to(np.zeros(4))


def test_demonstrations_show_no_place_of_an_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    words = "data demos lift.hdf5 --configs lift --episodes 2 --env.robosuite.size 9 9"
    assert main(words.split()) == 0
    reader = open_episodes("lift.hdf5")
    episode = reader.read("demo_0")
    assert agent_obs_space(reader.obs_space).keys() == {
        "image",
        "robot0_joint_pos",
        "robot0_joint_vel",
        "robot0_gripper_qpos",
        "robot0_gripper_qvel",
        "aux_robot0_joint_pos_sin",
        "aux_robot0_joint_pos_cos",
    }
    assert episode["image"].shape == (4, 9, 9, 6)  # up after three steps
    assert episode["is_terminal"].tolist() == [False, False, False, True]
    np.testing.assert_array_equal(episode["action"][0][[0, 2, 6]], [-1, -1, -1])
    made = json.loads(reader.attributes()["env_args"])["env_kwargs"]
    assert made["robosuite.cameras"] == ["agentview", "robot0_eye_in_hand"]


def test_only_lift_has_an_expert() -> None:
    for env in (make("robosuite_Can"), make(controller="JOINT_VELOCITY")):
        env.reset()
        with pytest.raises(UserError, match="no expert"):
            env.expert()


def test_tasks_for_two_arms_get_two() -> None:
    env = make("robosuite_TwoArmLift", cameras=())
    assert env.act_space["action"].shape == (14,)
    assert "robot1_joint_vel" in env.reset()


def test_other_controllers_and_frames(arms: list[Arm]) -> None:
    make(controller="JOINT_VELOCITY", frame="world")
    arm = arms[-1].options["controller_configs"][0]["body_parts"]["right"]
    assert arm == {
        "type": "JOINT_VELOCITY",
        "input_ref_frame": "world",
        "gripper": {"type": "G"},
    }


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        ({"state": ("joint_poss",)}, "Did you mean robot0_joint_pos"),
        ({"robot": "Pander"}, "Did you mean Panda"),
        ({"cameras": ("agentvew",)}, "robosuite.cameras"),
    ],
)
def test_wrong_settings_name_the_right_ones(config: dict, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        make(**config)


def test_wrong_tasks_name_the_nearest_and_blindness_is_refused() -> None:
    with pytest.raises(UserError, match="robosuite_Lift"):
        make("robosuite_lift")
    with pytest.raises(ValueError, match="at least one observation"):
        RobosuiteConfig(cameras=(), state=(), aux=False)
    assert set(robosuite.ALIASES) <= set(robosuite.TASKS)


@pytest.mark.parametrize(("task", "robots"), [("TwoArmPegInHole", 2), ("Wipe", 1)])
def test_robots_without_fingers_show_none(task: str, robots: int) -> None:
    env = envs.make(f"robosuite_{task}")
    shown = {key for key in env.obs_space if "robot" in key}
    wanted = ("robot{}_joint_pos", "robot{}_joint_vel", "aux_robot{}_joint_pos_sin")
    wanted += ("aux_robot{}_joint_pos_cos",)
    assert shown == {name.format(i) for name in wanted for i in range(robots)}
    assert env.reset().keys() == env.obs_space.keys()
