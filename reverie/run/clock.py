"""`RunConfig`, the settings of the training loop, and `Clock`, which counts steps.

Units:

- **agent step**: one row of the replay, one decision of the policy in one environment
  (including the last row of an episode). `run.steps` and all `step` values count these.
  One iteration of the loop takes as many as there are environments.
- **frame**: one step of the simulator. With action repeat, an agent step is `repeat`
  frames. Logs and scores use frames on their x-axis.
- **update**: one call of `agent.train`, which is one gradient step for most agents.
- **replayed step**: one row that an update trains on. `run.train_ratio` is replayed
  steps per agent step: at ratio 32, an update on 16 x 64 rows is due every 32 steps.

Offline training has no environment steps; there, a step is an update.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

from reverie.api import Schedule, StateDict, UserError
from reverie.capabilities import CountsEpochs
from reverie.config import check_minimum
from reverie.distributed.heartbeat import RANK_TIMEOUT

INTERVALS: dict[str, dict[str, float]] = {
    "seconds": {"log": 120, "report": 300, "save": 900, "eval": 300},
    "steps": {"log": 1000, "report": 5000, "save": 10_000, "eval": 5000},
    "epochs": {"log": 1, "report": 10, "save": 1, "eval": 50},
}
"""Default of each `_every` setting, by the unit `run.clock`."""

MIN_RANK_TIMEOUT = 3
"""Minimum of `run.rank_timeout`; heartbeats are sent every two seconds."""
MAX_ENVS = 65_536
"""Maximum of `run.envs` and `run.eval_envs`; more would take hours to build."""


@dataclass(frozen=True)
class RunConfig:
    """The training loop."""

    steps: int = 10_000_000_000
    """Length of the run in agent steps; in offline training, in updates."""
    envs: int = 16
    """Number of environments that step together."""
    train_ratio: float = 32.0
    """Replayed steps per agent step. Ignored by agents with their own schedule."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Step the environments while the agent trains. The policy may then use weights
    that are one update old. `auto`: on with a CUDA GPU unless the run is deterministic.
    """
    prefill: int = 0
    """Agent steps with random actions at the start of the run."""
    pretrain: int = 0
    """Updates at the start of training, in addition to those of `train_ratio`; none if
    the run starts from a checkpoint."""
    clock: Literal["seconds", "steps", "epochs"] = "seconds"
    """Unit of the `_every` settings: seconds, agent steps (updates in offline
    training), or epochs of an agent that alternates between collecting data and
    training (Δ-IRIS). A flag that changes the unit sets all intervals to defaults in
    the new unit, except for those that are also given as flags."""
    log_every: float = INTERVALS["seconds"]["log"]
    """Interval between two writes of the metrics, in units of `clock`. For all `_every`
    settings, 0 means never and a negative value means after every iteration."""
    report_every: float = INTERVALS["seconds"]["report"]
    """Interval between two reports (losses and videos on extra batches; in offline
    training, evaluation on held-out data), in units of `clock`."""
    save_every: float = INTERVALS["seconds"]["save"]
    """Interval between two checkpoints, in units of `clock`."""
    eval_every: float = INTERVALS["seconds"]["eval"]
    """Interval between two evaluations of `train_eval`, in units of `clock`."""
    eval_envs: int = 4
    """Number of environments for evaluation."""
    eval_eps: int = 1
    """Episodes per evaluation of `train_eval`."""
    eval_configs: tuple[str, ...] = ()
    """Presets whose `env` settings apply to evaluation."""
    report_batches: int = 1
    """Batches per report."""
    from_checkpoint: str = ""
    """Initial weights: a run folder or a checkpoint folder, also of another
    implementation, or a checkpoint file of another implementation (`agent.pkl` of
    DreamerV3, `latest.pt` of dreamerv3-torch, `last.pt` of Δ-IRIS, `model_best.pt` of
    VTA)."""
    from_components: str = ".*"
    """Regular expression of the components to load from `from_checkpoint`."""
    episodes: str = ""
    """Recorded episodes to add to the replay buffer before the first step, in any
    format that `reverie data inspect` reads. `offline.read` describes their layout."""
    keep_last: int = 2
    """Number of most recent checkpoints to keep."""
    keep_every: int = 0
    """Also keep every Nth checkpoint; 0 for none."""
    keep_epochs: int = 0
    """Also save and keep a checkpoint after every Nth epoch of an agent that trains in
    epochs (Δ-IRIS); 0 for none."""
    max_nonfinite: int = 20
    """Number of consecutive updates that may be skipped because the loss or a gradient
    is not finite."""
    train_devices: tuple[int, ...] = ()
    """Indices of the GPUs to train on; one process is started for each. Empty for the
    first `devices` GPUs."""
    policy_devices: tuple[str, ...] = ()
    """Device on which the policy acts while data is collected: the index of a GPU, or
    `cpu`. Empty for the device that trains. If the agent trains on a GPU and `overlap`
    is on, the policy acts during updates, with the weights from before the update."""
    rank_timeout: float = RANK_TIMEOUT
    """With several processes: seconds after which a process that hangs ends the run.
    Updates and environment steps that are always slow may take longer (see
    docs/scale.md)."""

    def __post_init__(self) -> None:
        check_minimum(self, "run.", envs=1, steps=1, eval_envs=1, eval_eps=1)
        check_minimum(self, "run.", max_nonfinite=1, train_ratio=0, pretrain=0)
        check_minimum(self, "run.", keep_last=1, keep_every=0, keep_epochs=0)
        check_minimum(self, "run.", rank_timeout=MIN_RANK_TIMEOUT)
        for name in ("envs", "eval_envs"):
            if getattr(self, name) > MAX_ENVS:
                raise UserError(
                    f"run.{name} must be at most {MAX_ENVS:,}, not "
                    f"{getattr(self, name):,}.\n  Fix: --run.{name} 16"
                )
        if math.isinf(self.train_ratio):
            raise UserError(
                "run.train_ratio must be finite.\n  Fix: --run.train_ratio 32"
            )


class TrainRatio:
    """Schedule with a constant number of updates per agent step.

    The number may be a fraction: an update is due when fractions have added up to 1.
    """

    should_collect = True
    finished = False

    def __init__(self, updates_per_step: float, pretrain: int = 0):
        assert updates_per_step >= 0
        self.updates_per_step, self.pretrain = updates_per_step, pretrain
        self.trained_step: float | None = None
        """Agent step up to which all due updates were returned by `updates_due`."""

    def updates_due(self, step: int) -> int:
        """Return the number of updates that became due since the last call."""
        if self.updates_per_step == 0:
            return 0
        if self.trained_step is None:  # one update at the first call
            self.trained_step = step
            return 1 + self.pretrain
        due = int((step - self.trained_step) * self.updates_per_step)
        self.trained_step += due / self.updates_per_step
        return due

    def add_env_steps(self, steps: int) -> None:
        pass

    def add_update(self) -> None:
        pass

    def state_dict(self) -> StateDict:
        return {"trained_step": self.trained_step}

    def load_state_dict(self, state: StateDict) -> None:
        self.trained_step = state["trained_step"]


class Clock:
    """Counts steps and updates, and decides when to train, log, report and save."""

    def __init__(self, config: RunConfig, schedule: Schedule, repeat: int = 1):
        self.schedule = schedule
        self.epoch_schedule = schedule if isinstance(schedule, CountsEpochs) else None
        """The schedule, if it counts epochs."""
        self.repeat = repeat
        self.max_steps = config.steps
        self.step = 0
        self.updates = 0
        self.updates_left = 0
        """Updates that are due and not run yet; above 0 between two iterations only if
        the run was asked to stop."""
        self._unit = config.clock
        self._every = {
            "log": config.log_every,
            "report": config.report_every,
            "save": config.save_every,
            "eval": config.eval_every,
        }
        self._keep_epochs = config.keep_epochs if self.epoch_schedule else 0
        self._collected_epochs = 0  # at the last call of `collection_ended`
        self._checked_epochs = 0  # completed at the last call of `_is_epoch_to_keep`
        self._restart_intervals()

    @property
    def frames(self) -> int:
        """Simulator steps so far."""
        return self.step * self.repeat

    @property
    def running(self) -> bool:
        """True if agent steps remain, or updates for the steps so far."""
        has_work = self.step < self.max_steps or not self.should_collect
        return has_work and not self.schedule.finished

    @property
    def should_collect(self) -> bool:
        """True if the loop should act before it trains again."""
        return self.schedule.should_collect and not self.updates_left

    def advance(self, steps: int, env_steps: int = 0) -> None:
        """Count agent steps; `env_steps` is the number of them with an executed action.

        The action in the last row of an episode is not executed.
        """
        self.step += steps
        self.schedule.add_env_steps(env_steps)

    def add_update(self) -> None:
        """Count one update."""
        self.updates += 1
        self.updates_left = max(0, self.updates_left - 1)
        self.schedule.add_update()

    @property
    def completed_epochs(self) -> int | None:
        """Epochs that are collected and trained; None if epochs are not counted."""
        return self.epoch_schedule.completed_epochs if self.epoch_schedule else None

    @property
    def ends_after_epochs(self) -> bool:
        """True if the run ends after all epochs; False if after `run.steps`."""
        schedule = self.epoch_schedule
        return schedule is not None and schedule.planned_env_steps <= self.max_steps

    def collection_ended(self) -> bool:
        """True once after the collection of each epoch, if epochs are counted."""
        before, schedule = self._collected_epochs, self.epoch_schedule
        self._collected_epochs = schedule.collected_epochs if schedule else 0
        return self._collected_epochs != before

    def updates_due(self, ready: bool) -> int:
        """Number of updates to run now; 0 until the replay is `ready`.

        Updates that were due when the run was interrupted come first.
        """
        if ready and not self.updates_left:
            self.updates_left = self.schedule.updates_due(self.step)
        return self.updates_left if ready else 0

    def every(self, name: str) -> bool:
        """True if `name` (log, report, save, eval) is due; if so, restart its interval.

        In steps and epochs, intervals end at multiples of their length.
        """
        interval = self._every[name]
        keeps_epoch = name == "save" and self._is_epoch_to_keep()
        if interval <= 0:
            return keeps_epoch or interval < 0
        now = self._now()
        if now - self._last[name] < interval:
            return keeps_epoch
        # an iteration of the loop takes several steps at once, so round down
        self._last[name] = now if self._unit == "seconds" else now - (now % interval)
        return True

    def state_dict(self) -> StateDict:
        return {
            "step": self.step,
            "updates": self.updates,
            "updates_left": self.updates_left,
            "completed_epochs": self.completed_epochs,
            "schedule": self.schedule.state_dict(),
            "last": None if self._unit == "seconds" else dict(self._last),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.step, self.updates = state["step"], state["updates"]
        self.updates_left = state["updates_left"]
        self.schedule.load_state_dict(state["schedule"])
        self._restart_intervals()
        if self._unit != "seconds" and state["last"]:
            self._last |= state["last"]

    def _restart_intervals(self) -> None:
        schedule = self.epoch_schedule
        self._last = dict.fromkeys(self._every, self._now())
        self._collected_epochs = schedule.collected_epochs if schedule else 0
        self._checked_epochs = self.completed_epochs or 0

    def _is_epoch_to_keep(self) -> bool:
        """True once after every epoch whose checkpoint is kept (`run.keep_epochs`)."""
        before, self._checked_epochs = self._checked_epochs, self.completed_epochs or 0
        every = self._keep_epochs
        return bool(every) and before // every != self._checked_epochs // every

    def _now(self) -> float:
        """Return the current time in the unit `run.clock`."""
        if self._unit == "seconds":
            return time.monotonic()
        if self._unit == "steps":
            return self.step
        return self.completed_epochs or 0
