"""What counts as a step, and when each thing is due.

Every count in Reverie is one of these, and the loop prints them when it starts:

- **agent step**: one row of replay, i.e. one decision of the policy in one environment
  (the row that closes an episode included). `run.steps` and all `step` values count
  these; one turn of the loop takes as many as there are environments.
- **frame**: one step of the simulator. An agent step is `repeat` frames, where the
  environment repeats actions; logs and scores use frames on their x-axis.
- **update**: one call of `agent.train`, one gradient step for most agents.
- **replayed step**: one row that an update trained on. `run.train_ratio` is replayed
  steps per agent step, so one update of 16 x 64 rows at ratio 32 is due every 32 steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from reverie.api import Schedule, StateDict, UserError


@dataclass(frozen=True)
class RunConfig:
    steps: int = 10_000_000_000
    """Agent steps in all."""
    envs: int = 16
    """Environments that step together."""
    train_ratio: float = 32.0
    """Replayed steps per agent step."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Act while the learner trains: environments step meanwhile, and the policy may use
    weights that are an update old. By itself on a CUDA GPU, but not in a deterministic
    run."""
    prefill: int = 0
    """Agent steps taken at random before the policy takes over."""
    clock: Literal["seconds", "steps", "phases"] = "seconds"
    """The unit of every `_every` below. 0 is never, below 0 is always. Phases are those
    of an agent that acts and trains in turns (the epochs of Δ-IRIS)."""
    log_every: float = 120
    report_every: float = 300
    save_every: float = 900
    eval_every: float = 300
    eval_envs: int = 4
    eval_eps: int = 1
    """Episodes of one evaluation."""
    eval_configs: tuple[str, ...] = ()
    """Blocks whose settings of `env` hold wherever the policy is evaluated."""
    report_batches: int = 1
    from_checkpoint: str = ""
    """A run or checkpoint folder whose weights to start from, or a file that the
    original of the agent saved (`agent.pkl` of DreamerV3, `last.pt` of Δ-IRIS,
    `model_best.pt` of VTA)."""
    from_components: str = ".*"
    """Pattern over component names: which of those weights."""
    episodes: str = ""
    """Recorded episodes, in any format that `reverie data inspect` reads, to add to the
    replay buffer before the first step."""
    keep_last: int = 2
    """Checkpoints kept."""
    keep_every: int = 0
    """Besides them, keep every Nth checkpoint for good."""
    max_nonfinite: int = 20
    """Updates in a row that may be skipped for a loss that is not finite."""

    def __post_init__(self) -> None:
        for name in ("envs", "steps", "eval_envs", "eval_eps", "max_nonfinite"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"run.{name} is {getattr(self, name)}, but must be at least 1.\n"
                    f"  Fix: --run.{name} 1"
                )
        if not 0 <= self.train_ratio < float("inf"):
            raise UserError(
                f"run.train_ratio is {self.train_ratio}, but must be a number of steps."
                "\n  Fix: --run.train_ratio 32"
            )


class TrainRatio:
    """A constant number of updates per agent step; fractions carry over."""

    should_collect = True
    finished = False
    phase = 0

    def __init__(self, updates_per_step: float):
        assert updates_per_step >= 0
        self.updates_per_step = updates_per_step
        self.paid: float | None = None

    def updates_due(self, step: int) -> int:
        if self.updates_per_step == 0:
            return 0
        if self.paid is None:  # the first call gives one update, to begin with
            self.paid = step
            return 1
        due = int((step - self.paid) * self.updates_per_step)
        self.paid += due / self.updates_per_step
        return due

    def add_env_steps(self, steps: int) -> None:
        pass

    def add_update(self) -> None:
        pass

    def state_dict(self) -> StateDict:
        return {"paid": self.paid}

    def load_state_dict(self, state: StateDict) -> None:
        self.paid = state["paid"]


class Clock:
    """Counts steps and updates, and says when something is due."""

    def __init__(self, config: RunConfig, schedule: Schedule, repeat: int = 1):
        self.schedule = schedule
        self.repeat = repeat
        self.steps = config.steps
        self.step = 0
        self.updates = 0
        self._unit = config.clock
        self._every = {
            "log": config.log_every,
            "report": config.report_every,
            "save": config.save_every,
            "eval": config.eval_every,
        }
        self._last = {name: self._now(name) for name in self._every}
        self._phase = schedule.phase

    @property
    def frames(self) -> int:
        return self.step * self.repeat

    @property
    def running(self) -> bool:
        """Whether steps are left to take, or updates to make for those taken."""
        schedule = self.schedule
        return not schedule.finished and (
            self.step < self.steps or not schedule.should_collect
        )

    @property
    def should_collect(self) -> bool:
        """Whether to act in this turn; some rhythms only train for a while."""
        return self.schedule.should_collect

    def advance(self, steps: int, env_steps: int = 0) -> None:
        """Count agent steps, and the environment steps (actions taken) among them."""
        self.step += steps
        self.schedule.add_env_steps(env_steps)

    def add_update(self) -> None:
        """Count one update."""
        self.updates += 1
        self.schedule.add_update()

    def phase_ended(self) -> bool:
        """True once after each collection phase of the schedule."""
        before, self._phase = self._phase, self.schedule.phase
        return self._phase != before

    def updates_due(self, ready: bool) -> int:
        """How many updates to do now; none is owed for steps before `ready`."""
        return self.schedule.updates_due(self.step) if ready else 0

    def every(self, name: str) -> bool:
        """Whether `name` is due again; the first interval must pass before."""
        interval = self._every[name]
        if interval <= 0:
            return interval < 0
        now = self._now(name)
        if now - self._last[name] < interval:
            return False
        # In steps, stay on the grid: a turn of the loop may overshoot by a few.
        self._last[name] = now if self._unit == "seconds" else now - (now % interval)
        return True

    def state_dict(self) -> StateDict:
        return {
            "step": self.step,
            "updates": self.updates,
            "schedule": self.schedule.state_dict(),
            "last": None if self._unit == "seconds" else dict(self._last),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.step, self.updates = state["step"], state["updates"]
        self.schedule.load_state_dict(state["schedule"])
        self._phase = self.schedule.phase
        fresh = {name: self._now(name) for name in self._every}
        counted = self._unit != "seconds" and state["last"]
        self._last = {**fresh, **state["last"]} if counted else fresh

    def _now(self, name: str) -> float:
        if self._unit == "seconds":
            return time.monotonic()
        if self._unit == "steps":
            return self.step
        schedule = self.schedule
        # A phase is over when it was learnt from; what was collected is saved before.
        is_over = schedule.should_collect or schedule.finished
        return schedule.phase - int(not is_over and name != "save")
