"""DeepMind Lab: the thirty first-person levels of DMLab-30.

The simulator is not on the package index (`tools/install_dmlab.sh` builds it). One
agent step holds an action for `repeat` frames. After the last frame of an episode the
simulator shows nothing more, so the last row repeats the image before it. Language
levels say what to do in words, which arrive as vectors (`language.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from reverie.api import Action, Obs
from reverie.envs import text_embedding
from reverie.envs.flags import flag_spaces, flags
from reverie.envs.seeding import SEED_RANGE
from reverie.spaces import Space, Spaces

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

# What a hand does: look right and down in pixels per frame, step right, step forward,
# fire, jump, crouch.
Hand = tuple[int, int, int, int, int, int, int]


def _hand(right: int = 0, down: int = 0, strafe: int = 0, walk: int = 0) -> Hand:
    return (right, down, strafe, walk, 0, 0, 0)


FIRE: Hand = (0, 0, 0, 0, 1, 0, 0)
WALKS = (_hand(walk=1), _hand(walk=-1), _hand(strafe=-1), _hand(strafe=1))
ACTION_SETS: dict[str, tuple[Hand, ...]] = {
    # the small set of IMPALA
    "impala": (
        *WALKS,
        *(_hand(right=angle, walk=walk) for walk in (0, 1) for angle in (-20, 20)),
        FIRE,
    ),
    # the larger one of PopArt and R2D2
    "popart": (
        *WALKS,
        *(_hand(right=angle) for angle in (-10, 10, -60, 60)),
        _hand(down=10),
        _hand(down=-10),
        *(_hand(right=angle, walk=1) for angle in (-10, 10, -60, 60)),
        FIRE,
    ),
}
HOLDOUT_SEED = 0x600D5EED
"""Mixes the seeds of held-out levels, so that they share none with training."""


@dataclass(frozen=True)
class DMLabConfig:
    size: tuple[int, int] = (64, 64)
    """Height and width of the image in pixels."""
    repeat: int = 4
    """Frames each action is held."""
    actions: Literal["popart", "impala"] = "popart"
    """Fifteen actions, or nine."""
    episodic: bool = True
    """Whether the end of an episode is terminal."""
    holdout: bool = False
    """Play the held-out levels; without it `_test` levels become their `_train` ones"""

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise ValueError(f"dmlab needs repeat >= 1, got repeat={self.repeat}")


class DMLab:
    """One level; `action` indexes an action set."""

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
        self._reads = level.startswith("language")
        self._lab: Any = deepmind_lab.Lab(
            level=f"contributed/dmlab30/{level}",
            observations=["RGB_INTERLEAVED", *["INSTR"] * self._reads],
            config=options,
        )
        self._hands = np.array(ACTION_SETS[config.actions], np.intc)
        self._rng = np.random.default_rng(seed)
        self._seen: Obs = {}

    @property
    def obs_space(self) -> Spaces:
        spaces = {"image": Space(np.dtype(np.uint8), (*self.config.size, 3))}
        if self._reads:
            length = text_embedding.WORDS * text_embedding.WIDTH
            spaces["instruction"] = Space(np.dtype(np.float32), (length,))
        return {**spaces, **flag_spaces()}

    @property
    def act_space(self) -> Spaces:
        return {"action": Space(np.dtype(np.int32), (), 0, len(self._hands))}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._lab.reset(seed=int(self._rng.integers(SEED_RANGE)))
        self._look()
        return {**self._seen, **flags(0.0, first=True)}

    def step(self, action: Action) -> Obs:
        hand = self._hands[int(action["action"])]
        reward = self._lab.step(hand, num_steps=self.config.repeat)
        ended = not self._lab.is_running()
        if ended:
            self._seen = {key: value.copy() for key, value in self._seen.items()}
        else:
            self._look()
        terminal = ended and self.config.episodic
        return {**self._seen, **flags(reward, last=ended, terminal=terminal)}

    def close(self) -> None:
        self._lab.close()

    def _look(self) -> None:
        seen = self._lab.observations()
        self._seen = {"image": np.array(seen["RGB_INTERLEAVED"], np.uint8)}
        if self._reads:
            self._seen["instruction"] = text_embedding.embed(str(seen["INSTR"]))


def is_level(name: str) -> bool:
    """Whether a level beyond the list exists: those for tests have one for training."""
    return name.endswith("_train") and f"{name.removesuffix('_train')}_test" in LEVELS
