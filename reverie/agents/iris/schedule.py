"""Schedule of Δ-IRIS: epochs of collecting data and training each component.

An epoch takes a number of environment steps (more in the first epoch), then runs a
number of updates of each component in order. A component may start to train in a later
epoch (`start_after`). Epochs after `collect_epochs` only train. If an epoch takes more
steps than planned, the next one takes fewer. If `collect_epochs` is increased in a
resumed run, this affects only epochs that are not complete.

Environment steps are actions: unlike agent steps (see `run/clock.py`), the last row of
an episode is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping

from reverie.agents.iris.config import ComponentTrainingConfig, EpochScheduleConfig
from reverie.api import StateDict

COUNTERS = (
    *("epoch", "env_steps", "env_steps_goal", "goal_epoch", "updates"),
    *("last_epoch", "collected_epochs"),
)
"""Attributes of the schedule that are saved."""
MAX_UPDATES_DUE = 10
"""Maximum number of updates between two checks of the clock and of signals."""


class EpochSchedule:
    """Implements `api.Schedule`, `CountsEpochs` and `LimitsEnvSteps`.

    Counts environment steps, and the updates of the current epoch. `training` has the
    settings of each component, in the order in which they are trained.
    """

    def __init__(
        self,
        config: EpochScheduleConfig,
        training: Mapping[str, ComponentTrainingConfig],
    ):
        self.config, self.training = config, dict(training)
        self.epoch = 1
        self.env_steps = 0  # environment steps so far
        self.env_steps_goal = 0  # value of `env_steps` at which training starts
        self.goal_epoch = 0  # last epoch whose steps are included in the goal
        self.index = 0  # of the component to train, in `training`
        self.updates = 0  # updates of that component in this epoch
        self.last_epoch = 0  # of the last action or update
        self.collected_epochs = 0  # epochs whose data is collected
        self._advance()

    @property
    def finished(self) -> bool:
        return self.epoch > self.config.epochs

    @property
    def should_collect(self) -> bool:
        return not self.finished and self.env_steps < self.env_steps_goal

    @property
    def env_steps_left(self) -> float:
        return max(0, self.env_steps_goal - self.env_steps)

    @property
    def completed_epochs(self) -> int:
        return self.epoch - 1

    @property
    def planned_env_steps(self) -> int:
        config = self.config
        first = config.first_steps or config.steps
        others = min(config.epochs, config.collect_epochs) - 1
        return first + others * config.steps

    @property
    def uses_random_actions(self) -> bool:
        """True if actions are random: in the first epoch, unless `first_steps` is 0."""
        return self.epoch == 1 and self.config.first_steps > 0

    @property
    def component(self) -> str | None:
        """The component to train now; None while collecting."""
        if self.should_collect or self.finished:
            return None
        return list(self.training)[self.index]

    @property
    def updates_left(self) -> int:
        """Updates of all components left in this epoch; 0 while collecting."""
        if self.should_collect or self.finished:
            return 0
        planned = [x.updates_in(self.epoch) for x in self.training.values()]
        return sum(planned[self.index :]) - self.updates

    def updates_due(self, step: int) -> int:
        return min(MAX_UPDATES_DUE, self.updates_left)

    def add_env_steps(self, steps: int) -> None:
        was_collecting = self.should_collect
        self.last_epoch = min(self.epoch, self.config.epochs)
        self.env_steps += steps
        if was_collecting and not self.should_collect:
            self.collected_epochs += 1
        self._advance()

    def add_update(self) -> None:
        self.updates += 1
        self.last_epoch = min(self.epoch, self.config.epochs)
        self._advance()

    def state_dict(self) -> StateDict:
        component = list(self.training)[self.index]
        counters = {name: getattr(self, name) for name in COUNTERS}
        return {**counters, "component": component}

    def load_state_dict(self, state: StateDict) -> None:
        for name in COUNTERS:
            setattr(self, name, int(state[name]))
        self.index = list(self.training).index(state["component"])
        self._advance()

    def _add_goal(self) -> None:
        """Add the steps of an epoch to the goal when it starts, if it collects data."""
        is_start = (self.index, self.updates) == (0, 0) and not self.finished
        if is_start and self.goal_epoch < self.epoch <= self.config.collect_epochs:
            first = self.config.first_steps if self.epoch == 1 else 0
            self.env_steps_goal += first or self.config.steps
            self.goal_epoch = self.epoch

    def _advance(self) -> None:
        """Skip components and epochs that have no updates left."""
        self._add_goal()
        components = list(self.training.values())
        while not self.should_collect and not self.finished:
            if self.updates < components[self.index].updates_in(self.epoch):
                return
            self.index, self.updates = self.index + 1, 0
            if self.index == len(components):
                self.index = 0
                self.epoch += 1
                self._add_goal()
                # an epoch that only trains counts as collected when it starts
                trains_only = not self.should_collect and not self.finished
                self.collected_epochs += int(trains_only)
