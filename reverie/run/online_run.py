"""The parts of an online training run: built, saved and restored together."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from reverie import envs as suites
from reverie.api import Metrics, StateDict, UserError, VecEnv
from reverie.capabilities import CountsEpochs, NeedsStatistics
from reverie.datasets.episodes import iterate_episodes
from reverie.evaluation.episodes import summarize
from reverie.replay import device_copy
from reverie.replay.buffer import Replay
from reverie.replay.config import Storage
from reverie.replay.feed import ReplayFeed
from reverie.rows import Rows
from reverie.run import checkpoint, device
from reverie.run.base_run import BaseRun
from reverie.run.clock import Clock, TrainRatio
from reverie.run.collectors import InProcessCollector, OverlappedCollector
from reverie.run.config import Config, for_evaluation
from reverie.run.evaluator import Evaluator
from reverie.run.factory import (
    FIRST_EVAL_ENV,
    MakeEnv,
    in_workers,
    load_initial_weights,
    make_agent,
    make_envs,
)
from reverie.run.folder import write_config
from reverie.run.memory import explain_out_of_memory
from reverie.run.size import describe_size, smaller_size
from reverie.storage.limits import InvalidFile
from reverie.storage.os_errors import WriteFailed
from reverie.storage.run_spaces import write_spaces

EVAL_REPLAY = "eval_replay"


class OnlineRun(BaseRun):
    """The parts of an online training run.

    Entering it builds the parts; `start` restores them if the folder has a checkpoint;
    `save` writes one checkpoint of all parts. If an error ends the run while its parts
    are consistent, the run is saved first; otherwise the last checkpoint is kept.
    """

    def __init__(
        self, config: Config, make_env: MakeEnv | None = None, evaluate: bool = False
    ):
        super().__init__(config)
        self.make_env = make_env
        self._evaluates = evaluate
        self.checkpoints.required = (*checkpoint.REQUIRED, "collector", "replay")

    def _open(self) -> None:
        super()._open()
        config = self.config
        self.overlap = device.pick_overlap(
            config.run.overlap, self.device, config.deterministic
        )
        self.status.begin("building the environments")
        self.envs = self._open_envs(config, config.run.envs, 0)
        self.status.begin("building the agent")
        self.agent = make_agent(config, self.envs, self.device, self.precision)
        random_agent = make_agent(
            config, self.envs, self.device, self.precision, "random"
        )
        counts_epochs = isinstance(self.agent.schedule, CountsEpochs)
        if config.run.clock == "epochs" and not counts_epochs:
            raise UserError(
                f"run.clock is epochs, but the agent {config.agent!r} has no epochs, "
                "so nothing would be logged or saved.\n  Fix: --run.clock seconds"
            )
        write_spaces(self.path, self.envs.obs_space, self.envs.act_space)
        self.replay = self._open_replay(
            config.run.envs, self.path / "replay", config.replay.storage
        )
        if self.replay.plan.wanted:
            self.print_message(self.replay.plan.describe_reduction())
            replay = replace(config.replay, capacity=self.replay.capacity)
            self.config = config = replace(config, replay=replay)
            write_config(self.path, config)
        self.replays = {"replay": self.replay}
        """Replay buffers by the name of their folder and part of the checkpoint."""
        self.replay_indices: dict[Path, dict[str, StateDict]] = {}
        """Saved replay buffers of the kept checkpoints."""
        self.feed = self._open_feed(self.replay)
        self.clock = Clock(
            config.run,
            self.agent.schedule or self._train_ratio(),
            suites.action_repeat(config.task, config.env),
        )
        self._open_log(config.run.steps * self.clock.repeat, self.envs.render_fps)
        make_collector = OverlappedCollector if self.overlap else InProcessCollector
        self.collector = make_collector(
            self.envs,
            self.agent,
            random_agent,
            config.run.prefill,
            config.explore,
            self.timer,
            self.rates,
        )
        self.evaluator = self._open_evaluator() if self._evaluates else None

    def _open_envs(self, config: Config, count: int, first: int) -> VecEnv:
        # Environments can only step in parallel with training in their own processes.
        in_parallel = self.overlap and self.make_env is None
        config = in_workers(config) if in_parallel else config
        envs = make_envs(config, count, first, self.make_env)
        self._cleanup.callback(envs.close)
        return envs

    def _open_evaluator(self) -> Evaluator:
        """Make the environments and the replay buffer of the evaluation."""
        config = self.config
        count = config.run.eval_envs
        envs = self._open_envs(for_evaluation(config), count, FIRST_EVAL_ENV)
        replay = self._open_replay(count, self.path / EVAL_REPLAY, "ram", 0.1)
        self.replays[EVAL_REPLAY] = replay
        return Evaluator(envs, self._open_feed(replay), config.run.eval_eps)

    def _open_replay(
        self, streams: int, directory: Path, storage: Storage, fraction: float = 1.0
    ) -> Replay:
        """Make a replay buffer for observations, actions and the agent's extras.

        Its capacity is this fraction of `replay.capacity`.
        """
        config = self.config
        spaces = {**self.envs.obs_space, **self.envs.act_space}
        capacity = int(config.replay.capacity * fraction)
        if not config.run.episodes:  # never more than the run will collect
            most = max(config.run.steps, self.checkpoints.step)
            capacity = min(capacity, most + streams)
        with explain_out_of_memory(
            config, "building the replay buffer", "replay.capacity"
        ):
            replay = Replay(
                {key: space for key, space in spaces.items() if key[:4] != "log/"},
                self.agent.extras,
                replace(config.replay, storage=storage),
                capacity=max(1, capacity),
                num_envs=streams,
                windows=self.agent.windows,
                directory=directory,
                seed=config.seed,
                exact_extras=config.deterministic,
                smaller_extras=smaller_size(config),
            )
        self._cleanup.callback(replay.close)
        return replay

    def _open_feed(self, replay: Replay) -> ReplayFeed:
        prefetch = self.device.type == "cuda" and not self.config.deterministic
        feed = ReplayFeed(
            replay,
            self.agent.windows,
            self.device,
            prefetch=prefetch,
            on_device=device_copy.fits_on_device(replay, self.device),
        )
        self._cleanup.callback(feed.close)
        return feed

    def _train_ratio(self) -> TrainRatio:
        window = self.agent.windows.get("train")
        if window is None:
            return TrainRatio(0)
        run = self.config.run
        pretrain = 0 if run.from_checkpoint else run.pretrain
        return TrainRatio(run.train_ratio / (window.batch * window.length), pretrain)

    # Used by the training loop.

    def start(self) -> None:
        """Restore the newest checkpoint, or reset the environments of a new run."""
        self.status.begin("loading the checkpoint, if there is one")
        newest = self.newest_checkpoint()
        kept = self.checkpoints.prune()
        if newest:
            with checkpoint.explain_mismatch(newest):
                self._restore(newest)
            self._delete_unused_replay_files(kept)
            self.print_message(f"Resumed {newest.name} at {self._position()}.")
            return
        # Files of a run that was killed before its first checkpoint.
        self._delete_unused_replay_files([])
        self.logger.truncate_after(-1)
        if self.config.run.from_checkpoint:
            self.print_message(load_initial_weights(self.agent, self.config))
        elif isinstance(self.agent, NeedsStatistics) and self.agent.needs_statistics:
            raise UserError(
                "Images can be standardized by `dataset` only with recordings."
                "\n  Fix: --configs standardize_batch, or weights that include the "
                "statistics (--run.from_checkpoint)."
            )
        self.status.begin("resetting the environments")
        if self.config.run.episodes:
            self.status.begin("reading the recorded episodes")
            self._add_recorded_episodes(self.config.run.episodes)
        self.collector.reset()

    def _add_recorded_episodes(self, path: str) -> None:
        spaces = self.envs.obs_space, self.envs.act_space
        for _, episode in iterate_episodes(path, *spaces, self.config.offline.read):
            self.replay.add_episode(episode)
        self.print_message(f"Added {len(self.replay)} steps of the episodes in {path}.")

    def collect(self) -> Rows:
        """Act in every environment, and store and log the rows."""
        self.status.begin("collecting data")
        self.collector.wait()  # errors of environments are raised here
        self.has_started = self.clock.step > 0
        with self.modifying():
            rows = self.collector.collect()
            self.replay.add(rows.values, rows.streams)
            self.logger.add(rows.metrics, step=self.clock.frames)
            self.clock.advance(len(rows), rows.env_steps)
        if self.clock.collection_ended():
            self.logger.add(self.collector.summary(), prefix="collect")
        return rows

    @property
    def ready(self) -> bool:
        """True if the replay has enough rows for every batch the agent trains on."""
        return all(self.feed.ready(k) for k in self.agent.windows if k != "report")

    def report(self, feed: ReplayFeed, prefix: str = "report") -> None:
        """Log the agent's report on some batches, if enough rows are stored."""
        if not feed.ready("report"):
            return
        self.status.begin("report on replay batches")
        consecutive = self.agent.windows["report"].consec
        for _ in range(self.config.run.report_batches * consecutive):
            self.logger.add(self.agent.report(feed), prefix=prefix)

    def evaluate(self) -> None:
        """Play and log evaluation episodes, if this run evaluates."""
        if self.evaluator is None:
            return
        self.status.begin("evaluation")
        played = self.evaluator.play(self.agent, self.stopper.is_set)
        if played:  # none if the run was asked to stop
            self.logger.add(summarize(played), prefix="eval/episode")
            self.report(self.evaluator.feed, prefix="eval")

    @property
    def is_complete(self) -> bool:
        return not self.clock.running

    def _run_metrics(self) -> Metrics:
        replay = {f"replay/{k}": v for k, v in self.replay.metrics().items()}
        return {**replay, **self.collector.metrics(), **super()._run_metrics()}

    def save(self) -> None:
        """Write a checkpoint of all parts, then delete files that it replaces."""
        self.should_save = False
        self._begin_save()
        agent = self.agent_state()  # raises if it is not finite
        replays = {name: replay.save() for name, replay in self.replays.items()}
        parts = {
            "agent": agent,
            **replays,
            "collector": self.collector.state_dict(),
            "loop": {**self._loop_state(), "evaluates": self._evaluates},
        }
        if self.evaluator is not None:
            parts["evaluator"] = self.evaluator.state_dict()
        path = self.checkpoints.save(
            self.clock.step, parts, self.clock.completed_epochs
        )
        self.replay_indices[path] = replays
        self._delete_unused_replay_files(self.checkpoints.prune())

    def _delete_unused_replay_files(self, kept: list[Path]) -> None:
        """Delete the replay files that none of the kept checkpoints needs.

        If an older checkpoint is damaged, the files that it needs are not known, and
        nothing is deleted.
        """
        known = self.replay_indices
        try:
            self.replay_indices = {
                path: known.get(path) or self._read_parts(path, self.replays)
                for path in kept
            }
            for name, replay in self.replays.items():
                indices = self.replay_indices.values()
                replay.delete_unused_files([i[name] for i in indices if name in i])
        except WriteFailed:
            raise
        except (UserError, checkpoint.Damaged, LookupError, InvalidFile) as error:
            reason = str(error).partition("\n")[0]
            warnings.warn(
                "No old replay files are deleted, because an older checkpoint is "
                f"damaged ({reason}).",
                stacklevel=2,
            )

    def _read_parts(self, path: Path, names: Iterable[str]) -> dict[str, StateDict]:
        """Return these parts of a checkpoint; without evaluation it has fewer."""
        parts = checkpoint.read_manifest(path)["parts"]
        return {n: checkpoint.read_part(path, n) for n in names if n in parts}

    def finish(self) -> None:
        """Save, report and log a last time; raise if the run was interrupted.

        The report comes after the save, so a resumed run does not depend on it.
        """
        if self.was_finished:
            return
        self.save()
        if not self.stopper.is_set():
            self._warn_if_untrained()
            self.report(self.feed)
        self._write_final_log()
        self.stopper.check()

    def _position(self) -> str:
        """Return the progress of the run, for messages."""
        step = f"agent step {self.clock.step}"
        return f"{self._epochs().describe()}, {step}" if self.clock.epochs else step

    def _warn_if_untrained(self) -> None:
        trains = self.agent.schedule is not None or self.config.run.train_ratio > 0
        windows = set(self.agent.windows) - {"report"}
        done = self.clock.updates or self.clock.schedule.finished
        if trains and windows and not done:
            self.print_message(
                f"No update was run: {self.config.run.steps:,} steps ended before the "
                "first update was due.\n  Fix: give more --run.steps."
            )

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._error = error
        # without a successful environment step there is nothing worth saving
        has_steps = self.should_save and self.clock.step > len(self.envs)
        try:
            if has_steps and isinstance(error, Exception):
                self.save()
                self.print_message(
                    f"Saved at {self._position()}; the same command resumes."
                )
        except Exception as second:  # the first error is the one to show
            self.print_message(f"The run could not be saved after the error: {second}")
        finally:
            self.close()

    def _restore(self, path: Path) -> None:
        self.agent.load_state_dict(checkpoint.read_part(path, "agent"))
        indices = self.replay_indices[path] = self._read_parts(path, self.replays)
        for name, index in indices.items():
            self.replays[name].load(index)
        loop = checkpoint.read_part(path, "loop")
        self._restore_loop(loop)
        if loop["evaluates"] and not self._evaluates:
            self.print_message(
                "This run was evaluated regularly, by `reverie train_eval`; `reverie "
                "train` does not evaluate it.\n  To evaluate it again: reverie "
                f"train_eval --logdir {self.path}"
            )
        self.collector.load_state_dict(checkpoint.read_part(path, "collector"))
        if self.evaluator is not None:
            for state in self._read_parts(path, ["evaluator"]).values():
                self.evaluator.load_state_dict(state)

    def print_summary(self) -> None:
        """Print agent, task, device, run folder, number of steps and replay buffer."""
        config, clock = self.config, self.clock
        window = self.agent.windows.get("train")
        epochs = config.agent_config.epochs
        due, most = "", f"{epochs:,} epochs, at most " if epochs else ""
        if window and config.run.train_ratio and self.agent.schedule is None:
            rows = window.batch * window.length
            due = (
                f"  one update trains on {window.batch} x {window.length} steps and is "
                f"due every {rows / config.run.train_ratio:.4g} agent steps\n"
            )
        self.print_message(
            f"{config.agent} on {config.task}, {self.device} in {self.precision}\n"
            f"{describe_size(config, not self.clock.step)}"
            f"  run folder {self.path}\n"
            f"  {most}{config.run.steps:,} agent steps of {clock.repeat} frames each, "
            f"{len(self.envs)} at a time\n{due}"
            f"  {self.replay.plan.describe()}{self.feed.describe()}"
        )
