"""Run the policy on the rows of an episode whose actions it may not have chosen.

The actions may be those of a human or of a recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.capabilities import CanReplaceAction, InspectableWorldModelEnv
from reverie.play.load import LoadedRun


class PolicyState:
    """Carry of the policy after a row, and the action that the policy chooses there."""

    def __init__(self, loaded: LoadedRun):
        self.loaded = loaded
        self.reset()

    def reset(self) -> None:
        self.carry: Any = None
        self.choice: Action | None = None  # of the policy
        self.kl: float | None = None  # KL(posterior || prior) in the last row
        self._step = -1

    def run(self, rows: Sequence[Obs], step: int) -> None:
        """Run the policy on all rows up to a step, from its initial carry."""
        self.reset()
        if self.loaded.policy is None:
            return
        for number, row in enumerate(rows):
            if number:
                self._replace_action(rows[number - 1])
            self._observe(row, first=number == 0)
        self._step = step

    def advance(self, previous: Obs, row: Obs, step: int) -> bool:
        """Run the policy on a row; False if it did not run on the step before.

        `previous` is the row of the step before, with the actions that were taken.
        """
        if self.loaded.policy is None or step == self._step:
            return True
        if self._step < 0 or step != self._step + 1:
            return False
        self._replace_action(previous)
        self._observe(row, first=False)
        self._step = step
        return True

    def _observe(self, row: Obs, first: bool) -> None:
        """Run the policy on one row."""
        policy, model = self.loaded.policy, self.loaded.world_model_env
        assert policy is not None
        batch = {k: np.asarray(v)[None] for k, v in row.items() if k[:4] != "log/"}
        batch["is_first"] = np.array([first])
        if self.carry is None:
            self.carry = policy.initial(1)
        self.kl = None
        if isinstance(model, InspectableWorldModelEnv) and not first:
            crop = self.loaded.crop
            cropped = batch if crop is None else crop.center_crop(batch)
            self.kl = model.observation_kl(self.carry, cropped)
        self.carry, action, _ = policy.policy(self.carry, batch, "eval")
        self.choice = {
            key: np.array(np.asarray(action[key])[0]) for key in self.loaded.act_space
        }

    def _replace_action(self, row: Obs) -> None:
        """Replace the previous actions in the carry by those that were taken."""
        if not isinstance(self.loaded.agent, CanReplaceAction):
            return
        batch = {key: np.asarray(row[key])[None] for key in self.loaded.act_space}
        batch = self.loaded.to_model_units(batch)
        self.carry = self.loaded.agent.replace_action(self.carry, batch)
