"""robosuite: robot arms that lift, place, insert and open things.

The settings are those behaviour cloning and its Dreamer use: a Panda moved by the pose
of its hand (OSC_POSE, 20 actions a second), cameras of 84x84 pixels that are stacked
along the channels in the order they are listed, joint states under robosuite's names,
and shaped rewards. Keys under `aux_` are for an encoder and not to be reconstructed.
The simulator hands out images upside down, as OpenGL does; ours are upright, like those
of recorded demonstrations.

An episode ends by its horizon, which is not terminal. Success does not end it unless
asked to; `log/success` tells whether the task is done at this very step.

`expert` knows how to lift the cube of Lift (see `lift.py`). It asks the simulator where
things are, which no observation tells unless `object` is set.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from reverie.api import Action, Obs, UserError
from reverie.envs.flags import flag_spaces, flags
from reverie.envs.opengl import prepare
from reverie.envs.seeding import SEED_RANGE
from reverie.envs.suite import nearest
from reverie.envs.suites.robosuite.lift import Scene, lift
from reverie.spaces import Space, Spaces

SHORT = {"Can": "PickPlaceCan", "Square": "NutAssemblySquare"}
"""What the datasets of robomimic call some tasks."""

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
    """The arm; tasks for two get two of it."""
    controller: Controller = "OSC_POSE"
    """What an action means: a change of the hand's pose or position, or joints."""
    frame: Literal["base", "world"] = "base"
    """What changes of the hand are relative to; robomimic's data says world."""
    cameras: tuple[str, ...] = ("agentview",)
    """Cameras, stacked along the channels of `image`; none goes without images."""
    size: tuple[int, int] = (84, 84)
    """Height and width of the image in pixels."""
    state: tuple[str, ...] = ("joint_pos", "joint_vel", "gripper_qpos", "gripper_qvel")
    """What is shown of each robot, as `robot0_joint_pos` and so on."""
    aux: bool = True
    """Show sine and cosine of the joints as well (`aux_robot0_joint_pos_sin`)."""
    object: bool = False
    """Show where the objects are (`object`), which no camera image needs."""
    shaped: bool = True
    """Reward progress; otherwise only success pays."""
    horizon: int = 100
    """Steps after which an episode is cut; 100 are 5 seconds."""
    control_freq: int = 20
    """Actions per simulated second."""
    hard_reset: bool = True
    """Build the model anew for every episode, so that sizes and colours vary as well;
    seconds instead of a fraction of one."""
    end_on_success: bool = False
    """End an episode, as terminal, where the task succeeds."""

    def __post_init__(self) -> None:
        shows = self.cameras or self.state or self.aux or self.object
        if self.horizon < 1 or not shows:
            raise ValueError(
                "robosuite needs horizon >= 1 and something to see, got "
                f"horizon={self.horizon}, cameras={self.cameras}, state={self.state}"
            )


