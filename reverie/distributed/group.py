"""The process group of a data-parallel run, and the store that its processes share.

Tensors in host memory are exchanged by gloo, tensors on a GPU by NCCL. If a process
ends, its connections close, which raises an error in the others. If a process hangs or
its machine fails, connections stay open; `heartbeat.py` detects that.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from reverie.api import UserError
from reverie.distributed.collective import captured_graphs
from reverie.distributed.heartbeat import FAILURE, RANK_TIMEOUT, Heartbeat
from reverie.distributed.launch import Launch
from reverie.distributed.store import connect_store, open_store, with_prefix

UPDATE_TIMEOUT = timedelta(minutes=10)
"""Maximum time to wait for another rank in an update, which may compile kernels."""
COMMAND_TIMEOUT = timedelta(days=365)
"""Maximum time to wait for the next command of rank 0, which may be evaluating."""
LOST_RANK_EXIT_CODE = 2
"""Exit code of a process that ends because another one is lost."""

_CONNECTION_ERROR = re.compile(
    "gloo|nccl|connection (closed|reset|refused)|broken pipe", re.I
)
"""Matches messages of errors that are caused by a lost connection."""


_open_heartbeats: list[Heartbeat] = []  # of the groups that are not closed


class Group:
    """The process group; the subgroup `control` transmits commands of rank 0.

    If a rank is lost, the heartbeat thread calls `fail` with the reason, or with an
    empty string if another rank prints the reason. `show` prints which ranks have not
    started after some time.
    """

    def __init__(
        self,
        launch: Launch,
        fail: Callable[[str], None],
        show: Callable[[str], None] = lambda text: None,
    ):
        self.launch = launch
        self.in_command = False  # True during a command, and after one that failed
        has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        # NCCL must not register the buffers of captured operations: ranks would wait
        # for each other during the capture, which may fail on one of them.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        with explain_lost_rank():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
                store=open_store(launch, UPDATE_TIMEOUT, show),
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=UPDATE_TIMEOUT,
            )
            self.control = dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)
            # a separate connection, because calls on one connection block each other
            store = connect_store(timedelta(seconds=RANK_TIMEOUT))
            self.heartbeat = Heartbeat(launch, store, fail)
            dist.barrier(group=None)
            self.heartbeat.start()
        _open_heartbeats.append(self.heartbeat)

    def close(self) -> None:
        """Close all connections.

        After a command that failed, NCCL could wait forever for operations of another
        rank: its connections are closed at the end of the process.
        """
        _open_heartbeats.remove(self.heartbeat)
        self.heartbeat.stop()
        if self.in_command and "nccl" in dist.get_backend_config():
            return
        for graph in list(captured_graphs):
            graph.reset()
        captured_graphs.clear()
        dist.destroy_process_group()


def has_reported_failure(store: Any) -> bool:
    """True if a process that uses the store of `host_store` prints its error."""
    return bool(with_prefix(store).check([FAILURE]))


def lost_rank_message(reason: str) -> str:
    """Return the error message of a run that ends because a process is lost."""
    return (
        f"{reason} All processes of this run end; its last checkpoint is intact.\n"
        "  Fix: see the error messages of the other processes. The same command "
        "resumes the run; --run.rank_timeout gives slow ranks more time."
    )


@contextlib.contextmanager
def explain_lost_rank() -> Iterator[None]:
    """Context that ends the run with one error message if a connection fails.

    The first rank that gets a connection error raises a `UserError`. The others exit
    without a message.
    """
    try:
        yield
    except RuntimeError as error:
        is_network = isinstance(error, (dist.DistError, dist.DistNetworkError))
        if not is_network and not _CONNECTION_ERROR.search(str(error)):
            raise
        # remove the path of a source file, such as `[/pytorch/.../pair.cc:553]`
        detail = re.sub(r"\[/[^]]*\] ?", "", str(error).strip().splitlines()[0])
        detail = detail.split(". ")[0][:100]
        reason = f"The connection to another process of this run failed ({detail})."
        if not all(heartbeat.claim_message(reason) for heartbeat in _open_heartbeats):
            raise SystemExit(LOST_RANK_EXIT_CODE) from error  # another rank prints it
        raise UserError(lost_rank_message(reason)) from error
