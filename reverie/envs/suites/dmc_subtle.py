"""DMC-Subtle: tasks of DeepMind Control in which small objects determine the reward.

The benchmark of R2-Dreamer (https://arxiv.org/abs/2603.18202) tests whether a world
model represents objects that cover few pixels. Each task is a task of the control suite
with smaller objects. All sizes are radii, also that of the string (`width` in MJCF):

| task | based on | changed sizes, in meters |
| -- | -- | -- |
| `ball_in_cup_catch` | `ball_in_cup_catch` | ball 0.025 / 12, string 0.003 / 12 |
| `cartpole_swingup` | `cartpole_swingup` | pole 0.045 / 20 |
| `finger_turn` | `finger_turn_hard` | target 0.03 / 2 |
| `point_mass` | `point_mass_easy` | target 0.015 / 6, point mass 0.01 / 6 |
| `reacher` | `reacher_hard` | target 0.015 / 3 |

These are the sizes in the code of the benchmark (https://github.com/NM512/r2dreamer,
MIT License). As there, the sizes are changed in the model before it is compiled, so
they apply to the images and to the simulation:

- The targets of `finger_turn`, `point_mass` and `reacher` are the regions that give
  rewards, so these regions are smaller as well.
- The mass of the ball follows from its volume: 0.038 g instead of 65 g. The ball is in
  the cup if it is completely inside of it, so a smaller ball may be farther from the
  center of the cup.
- The pole and the point mass have fixed masses. The point mass moves as before, and the
  moment of inertia of the pole decreases, because it is thinner.
- The gray markers at both ends of the string keep their radius of 5 mm. The marker of
  the ball contains the ball, so the images show the marker only.

In images of 64x64 pixels, the point mass is visible at about 70 % of all positions, and
its target, which is always at the center, is not visible.

Observations, actions, cameras and the length of episodes are those of the control
suite, and the settings are those of the suite `dmc` (`--env.dmc.*`). The preset
`dmc_subtle` has the settings of the benchmark.
"""

from __future__ import annotations

import importlib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from reverie.envs.suite import Suite
from reverie.envs.suites.dmc import DMC, PACKAGE, DMCConfig

EPISODE_STEPS = 1000
FINGER_TARGET = 0.03 / 2
REACHER_TARGET = 0.015 / 3


@dataclass(frozen=True)
class SubtleTask:
    """A task of the control suite with other sizes."""

    domain: str
    sizes: Mapping[str, float]
    """Changed values, by `PATH@ATTRIBUTE` of an element of the MJCF model."""
    make_task: Callable[[Any, int], Any]
    """Build the task from the module of the domain and a seed."""
    seconds: float = 0.02
    """Duration of a step in simulated time."""


SUBTLE_TASKS = {
    "ball_in_cup_catch": SubtleTask(
        "ball_in_cup",
        {"geom[@name='ball']@size": 0.025 / 12, "spatial@width": 0.003 / 12},
        lambda domain, seed: domain.BallInCup(random=seed),
    ),
    "cartpole_swingup": SubtleTask(
        "cartpole",
        {"default[@class='pole']/geom@size": 0.045 / 20},
        lambda domain, seed: domain.Balance(swing_up=True, sparse=False, random=seed),
        seconds=0.01,
    ),
    # Finger and reacher set the size of the target in every reset, so their tasks need
    # the size as well as the model.
    "finger_turn": SubtleTask(
        "finger",
        {"site[@name='target']@size": FINGER_TARGET},
        lambda domain, seed: domain.Turn(target_radius=FINGER_TARGET, random=seed),
    ),
    "point_mass": SubtleTask(
        "point_mass",
        {
            "geom[@name='target']@size": 0.015 / 6,
            "geom[@name='pointmass']@size": 0.01 / 6,
        },
        lambda domain, seed: domain.PointMass(randomize_gains=False, random=seed),
    ),
    "reacher": SubtleTask(
        "reacher",
        {"geom[@name='target']@size": REACHER_TARGET},
        lambda domain, seed: domain.Reacher(target_size=REACHER_TARGET, random=seed),
    ),
}


def make_subtle(name: str, config: DMCConfig | None = None, seed: int = 0) -> DMC:
    """Build one task of DMC-Subtle."""
    return DMC(name, config, seed, load=_load)


def _load(name: str, image: bool, seed: int) -> tuple[str, Any]:
    """Return the domain and the simulator of a task."""
    from dm_control.rl import control

    task = SUBTLE_TASKS[name]
    domain = importlib.import_module(f"dm_control.suite.{task.domain}")
    model, assets = domain.get_model_and_assets()
    simulator = control.Environment(
        domain.Physics.from_xml_string(_resize(model, task.sizes), assets),
        task.make_task(domain, seed),
        time_limit=EPISODE_STEPS * task.seconds,
        control_timestep=task.seconds,
    )
    return task.domain, simulator


def _resize(model: str | bytes, sizes: Mapping[str, float]) -> str:
    """Return an MJCF model with other values of the attributes in `sizes`."""
    root = ElementTree.fromstring(model)
    for key, size in sizes.items():
        path, _, attribute = key.rpartition("@")
        (element,) = root.iterfind(f".//{path}")
        element.set(attribute, str(size))
    return ElementTree.tostring(root, encoding="unicode")


SUITE = Suite(
    name="dmc_subtle",
    description="DMC-Subtle: DeepMind Control with small objects",
    make=make_subtle,
    config=DMCConfig,
    config_name="dmc",
    tasks=tuple(SUBTLE_TASKS),
    package=replace(PACKAGE, extra="dmc"),
)
