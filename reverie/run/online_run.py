"""The parts of a run: built from its config, saved and restored together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from torch.utils import _pytree as pytree

from reverie import envs as suites
from reverie.api import Action, Carry, Extras, Metrics, Obs, UserError, VecEnv
from reverie.capabilities import NeedsStatistics
from reverie.datasets.episodes import iterate_episodes
from reverie.log.episode_stats import EpisodeStats
from reverie.replay import device_copy
from reverie.replay.buffer import Replay
from reverie.replay.feed import ReplayFeed
from reverie.run import checkpoint, device
from reverie.run.base_run import BaseRun
from reverie.run.clock import Clock, Steady
from reverie.run.config import Config, for_evaluation
from reverie.run.factory import (
    EVAL_SEEDS,
    MakeEnv,
    in_workers,
    make_agent,
    make_envs,
    take_over,
)
from reverie.run.folder import write_spaces


class OnlineRun(BaseRun):
    """Everything one training run is made of.

    Opening it builds the parts and, if the folder holds a checkpoint, restores them;
    `save` writes them all as one checkpoint. The loops in this room only move data
    between the parts. A run that an error ends between two turns saves itself first;
    one that fails in the middle of something keeps its last checkpoint.
    """

    def __init__(self, config: Config, make_env: MakeEnv | None = None):
        super().__init__(config)
        self.make_env = make_env
        self._kept: dict[Path, Any] = {}
        self._phase = 0
        self._sent = False  # whether the environments are stepping
        self._seen: Obs | None = None  # what they showed and nobody has asked for
        self._unsaved: tuple[Obs, Carry] | None = None  # where all parts agree

    def __enter__(self) -> OnlineRun:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if isinstance(error, Exception):
                self._rescue()
        finally:
            self.close()

    def _open(self) -> None:
        super()._open()
        config = self.config
        self.overlap = device.pick_overlap(
            config.run.overlap, self.device, config.deterministic
        )
        self.envs = self.open_envs(config.run.envs)
        self.agent = make_agent(config, self.envs, self.device, self.precision)
        self.prefill = make_agent(
            replace(config, agent="random"), self.envs, self.device, self.precision
        )
        if config.run.clock == "phases" and self.agent.schedule is None:
            raise UserError(
                f"The agent {config.agent!r} has no phases, so that nothing would ever "
                "be logged or saved.\n  Fix: --run.clock seconds"
            )
        write_spaces(self.path, self.envs.obs_space, self.envs.act_space)
        self.replay = self.open_replay(config.run.envs, self.path / "replay")
        self.feed = self.open_feed(self.replay)
        self.clock = Clock(
            config.run,
            self.agent.schedule or self._steady(),
            suites.action_repeat(config.task, config.env),
        )
        self.episodes = EpisodeStats(len(self.envs))
        self._open_log(config.run.steps * self.clock.repeat)

    # Building.

    def open_envs(self, count: int) -> VecEnv:
        """A pool of environments to learn from, closed with the run."""
        return self._pool(self.config, count, 0)

    def open_trials(self, count: int) -> VecEnv:
        """A pool of environments to measure the policy in, closed with the run."""
        return self._pool(for_evaluation(self.config), count, EVAL_SEEDS)

    def _pool(self, config: Config, count: int, first: int) -> VecEnv:
        # they can only step beside the training in a process of their own
        beside = self.overlap and self.make_env is None
        config = in_workers(config) if beside else config
        envs = make_envs(config, count, first, self.make_env)
        self._closing.append(envs.close)
        return envs

    def open_replay(
        self, streams: int, directory: Path | None, share: float = 1.0
    ) -> Replay:
        """Storage for what environments show, what was done, and the agent's extras."""
        config = self.config
        spaces = {**self.envs.obs_space, **self.envs.act_space}
        capacity = int(config.replay.capacity * share)
        if not config.run.episodes:  # room for more than the run will see is wasted
            most = max(config.run.steps, self.checkpoints.step)
            capacity = min(capacity, most + streams)
        storage = config.replay.storage if directory else "ram"
        replay = Replay(
            {key: space for key, space in spaces.items() if key[:4] != "log/"},
            self.agent.extras,
            replace(config.replay, storage=storage),
            capacity=max(1, capacity),
            streams=streams,
            windows=self.agent.windows,
            directory=directory,
            seed=config.seed,
            exact_extras=config.deterministic,
        )
        self._closing.append(replay.close)
        return replay

    def open_feed(self, replay: Replay) -> ReplayFeed:
        """Batches of the agent's windows, cut from a replay."""
        ahead = self.device.type == "cuda" and not self.config.deterministic
        feed = ReplayFeed(
            replay,
            self.agent.windows,
            self.device,
            prefetch=ahead,
            on_device=device_copy.fits_on_device(replay, self.device),
        )
        self._closing.append(feed.close)
        return feed

    def _steady(self) -> Steady:
        window = self.agent.windows.get("train")
        if window is None:
            return Steady(0)
        return Steady(self.config.run.train_ratio / (window.batch * window.length))

    # The verbs of the loops.

    def start(self) -> tuple[Obs, Carry]:
        """Where to begin: at the newest checkpoint, or with fresh environments."""
        found = self.newest()
        kept = self.checkpoints.prune()
        if found:
            obs, carry = self.restore(found)
            self._release(kept)
            self.say(f"Resumed {found.name} at agent step {self.clock.step}.")
            return obs, carry
        # Whatever lies here was written by a run that died before its first save.
        self.replay.delete_unused_files([])
        self.logger.truncate_after(-1)
        if self.config.run.from_checkpoint:
            self.say(take_over(self.agent, self.config))
        elif isinstance(self.agent, NeedsStatistics) and self.agent.needs_statistics:
            raise UserError(
                "To standardise images by `dataset` takes recordings to know them by."
                "\n  Fix: --configs standardize_batch, or weights that know them "
                "(--run.from_checkpoint)."
            )
        if self.config.run.episodes:
            self.fill_from(self.config.run.episodes)
        return self.envs.reset(), self.agent.initial(len(self.envs))

    def fill_from(self, path: str) -> None:
        """Put recorded episodes into the replay."""
        before = len(self.replay)
        obs_space, act_space = self.envs.obs_space, self.envs.act_space
        for _, episode in iterate_episodes(path, obs_space, act_space):
            self.replay.add_episode(episode)
        self.say(f"{len(self.replay) - before} steps from the episodes in {path}.")

    def act(self, carry: Carry, obs: Obs) -> tuple[Carry, Action, Extras]:
        """The policy's choice, or a random one during prefill; none after the end."""
        self._unsaved = None
        seen = for_agents(obs)
        with self.timer("policy"):
            if self.clock.step < self.config.run.prefill:
                _, action, _ = self.prefill.policy((), seen, mode="train")
                extras = {
                    k: s.zeros(len(self.envs)) for k, s in self.agent.extras.items()
                }
            else:
                carry, action, extras = self.agent.policy(carry, seen, mode="train")
        self.rates.add("policy", len(self.envs))
        return carry, rest_at_end(action, obs), extras

    def keep(self, obs: Obs, action: Action, extras: Extras) -> int:
        """Store the rows of this turn and log ended episodes; says how many rows.

        An environment that waits for others (`env.vector.lockstep`) has none.
        """
        rows, streams = {**obs, **action, **extras}, None
        waiting = getattr(self.envs, "waiting", np.zeros(1, bool))
        if waiting.any():
            streams = np.flatnonzero(~waiting)
            rows = {key: value[streams] for key, value in rows.items()}
            # to the statistics it looks as if nothing happened there
            still = {"reward": obs["reward"] * ~waiting}
            obs = {**obs, **still, "is_last": obs["is_last"] & ~waiting}
        self.replay.add(rows, streams)
        self.logger.add(self.episodes.add(obs), step=self.clock.frames)
        return len(rows["is_first"])

    def send(self, action: Action, obs: Obs, carry: Carry) -> None:
        """Let the environments take a step; `receive` has what comes of it."""
        self._unsaved = (obs, carry)
        self.envs.send(action)
        self._sent = True
        if not self.overlap:
            self._await_step()
        if self.clock.schedule.phase != self._phase:
            self._phase = self.clock.schedule.phase
            self.logger.add(self.episodes.summary(), prefix="collect")

    def receive(self, obs: Obs) -> Obs:
        """What the environments showed since `obs`; now the run could be saved.

        Also where they fail for good: a resumed run begins new episodes then.
        """
        self._await_step()
        seen, self._seen = self._seen, None
        return obs if seen is None else seen

    def _await_step(self) -> None:
        if self._sent:
            self._sent = False
            with self.timer("env"):
                self._seen = self.envs.recv()
            assert self._unsaved is not None
            self._unsaved = (self._seen, self._unsaved[1])

    @property
    def ready(self) -> bool:
        """Whether enough is stored for everything the agent learns from."""
        return all(self.feed.ready(k) for k in self.agent.windows if k != "report")

    def update(self) -> Metrics:
        unsaved, self._unsaved = self._unsaved, None
        metrics = super().update()
        self._unsaved = unsaved
        return metrics

    def report(self, feed: ReplayFeed, prefix: str = "report") -> None:
        """Have the agent look at some batches, once enough is stored for them."""
        if not feed.ready("report"):
            return
        pieces = self.agent.windows[
            "report"
        ].consec  # of one sequence, one after another
        for _ in range(self.config.run.report_batches * pieces):
            self.logger.add(self.agent.report(feed), prefix=prefix)

    def write_log(self) -> None:
        self.logger.add(self.replay.metrics(), prefix="replay")
        self.logger.add(self.envs.metrics())
        super().write_log()

    def save(self, obs: Obs, carry: Carry, **more: Any) -> None:
        """Write one checkpoint of everything, then let go of what it replaces."""
        self._unsaved = None
        leaves = pytree.tree_leaves(carry)
        parts = {
            "agent": self.agent_state(),
            "replay": self.replay.save(),
            "envs": self.envs.state_dict(),
            "loop": {
                "clock": self.clock.state_dict(),
                "episodes": self.episodes.state_dict(),
                "logger": self.logger.state_dict(),
                "prefill": self.prefill.state_dict(),
                "carry": [leaf.detach() for leaf in leaves],
            },
            **more,
        }
        path = self.checkpoints.save(self.clock.step, parts)
        self._kept[path] = parts["replay"]
        self._release(self.checkpoints.prune())

    def finish(self, obs: Obs, carry: Carry) -> None:
        """Save, take a last look, and say so if the run was asked to stop.

        The look comes after the save, so a run that goes on later does not know of it.
        """
        self.save(obs, carry)
        if self.stopper.asked is None:
            self._admit_idleness()
            self.report(self.feed)
        self.write_log()
        self.stopper.check()

    def _admit_idleness(self) -> None:
        """Say so if the run was too short for even one update."""
        learns = self.agent.schedule is not None or self.config.run.train_ratio > 0
        windows_ = set(self.agent.windows) - {"report"}
        if (
            learns
            and windows_
            and not (self.clock.updates or self.clock.schedule.finished)
        ):
            self.say(
                f"Nothing was trained: {self.config.run.steps:,} steps were over "
                "before the first update was due.\n  Fix: give more --run.steps."
            )

    def _rescue(self) -> None:
        """Save before an error ends the run, if its parts agree with each other."""
        if self._unsaved is None or self.clock.step == 0:
            return
        try:
            self._await_step()
            self.save(*self._unsaved)
            self.say(
                f"Saved at agent step {self.clock.step}; the same command resumes."
            )
        except Exception as second:  # the error that ends the run is the one to show
            self.say(f"The run could not be saved before it ended: {second}")

    def restore(self, path: Path) -> tuple[Obs, Carry]:
        """Put every part back where a checkpoint found it."""
        part = checkpoint.read_part
        self.agent.load_state_dict(part(path, "agent"))
        self.replay.load(self._index(path))
        loop = part(path, "loop")
        self.clock.load_state_dict(loop["clock"])
        self._phase = self.clock.schedule.phase
        self.episodes.load_state_dict(loop["episodes"])
        self.logger.load_state_dict(loop["logger"])
        self.prefill.load_state_dict(loop["prefill"])
        obs = self.envs.load_state_dict(part(path, "envs"))
        fresh = self.agent.initial(len(self.envs))
        leaves, tree = pytree.tree_flatten(fresh)
        saved = loop["carry"]
        if [x.shape for x in saved] != [x.shape for x in leaves]:
            return obs, fresh  # another number of environments
        moved = [s.to(x.device, x.dtype) for s, x in zip(saved, leaves, strict=True)]
        return obs, pytree.tree_unflatten(moved, tree)

    def introduce(self) -> None:
        """Say what runs, where, and what its counts mean."""
        config, clock = self.config, self.clock
        window = self.agent.windows.get("train")
        due, most = "", "at most " if self.agent.schedule else ""
        if window and config.run.train_ratio and self.agent.schedule is None:
            rows = window.batch * window.length
            due = (
                f"  one update replays {window.batch} x {window.length} steps and is "
                f"due every {rows / config.run.train_ratio:.4g} agent steps\n"
            )
        self.say(
            f"{config.agent} on {config.task}, {self.device} in {self.precision}\n"
            f"  run folder {self.path}\n"
            f"  {most}{config.run.steps:,} agent steps of {clock.repeat} frames each, "
            f"{len(self.envs)} at a time\n{due}"
            f"  {self.replay.plan.describe()}{self.feed.describe()}"
        )

    def _release(self, kept: list[Path]) -> None:
        """Let go of all replay files that no kept checkpoint needs."""
        self._kept = {path: self._index(path) for path in kept}
        self.replay.delete_unused_files(list(self._kept.values()))

    def _index(self, path: Path) -> Any:
        if path not in self._kept:
            self._kept[path] = checkpoint.read_part(path, "replay")
        return self._kept[path]


def for_agents(obs: Obs) -> Obs:
    """Observations without what is only for people."""
    return {key: value for key, value in obs.items() if key[:4] != "log/"}


def rest_at_end(action: Action, obs: Obs) -> Action:
    """The same actions, zero in rows that close an episode."""
    last = obs["is_last"]
    if not last.any():
        return action
    return {
        key: value * (~last).astype(value.dtype).reshape(-1, *[1] * (value.ndim - 1))
        for key, value in action.items()
    }
