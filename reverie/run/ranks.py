"""Data-parallel training: rank 0 runs the training loop and controls the other ranks.

Rank 0, the leader, has the environments, the replay buffer or dataset, the log and the
checkpoints. For every update it sends a command to the other ranks, the followers,
samples the global batch, and sends each of them its sequences. They send back
priorities, and the latent states that the replay stores (extras). Every rank has a copy
of the agent and runs the same `agent.train`, in which the collectives of
`distributed/collective.py` are active, so all copies stay equal. Reports and evaluation
run on rank 0 alone, and so does acting, unless the replay is sharded (`shards.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from reverie.api import Agent, Batch, Extras, Metrics, StateDict, UserError
from reverie.distributed import collective
from reverie.distributed.group import (
    LOST_RANK_EXIT_CODE,
    Group,
    explain_lost_rank,
    lost_rank_message,
)
from reverie.distributed.launch import Launch, find_launch
from reverie.distributed.messages import (
    BatchLayout,
    broadcast,
    broadcast_tree,
    gather_batch,
    gather_objects,
    receive_batch,
    scatter_batch,
)
from reverie.distributed.store import host_store, store_variables
from reverie.log.messages import print_message
from reverie.run import device as devices
from reverie.run.config import Config
from reverie.run.factory import MakeEnv, make_agent
from reverie.run.folder import config_from_settings
from reverie.run.memory import batch_settings
from reverie.run.parts import Shard
from reverie.run.shards import COMMANDS as SHARD_COMMANDS
from reverie.run.shards import FollowerShard, OtherShards, ShardFeed
from reverie.run.signals import ALWAYS_HANDLED, HANDLED_IF_DEFAULT, Interrupted
from reverie.run.timeouts import UpdateTimeout
from reverie.storage.run_spaces import RunSpaces

BUILD, LOAD, TRAIN, STATE, STOP = "build", "load", "train", "state", "stop"
"""Commands of rank 0: build the agent, load its state, run an update, gather the state
of the agent, end. `shards.py` has those of a sharded replay."""

T = TypeVar("T")

_group: Group | None = None  # process group of this process, if it has rank 0


def run_on_ranks(loop: Callable[[], T]) -> T:
    """On rank 0: run a training loop, connected to the other ranks if there are any."""
    global _group
    launch = find_launch()
    if launch.world_size == 1:
        return loop()
    with _open_group(launch) as _group:
        try:
            return loop()
        finally:
            _group = None


def run_on_one_rank(function: Callable[[], T]) -> T:
    """Run a function in a process group of one rank, to time collectives."""
    global _group
    store = host_store()  # this reference keeps it open until the group is closed
    variables = store_variables(store.port)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    group = _group = Group(Launch(), _fail)
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value
    try:
        return function()
    finally:
        _group = None
        group.close()


def run_follower(make_env: MakeEnv | None = None) -> None:
    """On all other ranks: run the commands of rank 0 until it sends `STOP`.

    `make_env` builds the environments of this rank, if the replay is sharded; None for
    the environments of the task.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end without a message
    warnings.simplefilter("ignore")  # rank 0 shows them
    with _open_group(find_launch()) as group:
        _ignore_signals()
        follower = Follower(group, make_env)
        try:
            follower.run()
        finally:
            follower.close()


@contextlib.contextmanager
def _open_group(launch: Launch) -> Iterator[Group]:
    """Context of the process group of a run."""
    _limit_threads(launch)
    group = Group(launch, _fail, print_message)
    try:
        yield group
    except BaseException as error:
        # This process prints the error; the others end without a message. After a
        # signal, they get the command to stop.
        if not isinstance(error, Interrupted):
            group.heartbeat.claim_message(type(error).__name__)
        raise
    finally:
        group.close()


def make_leader(
    config: Config,
    agent: Agent,
    spaces: Any,
    device: torch.device,
    precision: str,
    folder: Path | None = None,
) -> Leader | None:
    """Return a `Leader`, which builds the agent on the other ranks.

    None if this process trains without a process group. If the replay is sharded and a
    run folder is given, the leader also builds the environments and replay buffers of
    the other ranks.
    """
    if _group is None:
        return None
    return Leader(_group, config, agent, spaces, device, precision, folder)


