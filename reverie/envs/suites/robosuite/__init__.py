"""robosuite: manipulation tasks for robot arms.

The defaults suit behavior cloning: a Panda arm with end-effector pose control
(OSC_POSE, 20 actions per second), images of 84x84 pixels from one or more cameras,
stacked along the channels, joint states under robosuite's names, and shaped rewards.
Keys that start with `aux_` are inputs of the encoder that are not reconstructed. Images
are flipped to be upright, like those of recorded demonstrations.

An episode is truncated at its horizon. Success ends it only if configured;
`log/success` is 1 in steps in which the task is solved.

`expert` returns actions that solve the task Lift (see `lift.py`). It reads object
positions from the simulator, which are observed only if `object` is set.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from reverie.api import Action, Obs, UserError
from reverie.envs import opengl
from reverie.envs.mujoco_state import check_state
from reverie.envs.seeding import SEED_RANGE
from reverie.envs.suite import Package, Suite, suggest
from reverie.envs.suites.robosuite.lift import Scene, lift_action
from reverie.spaces import Space, Spaces, step_spaces, step_values

ALIASES = {"Can": "PickPlaceCan", "Square": "NutAssemblySquare"}
"""Names of tasks in the datasets of robomimic."""

_NAMES = """
Can Door Lift NutAssembly NutAssemblyRound NutAssemblySingle NutAssemblySquare PickPlace
PickPlaceBread PickPlaceCan PickPlaceCereal PickPlaceMilk PickPlaceSingle Square Stack
ToolHang TwoArmHandover TwoArmLift TwoArmPegInHole TwoArmTransport Wipe
"""
TASKS: tuple[str, ...] = tuple(_NAMES.split())

Controller = Literal[
    "OSC_POSE", "OSC_POSITION", "JOINT_POSITION", "JOINT_VELOCITY", "JOINT_TORQUE"
]


@dataclass(frozen=True)
class RobosuiteConfig:
    robot: str = "Panda"
    """Robot arm; two-arm tasks use two of them."""
    controller: Controller = "OSC_POSE"
    """Controller, which determines the meaning of actions: changes of the end-effector
    pose or position, or joint commands."""
    frame: Literal["base", "world"] = "base"
    """Reference frame of end-effector actions; robomimic datasets use world."""
    cameras: tuple[str, ...] = ("agentview",)
    """Cameras, stacked along the channels of `image`; empty disables images."""
    size: tuple[int, int] = (84, 84)
    """Height and width of the image in pixels."""
    state: tuple[str, ...] = ("joint_pos", "joint_vel", "gripper_qpos", "gripper_qvel")
    """Observations of each robot; `joint_pos` adds `robot0_joint_pos` and so on."""
    aux: bool = True
    """Observe sine and cosine of the joint angles (`aux_robot0_joint_pos_sin`)."""
    object: bool = False
    """Observe the poses of objects as `object`."""
    shaped: bool = True
    """Use shaped rewards; otherwise only success is rewarded."""
    horizon: int = 100
    """Time limit of an episode in steps."""
    control_freq: int = 20
    """Actions per simulated second."""
    hard_reset: bool = True
    """Rebuild the model for every episode, so that sizes and colors of objects vary;
    takes seconds per reset."""
    end_on_success: bool = False
    """Terminate an episode when the task is solved."""

    def __post_init__(self) -> None:
        has_obs = self.cameras or self.state or self.aux or self.object
        if self.horizon < 1 or not has_obs:
            raise ValueError(
                "robosuite needs horizon >= 1 and at least one observation, got "
                f"horizon={self.horizon}, cameras={self.cameras}, state={self.state}"
            )


class Robosuite:
    """One task of robosuite."""

    def __init__(self, name: str, config: RobosuiteConfig | None = None, seed: int = 0):
        self.config = config = config or RobosuiteConfig()
        opengl.select_backend(bool(config.cameras), "--env.robosuite.cameras ''")
        self._task = task = ALIASES.get(name, name)
        robots = [config.robot] * (2 if task.startswith("TwoArm") else 1)
        log_level = logging.root.manager.disable
        logging.disable(logging.WARNING)  # hide warnings of missing optional files
        try:
            _warm_up(task, robots, config)
            self._sim = _make(task, robots, config, config.cameras, seed)
        finally:
            logging.disable(log_level)
        spec = self._sim.observation_spec()
        self._vector_keys = self._select_keys(len(robots), spec)
        self.obs_space = self._make_obs_space(spec)
        low, high = self._sim.action_spec
        self.act_space = {"action": Space(np.float32, low.shape, low, high)}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            # set the state in place, because other objects reference this generator
            rng = np.random.default_rng(seed % SEED_RANGE)
            self._sim.rng.bit_generator.state = rng.bit_generator.state
        return self._obs(self._sim.reset(), **step_values(0.0, first=True))

    def simulator_state(self) -> np.ndarray:
        state: np.ndarray = self._sim.sim.get_state().flatten()
        return state

    def simulator_model(self) -> str:
        return str(self._sim.sim.model.get_xml())

    def set_simulator_state(self, state: np.ndarray, model: str = "") -> Obs:
        if model:
            self._load_model(model)
        check_state(state, self.simulator_state().size)
        self._sim.sim.set_state_from_flattened(np.asarray(state, np.float64))
        self._sim.sim.forward()
        values = self._sim._get_observations(force_update=True)
        return self._obs(values, **step_values(0.0, first=True))

    def step(self, action: Action) -> Obs:
        move = np.asarray(action["action"], np.float64)
        values, reward, done, _ = self._sim.step(move)
        terminal = self.config.end_on_success and self.is_success
        last = bool(done or terminal)
        return self._obs(values, **step_values(reward, last=last, terminal=terminal))

    def expert(self) -> Action:
        """Return an action of a scripted policy, for demonstrations; only for Lift."""
        if self._task != "Lift" or self.config.controller != "OSC_POSE":
            raise UserError(
                f"{self._task} with {self.config.controller} has no expert policy.\n"
                "  Fix: --task robosuite_Lift --env.robosuite.controller OSC_POSE"
            )
        data, robot = self._sim.sim.data, self._sim.robots[0]
        hand, cube = robot.eef_site_id["right"], self._sim.cube_body_id
        fingers = robot._ref_gripper_joint_pos_indexes["right"]
        scene = Scene(
            hand=np.array(data.site_xpos[hand]),
            hand_axes=np.reshape(data.site_xmat[hand], (3, 3)),
            cube=np.array(data.body_xpos[cube]),
            cube_axes=np.reshape(data.body_xmat[cube], (3, 3)),
            opening=float(np.abs(data.qpos[fingers]).sum()),
        )
        return {"action": lift_action(scene).astype(np.float32)}

    @property
    def camera_names(self) -> tuple[str, ...]:
        """Cameras in the channels of `image`."""
        return self.config.cameras

    @property
    def render_fps(self) -> float:
        return float(self.config.control_freq)

    @property
    def is_success(self) -> bool:
        return bool(self._sim._check_success())

    def close(self) -> None:
        self._sim.close()

    def _load_model(self, model: str) -> None:
        """Rebuild the simulator from recorded XML, with local file paths."""
        try:
            self._sim.reset_from_xml_string(self._sim.edit_model_xml(model))
            self._sim.sim.reset()
        except (AssertionError, KeyError, ValueError) as error:
            raise UserError(
                f"robosuite cannot load the recorded model: {error}\n  Fix: use the "
                "task and the robosuite version of the recording, or --model False."
            ) from error

    def _select_keys(self, robots: int, spec: Obs) -> dict[str, str]:
        """Return the simulator's names of the vector observations, by key.

        Grippers without fingers have no state and are left out.
        """
        keys = {}
        for robot in (f"robot{index}" for index in range(robots)):
            has_fingers = np.size(spec.get(f"{robot}_gripper_qpos", ())) > 0
            for name in self.config.state:
                if has_fingers or not name.startswith("gripper_"):
                    keys[f"{robot}_{name}"] = f"{robot}_{name}"
            for function in ("sin", "cos") if self.config.aux else ():
                name = f"{robot}_joint_pos_{function}"
                keys[f"aux_{name}"] = name
        if self.config.object:
            keys["object"] = "object-state"
        return keys

    def _make_obs_space(self, spec: Obs) -> Spaces:
        spaces = {}
        for key, name in self._vector_keys.items():
            if name not in spec:
                raise UserError(
                    f"robosuite has no observation {name!r}.{suggest(name, spec)}\n"
                    "  Fix: set --env.robosuite.state to names that exist."
                )
            spaces[key] = Space(np.float32, np.shape(spec[name]))
        if self.config.cameras:
            shape = (*self.config.size, 3 * len(self.config.cameras))
            spaces["image"] = Space(np.uint8, shape)
        spaces["log/success"] = Space(np.float32)
        return {**spaces, **step_spaces()}

    def _obs(self, values: Obs, **flag_values: Any) -> Obs:
        obs: Obs = {
            key: np.array(values[name], np.float32)
            for key, name in self._vector_keys.items()
        }
        if self.config.cameras:  # OpenGL images are upside down
            views = [values[f"{camera}_image"][::-1] for camera in self.config.cameras]
            obs["image"] = np.concatenate(views, 2)
        return {**obs, "log/success": np.float32(self.is_success), **flag_values}


def _make(
    task: str,
    robots: list[str],
    config: RobosuiteConfig,
    cameras: tuple[str, ...],
    seed: int,
) -> Any:
    """Build the robosuite environment of a task, with these robots and cameras."""
    import robosuite
    from robosuite.controllers import (
        load_composite_controller_config,
        load_part_controller_config,
    )

    if config.robot not in robosuite.ALL_ROBOTS:
        raise UserError(
            f"robosuite has no robot {config.robot!r}."
            f"{suggest(config.robot, robosuite.ALL_ROBOTS)}\n"
            f"  Fix: choose one of {', '.join(sorted(robosuite.ALL_ROBOTS))}."
        )
    body = load_composite_controller_config(robot=config.robot)
    for name in body["body_parts"].keys() & {"right", "left"}:
        arm = body["body_parts"][name]
        if arm["type"] != config.controller:
            grip = arm.get("gripper", {"type": "GRIP"})
            arm = load_part_controller_config(default_controller=config.controller)
            arm["gripper"] = grip
        arm["input_ref_frame"] = config.frame
        body["body_parts"][name] = arm
    height, width = config.size
    try:
        return robosuite.make(
            task,
            robots=robots,
            controller_configs=[body] * len(robots),
            has_renderer=False,
            has_offscreen_renderer=bool(cameras),
            use_camera_obs=bool(cameras),
            camera_names=list(cameras) or "agentview",
            camera_heights=height,
            camera_widths=width,
            use_object_obs=config.object,
            reward_shaping=config.shaped,
            control_freq=config.control_freq,
            horizon=config.horizon,
            hard_reset=config.hard_reset,
            seed=seed,
        )
    except (AssertionError, KeyError, ValueError) as error:
        raise UserError(
            f"robosuite cannot make {task!r} with these settings: {error}\n"
            "  Fix: check --env.robosuite.cameras, robot and controller."
        ) from error


def _warm_up(task: str, robots: list[str], config: RobosuiteConfig) -> None:
    """Take one step without images, to compile robosuite's code.

    In the first step on a machine, robosuite compiles code with Numba for up to a
    minute. A worker process whose step takes that long would be restarted
    (`env.vector.timeout`). The compilation also has to happen before an OpenGL context
    exists: compiling while Mesa renders on the CPU, which uses LLVM too, resulted in
    corrupt images.
    """
    sim = _make(task, robots, config, cameras=(), seed=0)
    sim.reset()
    sim.step(np.zeros(sim.action_dim))
    sim.close()


def recorded_settings(env_args: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the settings with which robomimic recorded a dataset; see `Suite`.

    `steps` is the length of its longest episode. Before robosuite 1.5, end-effector
    actions were in the world frame.
    """
    kwargs = env_args.get("env_kwargs", {})
    robots, controllers = kwargs.get("robots"), kwargs.get("controller_configs")
    # one controller, or a list with one per robot
    first = controllers[0] if isinstance(controllers, list) else controllers or {}
    # since robosuite 1.5 an entry for each part of the body, before that a single one
    arm = first.get("body_parts", {}).get("right", first)
    found = {
        "robot": robots[0] if isinstance(robots, list) else robots,
        "controller": arm.get("type"),
        "frame": arm.get("input_ref_frame", "world" if arm else None),
        "control_freq": kwargs.get("control_freq"),
        "shaped": kwargs.get("reward_shaping"),
        "horizon": max(RobosuiteConfig().horizon, steps),
    }
    return {name: value for name, value in found.items() if value is not None}


SUITE = Suite(
    name="robosuite",
    recorded_settings=recorded_settings,
    description="robosuite: robot arm manipulation",
    make=Robosuite,
    config=RobosuiteConfig,
    tasks=TASKS,
    package=Package("robosuite", ("robosuite", "mujoco"), (3, 13)),
)