class Robosuite:
    """One task of robosuite."""

    def __init__(self, name: str, config: RobosuiteConfig | None = None, seed: int = 0):
        self.config = config = config or RobosuiteConfig()
        prepare(bool(config.cameras), instead="--env.robosuite.cameras ''")
        self._task = task = SHORT.get(name, name)
        robots = [config.robot] * (2 if task.startswith("TwoArm") else 1)
        with _quiet():
            _warm_up(task, robots, config)
            self._sim = _make(task, robots, config, config.cameras, seed)
        seen = self._sim.observation_spec()
        self._keys = self._wanted(len(robots), seen)
        self._obs_space = self._spaces(seen)

    @property
    def obs_space(self) -> Spaces:
        return self._obs_space

    @property
    def act_space(self) -> Spaces:
        low, high = self._sim.action_spec
        return {"action": Space(np.dtype(np.float32), low.shape, low, high)}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            # In place: everyone who draws from these rng holds on to them.
            rng = np.random.default_rng(seed % SEED_RANGE)
            self._sim.rng.bit_generator.state = rng.bit_generator.state
        return self._obs(self._sim.reset(), **flags(0.0, first=True))

    def reset_to(self, state: np.ndarray) -> Obs:
        """Begin an episode in a recorded state of the simulator."""
        self._sim.reset()
        size = self._sim.sim.get_state().flatten().size
        if np.shape(state) != (size,):
            raise UserError(
                f"The recorded state has the shape {np.shape(state)}, this task has "
                f"({size},).\n  Fix: take the task, the robot and the robosuite of the "
                "recording."
            )
        self._sim.sim.set_state_from_flattened(np.asarray(state))
        self._sim.sim.forward()
        seen = self._sim._get_observations(force_update=True)
        return self._obs(seen, **flags(0.0, first=True))

    def step(self, action: Action) -> Obs:
        move = np.asarray(action["action"], np.float64)
        seen, reward, done, _ = self._sim.step(move)
        over = self.config.end_on_success and self.is_success
        return self._obs(seen, **flags(reward, last=bool(done or over), terminal=over))

    def expert(self) -> Action:
        """What to do now, for demonstrations; only Lift knows."""
        if self._task != "Lift" or self.config.controller != "OSC_POSE":
            raise UserError(
                f"There is no expert for {self._task} with {self.config.controller}.\n"
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
        return {"action": lift(scene).astype(np.float32)}

    @property
    def is_success(self) -> bool:
        return bool(self._sim._check_success())

    def close(self) -> None:
        self._sim.close()

    def _wanted(self, robots: int, seen: Obs) -> dict[str, str]:
        """Our names of vectors, with the simulator's.

        Pegs and sponges have no fingers, and so nothing to show of a gripper.
        """
        wanted = {}
        for robot in (f"robot{index}" for index in range(robots)):
            has_fingers = np.size(seen.get(f"{robot}_gripper_qpos", ())) > 0
            for name in self.config.state:
                if has_fingers or not name.startswith("gripper_"):
                    wanted[f"{robot}_{name}"] = f"{robot}_{name}"
            for wave in ("sin", "cos") * self.config.aux:
                name = f"{robot}_joint_pos_{wave}"
                wanted[f"aux_{name}"] = name
        if self.config.object:
            wanted["object"] = "object-state"
        return wanted

    def _spaces(self, seen: Obs) -> Spaces:
        spaces = {}
        for key, name in self._keys.items():
            if name not in seen:
                raise UserError(
                    f"robosuite shows no {name!r}.{nearest(name, seen)}\n  Fix: put "
                    "names it has into --env.robosuite.state."
                )
            spaces[key] = Space(np.dtype(np.float32), np.shape(seen[name]))
        if self.config.cameras:
            shape = (*self.config.size, 3 * len(self.config.cameras))
            spaces["image"] = Space(np.dtype(np.uint8), shape)
        spaces["log/success"] = Space(np.dtype(np.float32))
        return {**spaces, **flag_spaces()}

    def _obs(self, seen: Obs, **ending: Any) -> Obs:
        shown: Obs = {k: np.array(seen[n], np.float32) for k, n in self._keys.items()}
        if self.config.cameras:
            views = [seen[f"{camera}_image"][::-1] for camera in self.config.cameras]
            shown["image"] = np.concatenate(views, 2)
        return {**shown, "log/success": np.float32(self.is_success), **ending}


def _make(
    task: str,
    robots: list[str],
    config: RobosuiteConfig,
    cameras: tuple[str, ...],
    seed: int,
) -> Any:
    import robosuite
    from robosuite.controllers import (
        load_composite_controller_config,
        load_part_controller_config,
    )

    if config.robot not in robosuite.ALL_ROBOTS:
        raise UserError(
            f"robosuite has no robot {config.robot!r}."
            f"{nearest(config.robot, robosuite.ALL_ROBOTS)}\n"
            f"  Fix: pick one of {', '.join(sorted(robosuite.ALL_ROBOTS))}."
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
            f"robosuite cannot make {task!r} with these settings: {error}\n  Fix: look "
            "at --env.robosuite.cameras, robot and controller."
        ) from error


def _warm_up(task: str, robots: list[str], config: RobosuiteConfig) -> None:
    """Take one step without images.

    On a machine's first step robosuite compiles its arithmetic with numba, for up to a
    minute. That must not count as a step that hangs, and not happen once there is an
    OpenGL context: beside Mesa's drawing on the processor, which compiles as well,
    images came out garbled.
    """
    sim = _make(task, robots, config, cameras=(), seed=0)
    sim.reset()
    sim.step(np.zeros(sim.action_dim))
    sim.close()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what robosuite has to say about files of its own that nobody needs."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
