"""`OnlineRun`: builds, saves and restores all parts of an online training run."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from reverie import envs as suites
from reverie.api import Agent, Metrics, StateDict, UserError, VecEnv
from reverie.capabilities import CountsEpochs, NeedsStatistics
from reverie.datasets.episodes import iterate_episodes
from reverie.evaluation.episodes import summarize
from reverie.log.timer import timed
from reverie.replay.buffer import Replay
from reverie.replay.config import Storage
from reverie.replay.feed import ReplayFeed
from reverie.rows import Rows
from reverie.run import checkpoint, device, parts
from reverie.run.actors.collector import RemoteCollector, check_can_use_actors
from reverie.run.actors.factory import open_actors
from reverie.run.actors.pool import ActorPool
from reverie.run.base_run import BaseRun
from reverie.run.clock import Clock, TrainRatio
from reverie.run.collectors import InProcessCollector
from reverie.run.config import Config, for_evaluation
from reverie.run.evaluator import Evaluator
from reverie.run.factory import (
    FIRST_EVAL_ENV,
    MakeEnv,
    load_initial_weights,
    make_agent,
)
from reverie.run.folder import write_config
from reverie.run.imported import find_imported
from reverie.run.parts import Shard
from reverie.run.policy_copy import make_policy_copy
from reverie.run.shards import Collected, check_can_act_remotely
from reverie.run.summary import describe_online_run
from reverie.run.timeouts import EnvStepTimeout
from reverie.storage.limits import InvalidFile
from reverie.storage.os_errors import WriteFailed
from reverie.storage.run_spaces import write_spaces

EVAL_REPLAY = "eval_replay"  # name of the replay buffer of evaluation episodes


class OnlineRun(BaseRun):
    """An online training run: environments, agent, replay, clock and log.

    Entering the context builds these parts; `start` restores them if the folder has a
    checkpoint; `save` writes one checkpoint of all. If an error ends the run while its
    parts are consistent, the run is saved first; otherwise the last checkpoint is kept.
    """

    def __init__(
        self,
        config: Config,
        make_env: MakeEnv | None = None,
        evaluate: bool = False,
        profile: int = 0,
    ):
        super().__init__(config, profile)
        self.make_env = make_env
        self._evaluates = evaluate
        self.checkpoints.required = (*checkpoint.REQUIRED, "collector", "replay")

    def _open(self) -> None:
        parts.check_shard_count(self.config, self.checkpoints)
        super()._open()
        config = self.config
        self.overlap = device.pick_overlap(
            config.run.overlap, self.device, config.deterministic
        )
        device.initialize_in_background(self.device)
        # the shard of environments and replay that belongs to this rank
        self.shard = parts.find_shard(config)
        self.status.begin("building the environments")
        self.envs: VecEnv | ActorPool
        if config.actors.count:
            self.status.begin("starting the actors")
            self.envs = open_actors(
                config, self.make_env, self.print_message, self.stopper.raise_if_stopped
            )
            self._cleanup.callback(self.envs.close)
        else:
            count, first = self.shard.envs(config.run.envs)
            self.envs = self._open_envs(config, count, first)
        self._start_compiling(self.envs, len(self.envs))
        self.status.begin("building the agent")
        self.agent = make_agent(config, self.envs, self.device, self.precision)
        if not self.shard.is_single:
            check_can_act_remotely(self.agent, config.agent)
        self._connect_ranks(self.envs, self.path)
        # environments and replay buffers of the other ranks, if the replay is sharded
        self.other_shards = self.leader.other_shards if self.leader else None
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
            len(self.envs),
            self.path / "replay",
            config.replay.storage,
            shard=self.shard,
        )
        if self.replay.memory_plan.was_reduced:
            self.print_message(self.replay.memory_plan.describe_reduction())
            capacity = self.replay.capacity * self.shard.world_size
            replay = replace(config.replay, capacity=capacity)
            self.config = config = replace(config, replay=replay)
            write_config(self.path, config)
        self.replays = {"replay": self.replay}
        """Replay buffers by name, which is both their folder and their part of the
        checkpoint."""
        self.replay_states: dict[Path, dict[str, StateDict]] = {}
        """By kept checkpoint: its replay states, which name the files that it needs."""
        self.feed = self._open_feed(self.replay)
        self.clock = Clock(
            config.run,
            self.agent.schedule or self._train_ratio(),
            suites.action_repeat(config.task, config.env),
        )
        self._open_log(config.run.steps * self.clock.repeat, self.envs.render_fps)
        self.env_timeout = EnvStepTimeout(config.run.rank_timeout, self.envs)
        self.collector = self._make_collector(random_agent)
        self.evaluator = self._open_evaluator() if self._evaluates else None

    def _make_collector(
        self, random_agent: Agent
    ) -> InProcessCollector | RemoteCollector:
        config = self.config
        if isinstance(self.envs, ActorPool):
            check_can_use_actors(self.agent, config.agent)
            return RemoteCollector(
                self.envs,
                self.agent,
                self.clock,
                self.timer,
                self.rates,
                self.stopper.is_set,
            )
        updates_overlap = self.overlap and self.device.type == "cuda"
        self.policy_copy = make_policy_copy(
            config, self.agent, self.envs, lambda: self.clock.updates, updates_overlap
        )
        return parts.make_collector(
            config,
            self.envs,
            self.policy_copy or self.agent,
            random_agent,
            self.overlap,
            self.timer,
            self.rates,
        )

    def _open_envs(self, config: Config, count: int, first: int) -> VecEnv:
        envs = parts.open_envs(config, count, first, self.make_env, self.overlap)
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
        self,
        streams: int,
        directory: Path,
        storage: Storage,
        fraction: float = 1.0,
        shard: Shard | None = None,
    ) -> Replay:
        """Make a replay buffer; its capacity is this fraction of `replay.capacity`."""
        replay = parts.open_replay(
            self.config,
            self.envs,
            self.agent,
            directory,
            self.checkpoints.step,
            streams=streams,
            storage=storage,
            fraction=fraction,
            shard=shard,
        )
        self._cleanup.callback(replay.close)
        return replay

    def _open_feed(self, replay: Replay) -> ReplayFeed:
        feed = parts.open_feed(replay, self.device, self.config.deterministic)
        self._cleanup.callback(feed.close)
        return feed

    def _train_ratio(self) -> TrainRatio:
        """Return the default schedule, in updates per agent step."""
        window = self.agent.windows.get("train")
        if window is None:
            return TrainRatio(0)
        run = self.config.run
        pretrain = 0 if run.from_checkpoint else run.pretrain
        return TrainRatio(run.train_ratio / (window.batch * window.length), pretrain)

    # Used by the training loop.

    @timed("start")
    def start(self) -> None:
        """Restore the newest checkpoint, or reset the environments of a new run."""
        self._restore_or_reset()

    def _restore_or_reset(self) -> None:
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
        weights, agent = self.config.run.from_checkpoint, self.agent
        needs_statistics = isinstance(agent, NeedsStatistics) and agent.needs_statistics
        # checkpoints of other implementations contain no statistics
        has_statistics = weights and not find_imported(weights, type(self.config))
        if needs_statistics and not has_statistics:
            raise UserError(
                "Images can be standardized with dataset statistics only in training "
                "on recorded episodes.\n  Fix: --configs standardize_batch, or weights "
                "that include the statistics (--run.from_checkpoint)."
            )
        if weights:
            self.print_message(load_initial_weights(agent, self.config))
        self._start_warm_up(self.replay)
        self.status.begin("resetting the environments")
        if self.config.run.episodes:
            self.status.begin("reading the recorded episodes")
            self._add_recorded_episodes(self.config.run.episodes)
        if self.leader and self.other_shards:
            self.leader.broadcast_agent()
            self.other_shards.reset()
        with self.env_timeout.during_step():
            self.collector.reset()
        self.stopper.can_save = True

    def _add_recorded_episodes(self, path: str) -> None:
        spaces = self.envs.obs_space, self.envs.act_space
        for _, episode in iterate_episodes(path, *spaces, self.config.offline.read):
            self.replay.add_episode(episode)
        self.print_message(f"Added {len(self.replay)} steps of the episodes in {path}.")

    def collect(self) -> Rows:
        """Act in every environment, store the rows, and log the episodes that ended."""
        self.status.begin("collecting data")
        with self._collecting_on_all_ranks():
            with self.env_timeout.during_step():
                self.collector.wait()  # errors of environments are raised here
            self.stopper.undo_env_changes()  # such as replaced signal handlers
            self.has_started = self.clock.step > 0
        with self.modifying():
            rows = self.collector.collect()
            with self.timer("replay_add"):
                if len(rows):
                    self.replay.add(rows.values, rows.streams)
            shards = self.other_shards
            others = shards.end_collect() if shards else Collected()
            for metrics in (rows.metrics, *others.metrics):
                self.logger.add(metrics, step=self.clock.frames)
            self.rates.add("policy", others.rows)
            self.clock.advance(
                len(rows) + others.rows, rows.env_steps + others.env_steps
            )
        if self.clock.collection_ended():
            self.logger.add(self.collector.summary(), prefix="collect")
        return rows

    @contextmanager
    def _collecting_on_all_ranks(self) -> Iterator[None]:
        """Context that starts the collection of the other ranks, if there are shards.

        Call `end_collect` after the context to get their results. If an error is raised
        in the context, the context calls it and ignores the results.
        """
        if self.other_shards is None:
            yield
            return
        self.collector.steps = self.clock.step  # for prefill and exploration
        self.should_save = False  # until the rows of the other ranks are counted
        self.other_shards.begin_collect(self.clock.step)
        try:
            yield
        except BaseException:
            self.other_shards.end_collect()
            raise

    @property
    def is_ready(self) -> bool:
        """True if the replay has enough rows for every batch the agent trains on."""
        if self.other_shards and not self.other_shards.is_ready:
            return False
        return all(self.feed.ready(k) for k in self.agent.windows if k != "report")

    @timed("report")
    def report(self, feed: ReplayFeed, prefix: str = "report") -> None:
        """Log the agent's report on some batches, if enough rows are stored."""
        if not feed.ready("report"):
            return
        self._end_warm_up()  # it changes and restores normalizers, which a report reads
        self.status.begin("report on replay batches")
        consecutive = self.agent.windows["report"].consec
        for _ in range(self.config.run.report_batches * consecutive):
            self.logger.add(self.agent.report(feed), prefix=prefix)

    def evaluate(self) -> None:
        """Play and log evaluation episodes, if this run evaluates."""
        if self.evaluator is None:
            return
        self.status.begin("evaluation")
        with self.timer("eval"):
            played = self.evaluator.play(self.agent, self.stopper.is_set)
        self.stopper.undo_env_changes()
        if played:  # none if the run was asked to stop
            self.logger.add(summarize(played), prefix="eval/episode")
            self.report(self.evaluator.feed, prefix="eval")

    @property
    def is_complete(self) -> bool:
        return not self.clock.running

    def _run_metrics(self) -> Metrics:
        replay = {f"replay/{k}": v for k, v in self.replay.metrics().items()}
        env = self.collector.metrics()
        if self.other_shards:
            env = {k: x + self.other_shards.env_metrics[k] for k, x in env.items()}
        return {**replay, **env, **super()._run_metrics()}

    @timed("save")
    def save(self) -> None:
        """Write a checkpoint of all parts, then delete files that it replaces."""
        self.should_save = False
        self._begin_save()
        agent = self.agent_state()  # raises if it is not finite
        replays = {name: replay.save() for name, replay in self.replays.items()}
        saved = {
            "agent": agent,
            **replays,
            "collector": self.collector.state_dict(),
            "loop": {
                **self._loop_state(),
                "evaluates": self._evaluates,
                "shards": self.shard.world_size,
            },
        }
        if self.other_shards:
            saved |= self.other_shards.save()
        if self.policy_copy:
            saved["policy"] = self.policy_copy.state_dict()
        if self.evaluator is not None:
            saved["evaluator"] = self.evaluator.state_dict()
        path = self.checkpoints.save(
            self.clock.step, saved, self.clock.completed_epochs
        )
        self.replay_states[path] = replays
        self._delete_unused_replay_files(self.checkpoints.prune(), path)

    def _delete_unused_replay_files(
        self, kept: list[Path], saved: Path | None = None
    ) -> None:
        """Delete the replay files that none of the kept checkpoints needs.

        `saved` is the checkpoint that was just written. If an older checkpoint is
        damaged, the files that it needs are not known, and nothing is deleted.
        """
        known = self.replay_states
        if self.other_shards:
            self.other_shards.delete_unused_files(kept, saved)
        try:
            self.replay_states = {
                path: known.get(path) or self._read_parts(path, self.replays)
                for path in kept
            }
            for name, replay in self.replays.items():
                states = self.replay_states.values()
                replay.delete_unused_files([x[name] for x in states if name in x])
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
        """Return these parts of a checkpoint, without those that it does not have."""
        present = checkpoint.read_manifest(path)["parts"]
        return {n: checkpoint.read_part(path, n) for n in names if n in present}

    def finish(self) -> None:
        """Save, report and log a last time; raise if the run was interrupted.

        The report comes after the save, so a resumed run does not depend on it.
        """
        if self.was_finished:
            return
        self._check_stopped_early()
        if self._should_save_at_end:
            self.save()
        if not self.stopper.is_set():
            self._warn_if_untrained()
            self.report(self.feed)
        self._write_final_log()
        self.stopper.raise_if_stopped()

    def _position(self) -> str:
        """Return the progress of the run, for messages."""
        return self._with_epochs(f"agent step {self.clock.step}")

    def _warn_if_untrained(self) -> None:
        trains = self.agent.schedule is not None or self.config.run.train_ratio > 0
        windows = set(self.agent.windows) - {"report"}
        has_trained = self.clock.updates or self.clock.schedule.finished
        if trains and windows and not has_trained:
            self.print_message(
                f"No update was run: {self.config.run.steps:,} steps ended before the "
                "first update was due.\n  Fix: give more --run.steps."
            )

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._error = error
        # no checkpoint if there are only the rows of the first reset
        can_save = self.should_save and self.clock.step > len(self.envs)
        try:
            if can_save and isinstance(error, Exception):
                self.save()
                self.print_message(
                    f"Saved at {self._position()}; the same command resumes."
                )
        except Exception as failure:  # printed only: `error` is the one to raise
            self.print_message(f"The run could not be saved after the error: {failure}")
        finally:
            self.close()

    def _restore(self, path: Path) -> None:
        loop = checkpoint.read_part(path, "loop")
        self.agent.load_state_dict(checkpoint.read_part(path, "agent"))
        if loop["final_log"] is None:  # else the run was complete
            self._start_warm_up(self.replay)
        states = self.replay_states[path] = self._read_parts(path, self.replays)
        for name, state in states.items():
            self.replays[name].load(state)
        if self.leader and self.other_shards:
            self.leader.broadcast_agent()
            self.other_shards.restore(path)
        self._restore_loop(loop)
        if loop["evaluates"] and not self._evaluates:
            self.print_message(
                "This run was evaluated regularly, by `reverie train_eval`; `reverie "
                "train` does not evaluate it.\n  To evaluate it again: reverie "
                f"train_eval --logdir {self.path}"
            )
        self.collector.load_state_dict(checkpoint.read_part(path, "collector"))
        if self.policy_copy:
            self.policy_copy.load_state_dict(checkpoint.read_part(path, "policy"))
        if self.evaluator is not None:
            for state in self._read_parts(path, ["evaluator"]).values():
                self.evaluator.load_state_dict(state)

    def print_summary(self) -> None:
        """Print agent, task, device, run folder, number of steps and replay buffer."""
        self.print_message(describe_online_run(self))
