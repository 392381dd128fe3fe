"""`OfflineRun`: builds, saves and restores all parts of an offline training run."""

from __future__ import annotations

import math
from pathlib import Path

from reverie.api import Metrics, StateDict, UserError
from reverie.log.timer import timed
from reverie.run import checkpoint
from reverie.run.base_run import BaseRun
from reverie.run.checkpoint import Checkpoints
from reverie.run.clock import Clock, TrainRatio
from reverie.run.config import Config
from reverie.run.factory import load_initial_weights, make_agent
from reverie.run.offline.datasets import OfflineDataset
from reverie.run.size import describe_size
from reverie.storage.run_spaces import write_spaces


class OfflineRun(BaseRun):
    """An offline training run: its agent, feed, clock, log and checkpoints.

    `saved_config` is written to the run folder. It has the settings of the user; in
    `config`, `offline.epochs` is converted to updates (`run.steps`).
    """

    def __init__(
        self,
        config: Config,
        dataset: OfflineDataset,
        saved_config: Config | None = None,
        profile: int = 0,
    ):
        super().__init__(config, profile)
        self.saved_config = saved_config or config
        self.dataset = dataset
        self.best = Checkpoints(self.path / "best", 1)
        """Folder with the checkpoint of the lowest evaluation loss."""
        self.best_loss = math.inf
        self.evals_since_best = 0
        self._saved_loss = math.inf  # evaluation loss of the checkpoint in `best`
        self._saved_step = -1  # of the last checkpoint in `ckpt`
        self._evaluated_step = -1  # of the last evaluation

    def _open(self) -> None:
        config, dataset = self.config, self.dataset
        self._cleanup.callback(dataset.close)
        if config.run.clock == "epochs":
            raise UserError(
                "run.clock is epochs, but offline training has no epochs of collecting "
                "data, so nothing would be logged or saved.\n"
                "  Fix: --run.clock steps, with all `run.*_every` in updates."
            )
        super()._open()
        self.status.begin("building the agent")
        self.agent = make_agent(config, dataset, self.device, self.precision)
        self._connect_ranks(dataset)
        self.feed = dataset.open_feed(self.agent, self.device)
        self._cleanup.callback(self.feed.close)
        write_spaces(self.path, dataset.obs_space, dataset.act_space)
        self.clock = Clock(config.run, TrainRatio(0))
        self._open_log(config.run.steps)

    # Used by the training loop.

    def start(self) -> None:
        """Restore the newest checkpoint, or prepare the agent of a new run."""
        self.status.begin("loading the checkpoint, if there is one")
        newest = self.newest_checkpoint()
        self.checkpoints.prune()
        if newest:
            with checkpoint.explain_mismatch(newest):
                self._restore(newest)
            self.print_message(f"Resumed {newest.name} at update {self.clock.step}.")
            return
        # remove the log of an earlier run in this folder that saved no checkpoint
        self.logger.truncate_after(-1)
        if self.config.run.from_checkpoint:
            self.print_message(load_initial_weights(self.agent, self.config))
        self.status.begin("preparing the agent for the data")
        self.dataset.prepare_agent(self.agent)
        self.stopper.can_save = True

    def print_summary(self) -> None:
        """Print agent, data, device, run folder and number of updates."""
        config = self.config
        epochs = ""
        # `offline.epochs` gives fewer updates than the `run.steps` of the user
        if config.run.steps < self.saved_config.run.steps:
            epochs = f" (offline.epochs {config.offline.epochs})"
        self.print_message(
            f"{config.agent} on {config.task}, {self.device} in {self.precision}\n"
            f"{describe_size(config, is_new=not self.clock.step)}"
            f"  run folder {self.path}\n"
            f"  {config.run.steps:,} updates{epochs}, "
            f"{self.dataset.describe(self.agent)}"
        )

    @property
    def is_complete(self) -> bool:
        """True after all updates, or `patience` evaluations without improvement."""
        patience = self.dataset.patience
        is_stalled = bool(patience) and self.evals_since_best >= patience
        return is_stalled or self.clock.step >= self.config.run.steps

    @timed("report")
    def evaluate(self) -> Metrics:
        """Evaluate and log the metrics; save to `best` if the loss is the lowest."""
        self.status.begin("evaluation on held-out data")
        metrics = self.dataset.evaluate(self.agent, self.feed)
        self.logger.add(metrics, prefix="report")
        self._evaluated_step = self.clock.step
        loss = float(metrics["loss"])
        self.evals_since_best += 1
        if loss < self.best_loss:
            self.best_loss, self.evals_since_best = loss, 0
            # a resumed run may repeat evaluations; `best` may already have a lower loss
            if loss <= self._saved_loss:
                self._saved_loss = loss
                self.save(self.best)
        return metrics

    @timed("save")
    def save(self, checkpoints: Checkpoints) -> None:
        """Write a checkpoint to `ckpt` or `best`."""
        self._begin_save()
        loop: StateDict = {
            **self._loop_state(),
            "feed": self.feed.state_dict(),
            "best_loss": self.best_loss,
            "evals_since_best": self.evals_since_best,
        }
        parts = {"agent": self.agent_state(), "loop": loop, **self.dataset.parts()}
        checkpoints.save(self.clock.step, parts)
        checkpoints.prune()
        if checkpoints is self.checkpoints:
            self._saved_step = self.clock.step

    def finish(self) -> None:
        """Save, evaluate and log a last time; raise if the run was interrupted."""
        if self.was_finished:
            return
        self._check_stopped_early()
        if self._saved_step != self.clock.step and self._should_save_at_end:
            self.save(self.checkpoints)
        if not self.stopper.is_set() and self._evaluated_step != self.clock.step:
            self.evaluate()
        self._write_final_log()
        self.stopper.raise_if_stopped()

    def _restore(self, path: Path) -> None:
        self.agent.load_state_dict(checkpoint.read_part(path, "agent"))
        loop = checkpoint.read_part(path, "loop")
        self.best_loss = float(loop["best_loss"])
        self.evals_since_best = int(loop["evals_since_best"])
        self._restore_loop(loop)
        self.feed.load_state_dict(loop["feed"])
        if best := self.best.newest():  # may be newer than the checkpoint
            loop = checkpoint.read_part(best, "loop")
            self._saved_loss = float(loop["best_loss"])
