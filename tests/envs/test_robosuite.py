"""robosuite with a fake simulator; `make test-envs` runs the real one."""

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
from reverie.envs.suites import robosuite
from reverie.envs.suites.robosuite import RobosuiteConfig
from reverie.run.config import resolve
from reverie.spaces import agent_obs_space

OPTIONS = """
    robots controller_configs has_renderer has_offscreen_renderer use_camera_obs
    camera_names camera_heights camera_widths use_object_obs reward_shaping control_freq
    horizon hard_reset seed"""
CAMERAS = ("agentview", "robot0_eye_in_hand", "frontview")


class FakeSimulator:
    """The parts of a robosuite environment that the suite uses, with their checks."""

    def __init__(self, task: str, **options: Any):
        assert options.keys() == set(OPTIONS.split())
        self.task, self.options = task, options
        names = options["camera_names"]
        self.cameras = [names] if isinstance(names, str) else names
        if unknown := set(self.cameras) - set(CAMERAS):
            raise ValueError(f"No camera {unknown}")
        self.rng = np.random.default_rng(options["seed"])
        self.value = 0.0
        self.model = ""
        self.steps = 0
        self.is_done = self.is_closed = False
        self.sim = SimpleNamespace(
            get_state=lambda: SimpleNamespace(
                flatten=lambda: np.array([self.value, 0, 0])
            ),
            reset=lambda: None,
            model=SimpleNamespace(get_xml=lambda: "<scene/>"),
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
        self.value = float(self.rng.random())
        return self._get_observations()

    def edit_model_xml(self, model: str) -> str:
        return f"edited {model}"

    def reset_from_xml_string(self, model: str) -> None:
        if "damaged" in model:
            raise ValueError("XML error")
        self.model = model
        self.reset()

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
        self.value = float(state[0])

    def _get_observations(self, force_update: bool = False) -> dict[str, Any]:
        obs: dict[str, Any] = {}
        for robot in (f"robot{i}" for i in range(len(self.options["robots"]))):
            for name, size in (("joint_pos", 7), ("joint_vel", 7), ("eef_pos", 3)):
                obs[f"{robot}_{name}"] = np.full(size, self.value)
            for name in ("gripper_qpos", "gripper_qvel"):
                if "Peg" not in self.task:  # it has no gripper
                    fingers = 0 if self.task == "Wipe" else 2
                    obs[f"{robot}_{name}"] = np.zeros(fingers)
            obs[f"{robot}_joint_pos_sin"] = np.sin(obs[f"{robot}_joint_pos"])
            obs[f"{robot}_joint_pos_cos"] = np.cos(obs[f"{robot}_joint_pos"])
        if self.options["use_object_obs"]:
            obs["object-state"] = np.zeros(14 if "Can" in self.task else 10)
        if self.options["use_camera_obs"]:
            assert self.options["has_offscreen_renderer"]
            shape = (self.options["camera_heights"], self.options["camera_widths"], 3)
            for number, camera in enumerate(self.cameras, 1):
                obs[f"{camera}_image"] = np.zeros(shape, np.uint8)
                obs[f"{camera}_image"][-1] = number  # images are upside down
        return obs


@pytest.fixture(autouse=True)
def simulators(
    monkeypatch: pytest.MonkeyPatch, working_egl: None
) -> list[FakeSimulator]:
    """Install a fake `robosuite` package; return the simulators it builds."""
    made: list[FakeSimulator] = []

    def make(task: str, **options: Any) -> FakeSimulator:
        made.append(FakeSimulator(task, **options))
        return made[-1]

    def composite_config(robot: str) -> dict[str, Any]:
        arm = {"type": "OSC_POSE", "input_ref_frame": "base", "gripper": {"type": "G"}}
        return {"type": "BASIC", "body_parts": {"right": arm, "base": {}}}

    package = ModuleType("robosuite")
    package.__spec__ = SimpleNamespace(name="robosuite")  # type: ignore[assignment]
    package.make = make  # type: ignore[attr-defined]
    package.ALL_ROBOTS = ["Panda", "Sawyer"]  # type: ignore[attr-defined]
    controllers: Any = ModuleType("robosuite.controllers")
    controllers.load_composite_controller_config = composite_config
    controllers.load_part_controller_config = lambda default_controller: {
        "type": default_controller
    }
    monkeypatch.setitem(sys.modules, "robosuite", package)
    monkeypatch.setitem(sys.modules, "robosuite.controllers", controllers)
    return made


def make(task: str = "robosuite_Lift", **config: Any) -> Any:
    return envs.make(task, envs.EnvConfig(robosuite=RobosuiteConfig(**config)))


def zero(env: Any) -> dict[str, np.ndarray]:
    return {"action": env.act_space["action"].zeros()}


def test_the_settings_of_the_preset(simulators: list[FakeSimulator]) -> None:
    config = resolve(["robosuite"])
    assert config.task == "robosuite_Lift"
    assert (config.run.envs, config.run.train_ratio, config.run.steps) == (1, 512, 5e4)
    env = envs.make(config.task, config.env)
    options = simulators[-1].options
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


def test_cameras_are_stacked_in_order_and_flipped() -> None:
    env = make(cameras=("robot0_eye_in_hand", "agentview"), size=(32, 48))
    image = env.reset()["image"]
    assert image.shape == (32, 48, 6)
    assert image[0, 0].tolist() == [1, 1, 1, 2, 2, 2]
    assert not image[1:].any()


def test_dataset_names_are_aliases(simulators: list[FakeSimulator]) -> None:
    assert make("robosuite_Can", object=True).obs_space["object"].shape == (14,)
    make("robosuite_Square")
    assert [arm.task for arm in simulators[1::2]] == [
        "PickPlaceCan",
        "NutAssemblySquare",
    ]
    assert make("robosuite_Lift", object=True).obs_space["object"].shape == (10,)


def test_the_horizon_truncates_and_success_is_logged() -> None:
    env = make(horizon=5)
    rows = [env.reset()] + [env.step(zero(env)) for _ in range(5)]
    assert [float(row["log/success"]) for row in rows] == [0, 0, 0, 1, 0, 0]
    assert [bool(row["is_last"]) for row in rows] == [False] * 5 + [True]
    assert not rows[-1]["is_terminal"]
    assert env.reset()["is_first"]


def test_success_terminates_an_episode_if_configured() -> None:
    env = make(end_on_success=True)
    env.reset()
    rows = [env.step(zero(env)) for _ in range(3)]
    assert rows[-1]["is_last"]
    assert rows[-1]["is_terminal"]
    assert not rows[-2]["is_last"]


def test_the_first_step_is_taken_without_an_opengl_context(
    simulators: list[FakeSimulator],
) -> None:
    make()
    first, second = simulators
    assert first.steps == 1
    assert first.is_closed
    assert not first.options["has_offscreen_renderer"]
    assert second.options["has_offscreen_renderer"]


def test_seeding_changes_the_generator_in_place(
    simulators: list[FakeSimulator],
) -> None:
    env = make(cameras=())
    rng = simulators[-1].rng
    values = [env.reset(seed)["robot0_joint_pos"][0] for seed in (3, 4, 3)]
    assert simulators[-1].rng is rng
    assert values[0] == values[2] != values[1]


def test_the_simulator_can_be_set_to_a_recorded_state(
    simulators: list[FakeSimulator],
) -> None:
    env = make()
    env.reset()
    state = np.array([9.0, 0, 0])
    assert env.set_simulator_state(state)["robot0_joint_pos"][0] == 9
    assert env.simulator_state().tolist() == [9, 0, 0]
    assert simulators[-1].model == ""
    env.set_simulator_state(state, "<recorded/>")
    assert simulators[-1].model == "edited <recorded/>"
    with pytest.raises(UserError, match=r"shape \(4,\), this task has \(3,\)"):
        env.set_simulator_state(np.zeros(4))
    with pytest.raises(UserError, match="--model False"):
        env.set_simulator_state(state, "<damaged/>")


def test_demonstrations_do_not_contain_object_poses(
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
    assert episode["image"].shape == (4, 9, 9, 6)  # solved after three steps
    assert episode["is_terminal"].tolist() == [False, False, False, True]
    np.testing.assert_array_equal(episode["action"][0][[0, 2, 6]], [-1, -1, -1])
    made = json.loads(reader.attributes()["env_args"])["env_kwargs"]
    assert made["robosuite.cameras"] == ["agentview", "robot0_eye_in_hand"]


def test_demonstrations_are_replayed_and_rendered(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    simulators: list[FakeSimulator],
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    words = "data demos lift.hdf5 --configs lift --episodes 2 --env.robosuite.size 9 9"
    assert main(words.split()) == 0
    states, model = open_episodes("lift.hdf5").read_states("demo_1", ["states"])
    assert states.shape == (3, 3)
    assert model == "<scene/>"
    task = ["--task", "robosuite_Lift"]
    words = "data replay lift.hdf5 --episode demo_1 --out video.gif"
    assert main([*words.split(), *task]) == 0
    assert simulators[-1].model == "edited <scene/>"
    output = capsys.readouterr().out
    assert "3 of 3 steps" in output
    assert "success in the simulator: True" in output
    cameras = ["--env.robosuite.cameras", "frontview", "robot0_eye_in_hand"]
    size = ["--env.robosuite.size", "5", "7", "--model", "False"]
    words = "data render lift.hdf5 images.hdf5"
    assert main([*words.split(), *task, *cameras, *size]) == 0
    assert simulators[-1].model == ""
    episode = open_episodes("images.hdf5").read("demo_0")
    assert episode["frontview_image"].shape == (4, 5, 7, 3)
    assert (episode["frontview_image"][:, 0] == 1).all()  # upright
    assert (episode["robot0_eye_in_hand_image"][:, 0] == 2).all()


@pytest.mark.parametrize(
    ("controllers", "frame"),
    [
        ({"type": "OSC_POSE", "input_max": 1}, "world"),
        (
            {
                "type": "BASIC",
                "body_parts": {
                    "right": {"type": "OSC_POSE", "input_ref_frame": "base"}
                },
            },
            "base",
        ),
    ],
)
def test_settings_of_recordings_of_robomimic(controllers: Any, frame: str) -> None:
    kwargs = {"robots": ["Sawyer"], "control_freq": 10, "reward_shaping": False}
    kwargs["controller_configs"] = controllers
    found = robosuite.recorded_settings({"env_kwargs": kwargs}, steps=150)
    assert found == {
        "robot": "Sawyer",
        "controller": "OSC_POSE",
        "frame": frame,
        "control_freq": 10,
        "shaped": False,
        "horizon": 150,
    }
    assert robosuite.recorded_settings({}, steps=20) == {"horizon": 100}


def test_only_lift_has_an_expert() -> None:
    for env in (make("robosuite_Can"), make(controller="JOINT_VELOCITY")):
        env.reset()
        with pytest.raises(UserError, match="no expert policy"):
            env.expert()


def test_two_arm_tasks_have_two_robots() -> None:
    env = make("robosuite_TwoArmLift", cameras=())
    assert env.act_space["action"].shape == (14,)
    assert "robot1_joint_vel" in env.reset()


def test_other_controllers_and_frames(simulators: list[FakeSimulator]) -> None:
    make(controller="JOINT_VELOCITY", frame="world")
    arm = simulators[-1].options["controller_configs"][0]["body_parts"]["right"]
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
def test_invalid_settings_suggest_valid_ones(config: dict, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        make(**config)


def test_invalid_tasks_and_missing_observations_are_refused() -> None:
    with pytest.raises(UserError, match="robosuite_Lift"):
        make("robosuite_lift")
    with pytest.raises(ValueError, match="at least one observation"):
        RobosuiteConfig(cameras=(), state=(), aux=False)
    assert set(robosuite.ALIASES) <= set(robosuite.TASKS)


@pytest.mark.parametrize(("task", "robots"), [("TwoArmPegInHole", 2), ("Wipe", 1)])
def test_robots_without_fingers_have_no_gripper_state(task: str, robots: int) -> None:
    env = envs.make(f"robosuite_{task}")
    keys = {key for key in env.obs_space if "robot" in key}
    expected = ("robot{}_joint_pos", "robot{}_joint_vel", "aux_robot{}_joint_pos_sin")
    expected += ("aux_robot{}_joint_pos_cos",)
    assert keys == {name.format(i) for name in expected for i in range(robots)}
    assert env.reset().keys() == env.obs_space.keys()
