"""Locomotion mazes: an ant or a quadruped has to find a ball in a maze.

A task is `BODY_maze_SIZE`, for one of five maze sizes; a suffix such as `_20hz` changes
the control rate of 50 actions per second. The agent observes its own body only. The
maze, the start position and the ball are fixed, the initial direction is random. After
the ball is touched, each remaining step of the 60 seconds gives reward 1.

Bodies, walls and physics are those of dm_control. The layouts are generated here:
corridors without loops, created by depth-first search from one corner, with the ball at
the most distant dead end.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs import opengl
from reverie.envs.adapters.dm_env import DmEnv
from reverie.envs.suite import Suite
from reverie.envs.suites.dmc import PACKAGE
from reverie.spaces import Space

BODIES = ("ant", "quadruped")
SIZES = {"s": 2, "m": 3, "l": 4, "xl": 6, "xxl": 8}
"""Cells along each side of a maze, without walls."""

TASKS: tuple[str, ...] = tuple(f"{body}_maze_{s}" for body in BODIES for s in SIZES)
SECONDS, RATE = 60, 50
"""Length of an episode, and default number of actions per second."""
MAX_TIMESTEP = 0.005
"""Maximum time step of the physics simulation, in seconds."""


@dataclass(frozen=True)
class LocoNavConfig:
    repeat: int = 1
    """Environment steps per action; rewards are summed."""
    log_image: bool = False
    """Render the maze from above as `log/image` for videos, as DreamerV3 does."""
    size: tuple[int, int] = (64, 64)
    """Height and width of `log/image` in pixels."""

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise ValueError(f"loconav needs repeat >= 1, got repeat={self.repeat}")


def is_task(name: str) -> bool:
    """True if `name` is a task, with or without a control rate."""
    return _parse(name) is not None


class LocoNav:
    """One body in one maze; `log/coverage` is the visited area in square meters."""

    def __init__(self, name: str, config: LocoNavConfig | None = None, seed: int = 0):
        self.config = config = config or LocoNavConfig()
        opengl.select_backend(config.log_image, "--env.loconav.log_image False")
        parsed = _parse(name)
        assert parsed is not None
        body, size, rate = parsed
        logging.getLogger("absl").setLevel(logging.ERROR)  # hide deprecation warnings
        self._sim = _make(body, size, rate, seed)
        rng = self._sim.random_state
        self._env = DmEnv(self._sim, rng.seed, config.repeat)
        self._visited: set[tuple[int, ...]] = set()
        self.obs_space, self.act_space = dict(self._env.obs_space), self._env.act_space
        self.obs_space["log/coverage"] = Space(np.float32, (), 0)
        if config.log_image:
            self.obs_space["log/image"] = Space(np.uint8, (*config.size, 3))

    def reset(self, seed: int | None = None) -> Obs:
        self._visited = set()
        return self._add_logs(self._env.reset(seed))

    def step(self, action: Action) -> Obs:
        return self._add_logs(self._env.step(action))

    def close(self) -> None:
        self._env.close()

    def _add_logs(self, obs: Obs) -> Obs:
        walker = self._sim.task.walker
        position = np.round(self._sim.physics.bind(walker.root_body).xpos[:2])
        self._visited.add(tuple(position.astype(int).tolist()))
        obs["log/coverage"] = np.float32(len(self._visited))
        if self.config.log_image:
            height, width = self.config.size
            camera = self._sim.task.arena.top_camera.full_identifier
            image = self._sim.physics.render(height, width, camera_id=camera)
            obs["log/image"] = np.ascontiguousarray(image)
        return obs


def layout(cells: int) -> str:
    """Return a maze with `cells` x `cells` free cells, as text.

    `*` is a wall, `P` the start and `G` the goal.
    """
    rng = np.random.RandomState(cells)  # the same numbers in all NumPy versions
    grid = np.full((2 * cells + 1, 2 * cells + 1), "*")
    grid[1, 1] = " "
    distance = {(0, 0): 0}
    path = [(0, 0)]
    while path:
        row, col = path[-1]
        neighbors = [(row + 1, col), (row - 1, col), (row, col + 1), (row, col - 1)]
        free = [
            cell
            for cell in neighbors
            if cell not in distance and min(cell) >= 0 and max(cell) < cells
        ]
        if not free:
            path.pop()
            continue
        cell = free[rng.randint(len(free))]
        grid[row + cell[0] + 1, col + cell[1] + 1] = " "  # remove the wall in between
        grid[2 * cell[0] + 1, 2 * cell[1] + 1] = " "
        distance[cell] = len(path)
        path.append(cell)
    goal = max(distance, key=lambda cell: distance[cell])
    grid[1, 1], grid[2 * goal[0] + 1, 2 * goal[1] + 1] = "P", "G"
    return "".join("".join(line) + "\n" for line in grid)


def _parse(name: str) -> tuple[str, str, int] | None:
    """Return body, size and control rate of a task name, or None if it is not one."""
    pattern = rf"({'|'.join(BODIES)})_maze_({'|'.join(SIZES)})(?:_([1-9]\d*)hz)?"
    match = re.fullmatch(pattern, name)
    return (match[1], match[2], int(match[3] or RATE)) if match else None


def _make(body: str, size: str, rate: int, seed: int) -> Any:
    """Build the dm_control environment of a task."""
    import labmaze
    from dm_control import composer
    from dm_control.locomotion.arenas import mazes
    from dm_control.locomotion.props import target_sphere
    from dm_control.locomotion.tasks import random_goal_maze
    from dm_control.locomotion.walkers import ant

    class FindGoal(random_goal_maze.RepeatSingleGoalMaze):  # type: ignore
        """Rewards every step after the goal was found; the body is not moved back."""

        walker, arena = property(lambda s: s._walker), property(lambda s: s._maze_arena)

        def after_step(self, physics: Any, random_state: Any) -> None:
            # skip `after_step` of the parent class, which would respawn the body
            super(random_goal_maze.RepeatSingleGoalMaze, self).after_step(
                physics, random_state
            )
            self._rewarded_this_step = self._target.activated

    walker = ant.Ant() if body == "ant" else _make_quadruped()
    maze = labmaze.FixedMazeWithRandomGoals(
        layout(SIZES[size]), num_spawns=1, num_objects=1
    )
    substeps = int(np.ceil(1 / rate / MAX_TIMESTEP))
    task = FindGoal(
        walker,
        mazes.MazeWithTargets(maze, xy_scale=3.0, z_height=2.0),
        target=target_sphere.TargetSphere(radius=1.0, height_above_ground=0.0),
        aliveness_threshold=-np.inf,  # no termination if it falls over
        contact_termination=False,
        physics_timestep=1 / rate / substeps,
        control_timestep=1 / rate,
    )
    walker.observables.egocentric_camera.enabled = False
    return composer.Environment(
        task,
        # half a step less, so that rounding does not add a step
        time_limit=SECONDS - 0.5 / rate,
        random_state=np.random.RandomState(seed),
        strip_singleton_obs_buffer_dim=True,
    )


def _make_quadruped() -> Any:
    """Build the quadruped of the control suite as a walker for mazes."""
    from dm_control import composer, mjcf
    from dm_control.locomotion.walkers import legacy_base
    from dm_control.suite import common, quadruped

    class Quadruped(legacy_base.Walker):  # type: ignore
        def _build(self) -> None:
            super()._build()
            model = mjcf.from_xml_string(quadruped.make_model(), assets=common.ASSETS)
            model.model = "walker"
            for kind, name in (
                ("geom", "floor"),
                ("camera", "global"),
                ("texture", "skybox"),
                ("joint", "root"),  # the maze adds one
            ):
                model.find(kind, name).remove()
            model.visual.remove()
            model.option.remove()
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


SUITE = Suite(
    name="loconav",
    description="long-horizon locomotion in mazes",
    make=LocoNav,
    config=LocoNavConfig,
    tasks=TASKS,
    accepts=is_task,
    name_format="loconav_BODY_maze_SIZE, such as loconav_ant_maze_m",
    package=PACKAGE,
)
