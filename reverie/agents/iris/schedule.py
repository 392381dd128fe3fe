"""The schedule of Δ-IRIS: collect for a while, then train one part after the other.

An epoch is a number of environment steps (more in the first), then a number of updates
of each part, in order; a part begins after some epochs. Late epochs only train. What is
collected beyond an epoch's share counts for the next. A run that is given more epochs
owes nothing for those that only trained.

Environment steps are actions taken: unlike agent steps (see `run/clock.py`), the row
that closes an episode is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reverie.api import StateDict, UserError

COUNTS = ("epoch", "taken", "goal", "counted", "done", "phase")
TURN = 10
"""Most updates between two looks of the loop at its clock and its signals."""


@dataclass(frozen=True)
class EpochsConfig:
    """How long each epoch should_collect; the defaults are those for Crafter."""

    epochs: int = 1000
    """Epochs in all."""
    collect_epochs: int = 991
    """Epochs that collect; those after them only train."""
    first_steps: int = 100_000
    """Environment steps of the first epoch, all taken at random; 0 for as many as the
    others, taken by the policy."""
    steps: int = 10_000
    """Environment steps of every other epoch."""

    def __post_init__(self) -> None:
        least = {"epochs": 1, "collect_epochs": 1, "first_steps": 0, "steps": 1}
        for name, count in least.items():
            if getattr(self, name) < count:
                raise UserError(
                    f"iris.schedule.{name} is {getattr(self, name)}, but must be at "
                    f"least {count}.\n  Fix: --iris.schedule.{name} {count}"
                )


@dataclass(frozen=True)
class Share:
    """How much one part trains in an epoch."""

    steps: int
    """Updates per epoch."""
    first_steps: int
    """Updates of the first epoch, if it trains already; 0 for as many."""
    start_after: int
    """Epochs before it begins."""

    def in_epoch(self, epoch: int) -> int:
        if epoch <= self.start_after:
            return 0
        return self.first_steps if epoch == 1 and self.first_steps else self.steps


class Epochs:
    """Implements `api.Schedule`. `part` is what to train now, None while collecting."""

    def __init__(self, config: EpochsConfig, shares: Mapping[str, Share]):
        self.config, self.shares = config, dict(shares)
        self.epoch = 1
        self.taken = 0  # environment steps
        self.goal = 0  # how many there are to be when this epoch has collected
        self.counted = 0  # the last epoch whose share is in the goal
        self.index = 0  # of the part in training
        self.done = 0  # updates of that part in this epoch
        self.phase = 0  # epochs that are through with collecting
        self._settle()

    @property
    def finished(self) -> bool:
        return self.epoch > self.config.epochs

    @property
    def should_collect(self) -> bool:
        return not self.finished and self.taken < self.goal

    @property
    def is_random(self) -> bool:
        """Whether what is collected now is to be random."""
        return self.epoch == 1 and self.config.first_steps > 0

    @property
    def part(self) -> str | None:
        if self.should_collect or self.finished:
            return None
        return list(self.shares)[self.index]

    @property
    def left(self) -> int:
        """Updates left in this epoch, before more is collected."""
        if self.should_collect or self.finished:
            return 0
        rest = [s.in_epoch(self.epoch) for s in self.shares.values()][self.index :]
        return sum(rest) - self.done

    def updates_due(self, step: int) -> int:
        return min(TURN, self.left)

    def add_env_steps(self, steps: int) -> None:
        """So many actions were taken."""
        before = self.should_collect
        self.taken += steps
        if before and not self.should_collect:
            self.phase += 1
        self._settle()

    def add_update(self) -> None:
        """The part that was due has been updated once."""
        self.done += 1
        self._settle()

    def state_dict(self) -> StateDict:
        part = list(self.shares)[self.index]
        return {**{name: getattr(self, name) for name in COUNTS}, "part": part}

    def load_state_dict(self, state: StateDict) -> None:
        state = {**self._of_older(int(state["epoch"])), **state}
        for name in COUNTS:
            setattr(self, name, int(state[name]))
        self.index = list(self.shares).index(state["part"])
        self._settle()

    def _of_older(self, epoch: int) -> StateDict:
        """What checkpoints did not keep once."""
        config = self.config
        first = config.first_steps or config.steps
        goal = first + (min(epoch, config.collect_epochs) - 1) * config.steps
        return {"goal": goal, "counted": epoch}

    def _begin(self) -> None:
        """If an epoch begins now, and should_collect: add its share to the goal."""
        begins = (self.index, self.done) == (0, 0) and not self.finished
        if begins and self.counted < self.epoch <= self.config.collect_epochs:
            first = self.config.first_steps if self.epoch == 1 else 0
            self.goal += first or self.config.steps
            self.counted = self.epoch

    def _settle(self) -> None:
        """Move on from parts, and epochs, that have nothing left to train."""
        self._begin()
        shares = list(self.shares.values())
        while not self.should_collect and not self.finished:
            if self.done < shares[self.index].in_epoch(self.epoch):
                return
            self.index, self.done = self.index + 1, 0
            if self.index == len(shares):
                self.index = 0
                self.epoch += 1
                self._begin()
                self.phase += int(not self.should_collect and not self.finished)
