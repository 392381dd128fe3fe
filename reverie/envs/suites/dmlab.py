"""DeepMind Lab: the 30 first-person levels of DMLab-30.

The simulator is not on PyPI; `tools/install_dmlab.sh` builds it. One agent step repeats
the action for `repeat` frames. The simulator returns no image after the end of an
episode, so the last observation repeats the previous one. In language levels, the
instruction is observed as a text embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.seeding import SEED_RANGE
from reverie.envs.suite import ImageConfig, Package, Suite
from reverie.envs.text_embedding import EMBEDDING_SPACE, embed_text
from reverie.spaces import Space, step_spaces, step_values

_NAMES = """
explore_goal_locations_large explore_goal_locations_small
explore_object_locations_large explore_object_locations_small
explore_object_rewards_few explore_object_rewards_many
explore_obstructed_goals_large explore_obstructed_goals_small
language_answer_quantitative_question language_execute_random_task
language_select_described_object language_select_located_object
lasertag_one_opponent_large lasertag_one_opponent_small
lasertag_three_opponents_large lasertag_three_opponents_small
natlab_fixed_large_map natlab_varying_map_randomized natlab_varying_map_regrowth
psychlab_arbitrary_visuomotor_mapping psychlab_continuous_recognition
psychlab_sequential_comparison psychlab_visual_search
rooms_collect_good_objects_test rooms_exploit_deferred_effects_test
rooms_keys_doors_puzzle rooms_select_nonmatching_object rooms_watermaze
skymaze_irreversible_path_hard skymaze_irreversible_path_varied
"""
LEVELS: tuple[str, ...] = tuple(_NAMES.split())

LabAction = tuple[int, int, int, int, int, int, int]
"""Action of the simulator: look right and down (pixels per frame), strafe right, move
forward, fire, jump, crouch."""


def _action(right: int = 0, down: int = 0, strafe: int = 0, move: int = 0) -> LabAction:
    """Return an action of the simulator that looks or moves."""
    return (right, down, strafe, move, 0, 0, 0)


FIRE: LabAction = (0, 0, 0, 0, 1, 0, 0)
MOVES = (_action(move=1), _action(move=-1), _action(strafe=-1), _action(strafe=1))
ACTION_SETS: dict[str, tuple[LabAction, ...]] = {
    # the action set of IMPALA
    "impala": (
        *MOVES,
        *(_action(right=angle, move=move) for move in (0, 1) for angle in (-20, 20)),
        FIRE,
    ),
    # the larger action set of PopArt and R2D2
    "popart": (
        *MOVES,
        *(_action(right=angle) for angle in (-10, 10, -60, 60)),
        _action(down=10),
        _action(down=-10),
        *(_action(right=angle, move=1) for angle in (-10, 10, -60, 60)),
        FIRE,
    ),
}
HOLDOUT_SEED = 0x600D5EED
"""Mixed into the seeds of held-out levels, so that they differ from training."""


@dataclass(frozen=True)
class DMLabConfig(ImageConfig):
    repeat: int = 4
    """Frames per action."""
    actions: Literal["popart", "impala"] = "popart"
    """Action set: `popart` has 15 actions, `impala` 9."""
    episodic: bool = True
    """Treat the end of an episode as terminal."""
    holdout: bool = False
    """Use held-out levels. If off, `_test` levels are replaced by `_train` levels."""

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise ValueError(f"dmlab needs repeat >= 1, got repeat={self.repeat}")


class DMLab:
    """One level; `action` is an index into the action set."""

    def __init__(self, level: str, config: DMLabConfig | None = None, seed: int = 0):
        self.config = config = config or DMLabConfig()
        import deepmind_lab

        height, width = config.size
        options = {"height": str(height), "width": str(width), "logLevel": "WARN"}
        if config.holdout:
            options["allowHoldOutLevels"] = "true"
            options["mixerSeed"] = str(HOLDOUT_SEED)
        elif level.endswith("_test"):
            level = level.removesuffix("_test") + "_train"
        self._has_instruction = level.startswith("language")
        self._lab: Any = deepmind_lab.Lab(
            level=f"contributed/dmlab30/{level}",
            observations=["RGB_INTERLEAVED", *["INSTR"] * self._has_instruction],
            config=options,
        )
        self._actions = np.array(ACTION_SETS[config.actions], np.intc)
        self._rng = np.random.default_rng(seed)
        self._obs: Obs = {}
        self.obs_space = {"image": Space(np.uint8, (*config.size, 3)), **step_spaces()}
        if self._has_instruction:
            self.obs_space["instruction"] = EMBEDDING_SPACE
        self.act_space = {"action": Space(np.int32, (), 0, len(self._actions))}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._lab.reset(seed=int(self._rng.integers(SEED_RANGE)))
        self._observe()
        return {**self._obs, **step_values(0.0, first=True)}

    def step(self, action: Action) -> Obs:
        lab_action = self._actions[int(action["action"])]
        reward = self._lab.step(lab_action, num_steps=self.config.repeat)
        ended = not self._lab.is_running()
        if ended:  # repeat the last observation, see the module docstring
            self._obs = {key: value.copy() for key, value in self._obs.items()}
        else:
            self._observe()
        terminal = ended and self.config.episodic
        return {**self._obs, **step_values(reward, last=ended, terminal=terminal)}

    def close(self) -> None:
        self._lab.close()

    def _observe(self) -> None:
        values = self._lab.observations()
        self._obs = {"image": np.array(values["RGB_INTERLEAVED"], np.uint8)}
        if self._has_instruction:
            self._obs["instruction"] = embed_text(str(values["INSTR"]))


def _is_train_variant(name: str) -> bool:
    """True for `_train` variants of listed `_test` levels."""
    return name.endswith("_train") and f"{name.removesuffix('_train')}_test" in LEVELS


SUITE = Suite(
    name="dmlab",
    description="DeepMind Lab: first-person mazes and memory tasks",
    make=DMLab,
    config=DMLabConfig,
    tasks=LEVELS,
    accepts=_is_train_variant,
    name_format="dmlab_LEVEL, such as dmlab_explore_goal_locations_small",
    package=Package(
        "deepmind_lab",
        script="tools/install_dmlab.sh",
        note="It is not on PyPI; this script builds it.",
        license="GPL-2.0",
    ),
)