class Leader:
    """Rank 0: sends commands to the other ranks."""

    def __init__(
        self,
        group: Group,
        config: Config,
        agent: Agent,
        spaces: Any,
        device: torch.device,
        precision: str,
        folder: Path | None,
    ):
        self.group, self.agent = group, agent
        self._feed: ShardFeed | LeaderFeed | None = None
        self._has_broadcast = False  # True if the other ranks have the agent's state
        check_batches(agent, group.launch.world_size)
        group.heartbeat.timeout = config.run.rank_timeout
        self._timeout = UpdateTimeout(config.run.rank_timeout)
        is_sharded = config.replay.ranks == "sharded" and folder is not None
        control = group.control
        self.other_shards = OtherShards(self._command, control) if is_sharded else None
        """Environments and replay buffers of the other ranks, if they have any."""
        setup = {
            "settings": dataclasses.asdict(config),
            "spaces": RunSpaces(spaces.obs_space, spaces.act_space),
            "device": device.type,
            "precision": precision,
            "folder": str(folder.absolute()) if folder and is_sharded else "",
        }
        self._send(BUILD, setup)

    def broadcast_agent(self) -> None:
        """Send the state of the agent to the other ranks, once."""
        if self._has_broadcast:
            return
        with self._command() as send:
            send(LOAD)
            broadcast_tree(self.agent.state_dict(), self.group.control)
        self._has_broadcast = True

    def train(self, feed: Any) -> Metrics:
        """Run one update on all ranks; return the metrics of the global batch."""
        self.broadcast_agent()
        # keep the same wrapper: the agent reuses the memory of a batch only if the
        # feed is the same object as in the last update
        if self._feed is None or self._feed.feed is not feed:
            self._feed = (
                ShardFeed(feed, self.agent.windows, self._timeout)
                if self.other_shards
                else LeaderFeed(feed, self.group, self._timeout)
            )
        with self._command() as send:
            schedule = self.agent.schedule
            send(TRAIN, schedule.state_dict() if schedule else None)
            # `single`: collectives also run in a group of one rank (`run_on_one_rank`)
            with self._timeout.during_update(), collective.synchronized(single=True):
                metrics = self.agent.train(self._feed)
                metrics = collective.average_metrics(metrics)
        return metrics

    def state_dict(self) -> StateDict:
        """Return the state of the agent.

        Latent states that the agent keeps from one batch to the next are gathered from
        all ranks.
        """
        if not self._has_broadcast:
            return self.agent.state_dict()
        with self._command() as send:
            send(STATE)
            with collective.synchronized(single=True):
                return self.agent.state_dict()

    def close(self) -> None:
        """End the other ranks.

        After a failed command (`in_command` is still True), the other ranks may be
        unable to receive `STOP`. They end when they lose the connection to this
        process.
        """
        if not self.group.in_command:
            with explain_lost_rank():
                self._send(STOP)

    @contextlib.contextmanager
    def _command(self) -> Iterator[Callable[..., None]]:
        """Context of a command that all ranks run; yields the function to send it."""
        self.group.in_command = True
        with explain_lost_rank():
            yield self._send
        self.group.in_command = False

    def _send(self, command: str, value: Any = None) -> None:
        broadcast((command, value), self.group.control)


class LeaderFeed:
    """The feed of rank 0: samples global batches and sends other ranks their part."""

    def __init__(self, feed: Any, group: Group, timeout: UpdateTimeout):
        self.feed, self.group, self.timeout = feed, group, timeout

    def __getattr__(self, name: str) -> Any:
        return getattr(self.feed, name)

    def __call__(self, name: str, out: Batch | None = None) -> Batch:
        # The time limit of an update depends on the windows (kinds of batches, such as
        # "train") that it samples: `UpdateTimeout`.
        self.timeout.add_window(name)
        batch: Batch = self.feed(name)
        total = len(next(iter(batch.values())))
        broadcast((total, BatchLayout(batch)), self.group.control)
        collective.set_batch(total)
        ranges = collective.split_batch(total, self.group.launch.world_size)
        return copy_to(scatter_batch(batch, ranges), out)

    def write_back(self, stepid: torch.Tensor, extras: Extras) -> None:
        gathered = gather_batch({**extras, "stepid": stepid}, _all_ranges(stepid))
        self.feed.write_back(gathered.pop("stepid"), gathered)

    def prioritize(self, stepid: torch.Tensor, priority: torch.Tensor) -> None:
        tensors = {"stepid": stepid, "priority": priority}
        gathered = gather_batch(tensors, _all_ranges(stepid))
        self.feed.prioritize(gathered["stepid"], gathered["priority"])


class FollowerFeed:
    """The feed of the other ranks: receives batches from rank 0.

    Extras and priorities are sent to rank 0, which has the replay buffer.
    """

    def __init__(self, group: Group, device: torch.device, timeout: UpdateTimeout):
        self.group, self.device, self.timeout = group, device, timeout

    def __call__(self, name: str, out: Batch | None = None) -> Batch:
        self.timeout.add_window(name)  # as in `LeaderFeed`
        total, layout = broadcast(None, self.group.control)
        local = collective.set_batch(total)
        return copy_to(receive_batch(layout, local, self.device), out)

    def ready(self, name: str) -> bool:
        """True: rank 0 starts an update only if it can sample the batches."""
        return True

    def write_back(self, stepid: torch.Tensor, extras: Extras) -> None:
        gather_batch({**extras, "stepid": stepid}, _all_ranges(stepid))

    def prioritize(self, stepid: torch.Tensor, priority: torch.Tensor) -> None:
        gather_batch({"stepid": stepid, "priority": priority}, _all_ranges(stepid))

    def count_uses(self, name: str, on: bool) -> None:
        """No effect: rank 0 counts how often the steps of the batches are used."""


