"""Locomotion mazes: a walking body has to find a ball, and walk first.

A task is `BODY_maze_SIZE`, for an ant or a quadruped in one of five mazes; `_20hz` at
the end changes the 50 actions a second. The agent feels its own body and sees nothing.
The maze, the start and the ball stay the same, the direction it looks at does not. From
the moment it touches the ball, every step that is left of 60 seconds pays 1.

The bodies, walls and physics are dm_control's. The layouts are ours: corridors without
loops, carved depth first from one corner, with the ball at the end farthest from it.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.adapters.dm_env import DmEnv
from reverie.envs.opengl import prepare
from reverie.spaces import Space, Spaces

BODIES = ("ant", "quadruped")
SIZES = {"s": 2, "m": 3, "l": 4, "xl": 6, "xxl": 8}
"""Rooms along each side of a maze."""

TASKS: tuple[str, ...] = tuple(f"{body}_maze_{s}" for body in BODIES for s in SIZES)
SECONDS = 60
RATE = 50
"""Actions per second, unless the task says otherwise."""


@dataclass(frozen=True)
class LocoNavConfig:
    repeat: int = 1
    """Steps of the task each action is held; their rewards are summed."""
    log_image: bool = False
    """Draw the maze from above for people (`log/image`), as DreamerV3 does."""
    size: tuple[int, int] = (64, 64)
    """Height and width of that image in pixels."""

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise ValueError(f"loconav needs repeat >= 1, got repeat={self.repeat}")


def is_task(name: str) -> bool:
    """Whether a name is a task, with or without a number of actions a second."""
    return _parse(name) is not None


class LocoNav:
    """One body in one maze; `log/coverage` counts the square metres it has been to."""

    def __init__(self, name: str, config: LocoNavConfig | None = None, seed: int = 0):
        self.config = config = config or LocoNavConfig()
        prepare(config.log_image, instead="--env.loconav.log_image False")
        parts = _parse(name)
        assert parts is not None
        body, size, rate = parts
        logging.getLogger("absl").setLevel(logging.ERROR)  # of deprecated defaults
        self._sim = _make(body, size, rate, seed)
        rng = self._sim.random_state
        self._env = DmEnv(self._sim, rng.seed, config.repeat)
        self._visited: set[tuple[int, ...]] = set()

    @property
    def obs_space(self) -> Spaces:
        spaces = self._env.obs_space
        spaces["log/coverage"] = Space(np.dtype(np.float32), (), 0)
        if self.config.log_image:
            shape = (*self.config.size, 3)
            spaces["log/image"] = Space(np.dtype(np.uint8), shape)
        return spaces

    @property
    def act_space(self) -> Spaces:
        return self._env.act_space

    def reset(self, seed: int | None = None) -> Obs:
        self._visited = set()
        return self._show(self._env.reset(seed))

    def step(self, action: Action) -> Obs:
        return self._show(self._env.step(action))

    def close(self) -> None:
        self._env.close()

    def _show(self, obs: Obs) -> Obs:
        walker = self._sim.task.walker
        place = np.round(self._sim.physics.bind(walker.root_body).xpos[:2])
        self._visited.add(tuple(place.astype(int).tolist()))
        obs["log/coverage"] = np.float32(len(self._visited))
        if self.config.log_image:
            height, width = self.config.size
            camera = self._sim.task.arena.top_camera.full_identifier
            image = self._sim.physics.render(height, width, camera_id=camera)
            obs["log/image"] = np.ascontiguousarray(image)
        return obs


def layout(rooms: int) -> str:
    """A maze as text: `*` is a wall, `P` where one starts and `G` the goal."""
    rng = np.random.RandomState(rooms)  # its numbers are the same in all versions
    grid = np.full((2 * rooms + 1, 2 * rooms + 1), "*")
    grid[1, 1] = " "
    distance = {(0, 0): 0}
    path = [(0, 0)]
    while path:
        row, col = path[-1]
        beside = [(row + 1, col), (row - 1, col), (row, col + 1), (row, col - 1)]
        free = [
            r for r in beside if r not in distance and min(r) >= 0 and max(r) < rooms
        ]
        if not free:
            path.pop()
            continue
        after = free[rng.randint(len(free))]
        grid[row + after[0] + 1, col + after[1] + 1] = " "  # the wall between them
        grid[2 * after[0] + 1, 2 * after[1] + 1] = " "
        distance[after] = len(path)
        path.append(after)
    far = max(distance, key=lambda room: distance[room])
    grid[1, 1], grid[2 * far[0] + 1, 2 * far[1] + 1] = "P", "G"
    return "".join("".join(line) + "\n" for line in grid)


def _parse(name: str) -> tuple[str, str, int] | None:
    wanted = rf"({'|'.join(BODIES)})_maze_({'|'.join(SIZES)})(?:_([1-9]\d*)hz)?"
    found = re.fullmatch(wanted, name)
    return (found[1], found[2], int(found[3] or RATE)) if found else None


def _make(body: str, size: str, rate: int, seed: int) -> Any:
    import labmaze
    from dm_control import composer
    from dm_control.locomotion.arenas import mazes
    from dm_control.locomotion.props import target_sphere
    from dm_control.locomotion.tasks import random_goal_maze
    from dm_control.locomotion.walkers import ant

    class Find(random_goal_maze.RepeatSingleGoalMaze):  # type: ignore
        """Pays while the goal is found, instead of beginning anew."""

        walker, arena = property(lambda s: s._walker), property(lambda s: s._maze_arena)

        def after_step(self, physics: Any, random_state: Any) -> None:
            super(random_goal_maze.RepeatSingleGoalMaze, self).after_step(
                physics, random_state
            )
            self._rewarded_this_step = self._target.activated

    walker = ant.Ant() if body == "ant" else _make_quadruped()
    maze = labmaze.FixedMazeWithRandomGoals(
        layout(SIZES[size]), num_spawns=1, num_objects=1
    )
    substeps = int(np.ceil(1 / rate / 0.005))
    task = Find(
        walker,
        mazes.MazeWithTargets(maze, xy_scale=3.0, z_height=2.0),
        target=target_sphere.TargetSphere(radius=1.0, height_above_ground=0.0),
        aliveness_threshold=-np.inf,  # a body on its back may get up again
        contact_termination=False,
        physics_timestep=1 / rate / substeps,
        control_timestep=1 / rate,
    )
    walker.observables.egocentric_camera.enabled = False
    return composer.Environment(
        task,
        time_limit=SECONDS - 0.5 / rate,  # or rounding adds a step
        random_state=np.random.RandomState(seed),
        strip_singleton_obs_buffer_dim=True,
    )


def _make_quadruped() -> Any:
    """The four-legged body of the control suite, which has no maze of its own."""
    from dm_control import composer, mjcf
    from dm_control.locomotion.walkers import legacy_base
    from dm_control.suite import common, quadruped

    class Quadruped(legacy_base.Walker):  # type: ignore
        def _build(self) -> None:
            super()._build()
            model = mjcf.from_xml_string(quadruped.make_model(), assets=common.ASSETS)
            model.model = "walker"
            for kind, name in (("geom", "floor"), ("camera", "global")):
                model.find(kind, name).remove()
            for scenery in (
                model.visual,
                model.option,
                model.find("texture", "skybox"),
            ):
                scenery.remove()
            model.find("joint", "root").remove()  # the maze brings one
            self._model = model
            self._prev_action = np.zeros(self.action_spec.shape)

        def initialize_episode(self, physics: Any, random_state: Any) -> None:
            self._prev_action[:] = 0

        def apply_action(self, physics: Any, action: Any, random_state: Any) -> None:
            super().apply_action(physics, action, random_state)
            self._prev_action[:] = action

        mjcf_model = property(lambda self: self._model)
        prev_action = property(lambda self: self._prev_action)
        root_body = property(lambda self: self._model.find("body", "torso"))
        egocentric_camera = property(
            lambda self: self._model.find("camera", "egocentric")
        )

        @composer.cached_property  # type: ignore
        def actuators(self) -> Any:
            return self._model.find_all("actuator")

        @composer.cached_property  # type: ignore
        def observable_joints(self) -> Any:
            return [j for j in self._model.find_all("joint") if j.tag == "joint"]

        @composer.cached_property  # type: ignore
        def bodies(self) -> Any:
            return tuple(self._model.find_all("body"))

        @composer.cached_property  # type: ignore
        def end_effectors(self) -> Any:
            return tuple(b for b in self.bodies if b.name.startswith("toe"))

        @composer.cached_property  # type: ignore
        def ground_contact_geoms(self) -> Any:
            return tuple(self._model.find("geom", b.name) for b in self.end_effectors)

        mocap_tracking_bodies = bodies

    return Quadruped()
