"""The carry of the policy in an episode whose actions it may not have chosen.

The actions of a human or of a recording may differ from those of the policy. The carry
contains the previous action, which is replaced by the action that was really taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.capabilities import CanReplaceAction, InspectableWorldModelEnv
from reverie.play.load import LoadedRun


class PolicyState:
    """Carry of the policy after a row, and the action that the policy chooses there.

    A row has the observation and reward of a step, and the action taken there, if it is
    known. All attributes stay None if the run has no policy.
    """

    def __init__(self, loaded: LoadedRun):
        self.loaded = loaded
        self.reset()

    def reset(self) -> None:
        """Clear the state, before the first row of an episode."""
        self.carry: Any = None
        self.policy_action: Action | None = None  # chosen in the last row
        self.kl: float | None = None  # KL(posterior || prior) in the last row
        self._step = -1  # step of the last row; -1 if there is none

    def run(self, rows: Sequence[Obs], step: int) -> None:
        """Compute the state after these rows, starting from the initial carry.

        The last row is that of `step`. The first row may be in the middle of an episode
        if earlier ones are not stored; the policy sees it as the first step.
        """
        self.reset()
        if self.loaded.policy is None:
            return
        for number, row in enumerate(rows):
            if number:
                self._replace_action(rows[number - 1])
            self._observe(row, first=number == 0)
        self._step = step

    def advance(self, previous: Obs, row: Obs, step: int) -> bool:
        """Continue from the state of the previous step, with the row of `step`.

        `previous` is the row of the step before, with the action that was taken. Return
        False if the state is not that of the previous step; the caller then uses `run`.
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
        """Compute KL(posterior || prior) of a row, then run the policy on it."""
        policy, model = self.loaded.policy, self.loaded.world_model_env
        assert policy is not None
        # keys with the prefix `log/` are for display and no input of the policy
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
        self.policy_action = {
            key: np.array(np.asarray(action[key])[0]) for key in self.loaded.act_space
        }

    def _replace_action(self, row: Obs) -> None:
        """Replace the action in the carry by the action of this row."""
        if not isinstance(self.loaded.agent, CanReplaceAction):
            return
        batch = {key: np.asarray(row[key])[None] for key in self.loaded.act_space}
        batch = self.loaded.to_model_units(batch)
        self.carry = self.loaded.agent.replace_action(self.carry, batch)
