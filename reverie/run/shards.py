"""Sharded replay: every rank has its own environments and its own replay buffer.

Rank 0 runs the training loop and sends commands to the other ranks (`ranks.py`). When
it collects, every rank acts in its own environments and stores the rows in its own
replay buffer. In an update, every rank samples its sequences of the global batch from
its own replay buffer. Rank 0 receives only the number of rows and the metrics of the
episodes. When rank 0 saves, every other rank writes its replay buffer to files in
`replay/rank1`, `replay/rank2`, ..., and sends the rest of its state to rank 0, which
writes one checkpoint with the state of all ranks.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from reverie.agents.remote import CanActRemotely
from reverie.api import Agent, Batch, Metrics, StateDict, UserError
from reverie.distributed import collective
from reverie.distributed.messages import gather_objects
from reverie.envs.vector.base import common_spaces
from reverie.log.timer import Rates, Timer
from reverie.rows import Window
from reverie.run import checkpoint, parts
from reverie.run.config import Config
from reverie.run.device import pick_overlap
from reverie.run.factory import MakeEnv, make_agent
from reverie.run.parts import Shard
from reverie.run.timeouts import EnvStepTimeout, UpdateTimeout
from reverie.storage.limits import InvalidFile
from reverie.storage.os_errors import WriteFailed

RESET, RESTORE, COLLECT, SAVE, DELETE = "reset", "restore", "collect", "save", "delete"
COMMANDS = (RESET, RESTORE, COLLECT, SAVE, DELETE)
"""Commands of rank 0 that every other rank answers: reset the environments, restore a
checkpoint, collect one step, save, delete unused replay files."""


Send = Callable[[str, Any], None]
"""Sends a command with its argument to the other ranks."""


class Collected(NamedTuple):
    """Counts and metrics of the rows that one or more ranks stored in one step."""

    rows: int = 0
    env_steps: int = 0
    metrics: tuple[Metrics, ...] = ()
    """Metrics of the episodes that ended, of each rank."""
    is_ready: bool = True
    """True if their replay buffers have enough rows for every batch."""
    env_metrics: Metrics | None = None
    """Sums over their environments since the start of the process, such as errors."""


class RankFailure(NamedTuple):
    """Answer of a rank that raised a `UserError`, with its message."""

    message: str


class Answer(NamedTuple):
    """Answer of a rank to a command other than `COLLECT`."""

    value: Any
    warnings: tuple[str, ...] = ()
    """Messages of warnings, for example of damaged files. Rank 0 shows them."""


def check_can_act_remotely(agent: Agent, name: str) -> None:
    """Raise if an agent cannot act in several processes with different seeds."""
    if not isinstance(agent, CanActRemotely):
        raise UserError(
            f"The agent {name!r} cannot be used with a sharded replay: it does not "
            "have all methods of `reverie.agents.remote.CanActRemotely`.\n"
            "  Fix: --replay.ranks shared (see reverie/agents/remote.py)"
        )


class ShardFeed:
    """Feed of an update: samples the sequences of this rank from its own replay."""

    def __init__(self, feed: Any, windows: dict[str, Window], timeout: UpdateTimeout):
        self.feed, self.windows, self.timeout = feed, windows, timeout

    def __getattr__(self, name: str) -> Any:
        return getattr(self.feed, name)

    def __call__(self, name: str, out: Batch | None = None) -> Batch:
        self.timeout.add_window(name)
        collective.set_batch(self.windows[name].batch)
        batch: Batch = self.feed(name) if out is None else self.feed(name, out)
        return batch


class OtherShards:
    """On rank 0: sends commands to the other ranks and returns their answers.

    `call` returns a context manager that yields a function to send a command. The
    answers must be received inside it.
    """

    def __init__(self, call: Callable[[], AbstractContextManager[Send]], group: Any):
        self._call, self._group = call, group
        self._collecting = ExitStack()  # holds the context of a `COLLECT` command
        self.is_ready = False
        """True if the replay buffers of all other ranks are ready to be sampled."""
        self.env_metrics: Counter[str] = Counter()
        """Sums over the environments of all other ranks."""

    def reset(self) -> None:
        """Reset the environments of a new run."""
        self._request(RESET)

    def restore(self, path: Path) -> None:
        """Restore the other ranks from a checkpoint."""
        self.is_ready = all(self._request(RESTORE, str(path)))

    def begin_collect(self, step: int) -> None:
        """Let the other ranks act in their environments; `step` is the agent step."""
        with ExitStack() as stack:  # closes the context if `send` raises an error
            send = stack.enter_context(self._call())
            send(COLLECT, step)
            self._collecting = stack.pop_all()

    def end_collect(self) -> Collected:
        """Wait until the other ranks have stored their rows."""
        with self._collecting:
            answers = gather_objects(None, self._group)[1:]
        check_answers(answers)
        self.is_ready = all(answer.is_ready for answer in answers)
        self.env_metrics = Counter()
        for answer in answers:
            self.env_metrics.update(answer.env_metrics or {})
        return Collected(
            sum(answer.rows for answer in answers),
            sum(answer.env_steps for answer in answers),
            tuple(metrics for answer in answers for metrics in answer.metrics),
            self.is_ready,
        )

    def save(self) -> dict[str, StateDict]:
        """Write the other replay buffers; return their parts of the checkpoint."""
        return {name: x for each in self._request(SAVE) for name, x in each.items()}

    def delete_unused_files(self, kept: list[Path], saved: Path | None = None) -> None:
        """Delete replay files that no kept checkpoint needs.

        `saved` is the checkpoint of the last call of `save`.
        """
        paths = [str(path) for path in kept]
        self._request(DELETE, (paths, str(saved) if saved else ""))

    def _request(self, command: str, value: Any = None) -> list[Any]:
        """Send a command and return the answers of the other ranks."""
        with self._call() as send:
            send(command, value)
            answers = gather_objects(None, self._group)[1:]
        for rank, answer in enumerate(answers, 1):
            for text in answer.warnings:
                warnings.warn(f"Rank {rank}: {text}", RuntimeWarning, stacklevel=3)
        values = [answer.value for answer in answers]
        check_answers(values)
        return values


def check_answers(answers: list[Any]) -> None:
    """Raise the error of the first rank that returned one."""
    for rank, answer in enumerate(answers, 1):
        if isinstance(answer, RankFailure):
            message = f"Rank {rank}: {answer.message}"  # includes the fix
            raise UserError(message)


class FollowerShard:
    """Environments, collector and replay buffer of a rank other than 0."""

    def __init__(
        self,
        config: Config,
        agent: Agent,
        spaces: Any,
        shard: Shard,
        device: torch.device,
        precision: str,
        folder: Path,
        make_env: MakeEnv | None,
    ):
        assert isinstance(agent, CanActRemotely)  # checked by rank 0
        self.agent, self.rank = agent, shard.rank
        overlap = pick_overlap(config.run.overlap, device, config.deterministic)
        count, first = shard.envs(config.run.envs)
        self.envs = parts.open_envs(config, count, first, make_env, overlap)
        # raises if they differ from those of rank 0
        common_spaces([(x.obs_space, x.act_space) for x in (spaces, self.envs)])
        self.replay = parts.open_replay(
            config,
            self.envs,
            agent,
            folder / "replay" / f"rank{shard.rank}",
            checkpoint.Checkpoints(folder / "ckpt").step,
            streams=count,
            storage=config.replay.storage,
            shard=shard,
        )
        self.feed = parts.open_feed(self.replay, device, config.deterministic)
        seeded = replace(config, seed=shard.seed(config.seed))
        self.collector = parts.make_collector(
            config,
            self.envs,
            agent,
            make_agent(seeded, self.envs, device, precision, "random"),
            overlap,
            Timer(enabled=False),
            Rates(),
        )
        self._env_timeout = EnvStepTimeout(config.run.rank_timeout, self.envs)
        # the generator of this rank; rank 0 overwrites it when it sends the agent
        self._policy_rng = agent.policy_rng().state_dict()
        self._saved_state: StateDict = {}  # replay state of the last `save`
        self._replay_states: dict[str, StateDict] = {}  # replay states by checkpoint

    def run_command(self, command: str, value: Any) -> Any:
        """Run a command of rank 0 and return its answer."""
        if command == COLLECT:
            return self._run_command(command, value)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            for category in (UserWarning, RuntimeWarning):
                warnings.simplefilter("always", category)
            result = self._run_command(command, value)
        return Answer(result, tuple(str(warning.message) for warning in caught))

    def _run_command(self, command: str, value: Any) -> Any:
        try:
            if command == RESET:
                self.agent.policy_rng().load_state_dict(self._policy_rng)
                with self._env_timeout.during_step():
                    self.collector.reset()
                return None
            if command == RESTORE:
                self._restore(Path(value))
                return self._is_ready
            if command == COLLECT:
                return self._collect(value)
            if command == SAVE:
                return self._save()
            return self._delete_unused_files(*value)
        except UserError as error:
            return RankFailure(str(error))

    def close(self) -> None:
        self.feed.close()
        self.replay.close()
        self.envs.close()

    @property
    def _is_ready(self) -> bool:
        """True if the replay buffer has enough rows for every batch."""
        return all(self.feed.ready(name) for name in self.replay.windows)

    def _collect(self, step: int) -> Collected:
        """Collect one step and store its rows; `step` is the agent step of the run."""
        with self._env_timeout.during_step():
            self.collector.wait()
        self.collector.steps = step  # for prefill and exploration
        rows = self.collector.collect()
        if len(rows):
            self.replay.add(rows.values, rows.streams)
        metrics = (rows.metrics,) if rows.metrics else ()
        counts = self.collector.metrics()
        return Collected(len(rows), rows.env_steps, metrics, self._is_ready, counts)

    def _save(self) -> dict[str, StateDict]:
        """Write the replay buffer; return this rank's parts of the checkpoint."""
        replay = self._saved_state = self.replay.save()
        acting = {
            "collector": self.collector.state_dict(),
            "policy_rng": self.agent.policy_rng().state_dict(),
        }
        return {self._part("replay"): replay, self._part("collector"): acting}

    def _restore(self, path: Path) -> None:
        with checkpoint.explain_mismatch(path):
            state = self._replay_states[str(path)] = self._read_state(path)
            self.replay.load(state)
            acting = checkpoint.read_part(path, self._part("collector"))
            self.collector.load_state_dict(acting["collector"])
            self.agent.policy_rng().load_state_dict(acting["policy_rng"])

    def _delete_unused_files(self, kept: list[str], saved: str) -> None:
        """Delete unused files; arguments as in `OtherShards`, with paths as text."""
        if saved:
            self._replay_states[saved] = self._saved_state
        try:
            self._replay_states = {
                path: self._replay_states.get(path) or self._read_state(Path(path))
                for path in kept
            }
            self.replay.delete_unused_files(list(self._replay_states.values()))
        except WriteFailed:
            raise
        except (UserError, checkpoint.Damaged, LookupError, InvalidFile):
            pass  # a damaged checkpoint, of which rank 0 warns

    def _read_state(self, path: Path) -> StateDict:
        """Return the state of this rank's replay buffer in a checkpoint."""
        return checkpoint.read_part(path, self._part("replay"))

    def _part(self, name: str) -> str:
        """Return the name of this rank's part of the checkpoint, such as `replay_1`."""
        return f"{name}_{self.rank}"