def check_batches(agent: Agent, ranks: int) -> None:
    """Raise if a rank would have no sequence of a batch that the agent trains on."""
    sizes = [window.batch for k, window in agent.windows.items() if k != "report"]
    if not sizes:
        raise UserError(
            f"This agent does not train, so it cannot use {ranks} processes.\n"
            "  Fix: start it with one process, --devices 1."
        )
    _check_sequences(min(sizes), ranks)


def check_processes(config: Config) -> None:
    """Do what `check_batches` does with the settings, before processes are started."""
    sizes = [next(iter(group.values())) for group in batch_settings(config)]
    if sizes:
        _check_sequences(min(sizes), config.processes)


def _check_sequences(count: int, ranks: int) -> None:
    if count < ranks:
        raise UserError(
            f"A batch of {count} sequences cannot be divided among {ranks} processes."
            f"\n  Fix: --devices {count}, or larger batches."
        )


def copy_to(batch: Batch, out: Batch | None) -> Batch:
    """Return the batch, or copy it to `out` and return that."""
    if out is None:
        return batch
    for key, value in out.items():
        value.copy_(batch[key], non_blocking=True)
    return out


def _all_ranges(tensor: torch.Tensor) -> list[collective.SequenceRange]:
    """Return the sequences of the global batch that each rank has."""
    total = collective.global_count(len(tensor))
    return collective.split_batch(total, collective.world_size())


class Follower:
    """A rank other than 0: runs the commands of rank 0."""

    agent: Any
    feed: FollowerFeed | ShardFeed

    def __init__(self, group: Group, make_env: MakeEnv | None):
        self.group, self.make_env = group, make_env
        self.shard: FollowerShard | None = None

    def run(self) -> None:
        """Run commands until rank 0 sends `STOP`."""
        while True:
            with explain_lost_rank():
                command, value = broadcast(None, self.group.control)
                if command == STOP:
                    return
                self.group.in_command = True
                self._run(command, value)
                self.group.in_command = False

    def close(self) -> None:
        if self.shard:
            self.shard.close()

    def _run(self, command: str, value: Any) -> None:
        """Run one command; its answer, if it has one, is sent to rank 0."""
        if command == BUILD:
            self._build(**value)
        elif command == LOAD:
            self.agent.load_state_dict(broadcast_tree(None, self.group.control))
        elif command == TRAIN:
            if value is not None:
                self.agent.schedule.load_state_dict(value)
            with self.feed.timeout.during_update(), collective.synchronized():
                collective.average_metrics(self.agent.train(self.feed))
        elif command == STATE:
            with collective.synchronized():
                self.agent.state_dict()  # takes part in its collectives
        elif command in SHARD_COMMANDS:
            assert self.shard
            gather_objects(self.shard.run_command(command, value), self.group.control)

    def _build(
        self,
        settings: dict[str, Any],
        spaces: Any,
        device: str,
        precision: str,
        folder: str,
    ) -> None:
        """Build the agent and, if a folder is given, environments and replay buffer."""
        config, launch = config_from_settings(settings), self.group.launch
        # `Shard` says which environments and sequences belong to this rank. Without a
        # folder the replay is not sharded, so `Shard()` is not split among ranks.
        # `FollowerShard` has the environments and the replay buffer of this rank, and
        # `ShardFeed` samples batches from this buffer.
        shard = Shard(launch.rank, launch.world_size) if folder else Shard()
        devices.seed_everything(config.seed)
        own_device = devices.pick_device(device, config.run.train_devices)
        if config.deterministic:
            devices.make_deterministic()
        else:
            devices.enable_autotuning(own_device)
        devices.keep_freed_memory(own_device)
        # the seed for acting; the random generators of training are sent by `LOAD`
        seeded = dataclasses.replace(config, seed=shard.seed(config.seed))
        self.agent = make_agent(seeded, spaces, own_device, precision)
        timeout = UpdateTimeout(config.run.rank_timeout)
        self.group.heartbeat.timeout = config.run.rank_timeout
        self.feed = FollowerFeed(self.group, own_device, timeout)
        if folder:
            self.shard = FollowerShard(
                config,
                self.agent,
                spaces,
                shard,
                own_device,
                precision,
                Path(folder),
                self.make_env,
            )
            self.feed = ShardFeed(self.shard.feed, self.agent.windows, timeout)


def _limit_threads(launch: Launch) -> None:
    """Divide the CPU cores among the processes of this machine."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_world_size))


def _ignore_signals() -> None:
    """Ignore the signals that end a run: rank 0 saves, then ends all ranks."""
    for name in (*ALWAYS_HANDLED, *HANDLED_IF_DEFAULT):
        if number := getattr(signal, name, None):
            signal.signal(number, signal.SIG_IGN)


def _fail(reason: str) -> None:
    """End this process, whose main thread may wait for a lost rank forever.

    Called by the heartbeat thread; `reason` is empty if another rank prints it.
    """
    if reason:
        print_message(f"reverie: {lost_rank_message(reason)}")
    os._exit(LOST_RANK_EXIT_CODE)
