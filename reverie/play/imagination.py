"""A batch of imagined rollouts that continue an episode.

A row is the dictionary of one step: observations, reward, flags and action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from reverie.api import Action, Carry, Obs
from reverie.capabilities import (
    InspectableWorldModelEnv,
    PolicyWorldModelEnv,
    StateInspection,
    WorldModelEnv,
)
from reverie.datasets.action_units import ActionConverter
from reverie.datasets.images import ImageCrop
from reverie.spaces import Spaces


class Imagination:
    """N imagined rollouts with the same context rows and the same actions.

    They differ because the world model samples its states. Actions are in the units of
    the environment.
    """

    def __init__(
        self,
        model: WorldModelEnv,
        act_space: Spaces,
        to_model_units: ActionConverter,
        to_env_units: ActionConverter,
        crop: ImageCrop | None,
    ):
        self.model, self.act_space, self.crop = model, act_space, crop
        self._to_model, self._to_env = to_model_units, to_env_units
        self.stop()

    def stop(self) -> None:
        """End the rollouts."""
        self._state: Any = None
        self.count = 0  # number of rollouts
        self.imagined_steps = 0  # since the last real row
        self.context_resets = 0  # how often the model's context was full and cleared
        self.can_act = False  # True if `act` is possible
        self.inspection = StateInspection()

    @property
    def is_running(self) -> bool:
        return self.count > 0

    def start_rollouts(
        self, rows: Sequence[Obs], carry: Carry | None, count: int, seed: int
    ) -> None:
        """Start `count` rollouts that continue these rows of one episode.

        `carry` is the policy's carry after the last row. The rollouts continue from it
        if the world model can (`PolicyWorldModelEnv`). Otherwise, the model observes
        the rows again, and `act` is not possible.
        """
        self.stop()
        self.model.seed(seed)
        context = {
            key: np.repeat(np.stack([row[key] for row in rows])[None], count, 0)
            for key in rows[0]
            if key in self._context_keys()
        }
        context = self._to_model(context)
        if self.crop is not None:
            context = self.crop.center_crop(context)
        if carry is not None and isinstance(self.model, PolicyWorldModelEnv):
            carry = pytree.tree_map(lambda x: _repeat(x, count), carry)
            self._state = self.model.resume(carry, context)
            self.can_act = True
        else:
            self._state = self.model.begin(context)
        self.count = count
        self.inspection = self._inspect()

    def step(self, action: Action) -> Obs:
        """Step all N rollouts with this action; return their next rows `(N, ...)`."""
        batch = {
            key: np.repeat(np.asarray(action[key])[None], self.count, 0)
            for key in self.act_space
        }
        before = self.inspection.context
        self._state, rows = self.model.step(self._state, self._to_model(batch))
        self.imagined_steps += 1
        self.inspection = self._inspect()
        after = self.inspection.context
        if before and after and after[0] < before[0]:
            self.context_resets += 1
        return rows

    def act(self) -> Action:
        """Return the action that the policy chooses in the first rollout."""
        assert isinstance(self.model, PolicyWorldModelEnv)
        action = self._to_env(self.model.act(self._state))
        return {key: np.asarray(value)[0] for key, value in action.items()}

    def _inspect(self) -> StateInspection:
        if isinstance(self.model, InspectableWorldModelEnv):
            return self.model.inspect(self._state)
        return StateInspection()

    def _context_keys(self) -> set[str]:
        """Return the keys of a row that the world model reads."""
        return {
            *self.model.obs_space,
            *self.model.act_space,
            "is_first",
            "is_last",
            "is_terminal",
            "reward",
        }


def _repeat(value: Any, count: int) -> Any:
    """Repeat a tensor of batch size 1 to batch size `count`; keep other values."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.repeat_interleave(count, 0)
