"""Processes in which tests run a function on 1, 2 or 3 ranks (gloo, on a CPU).

They are started once per test session, because a start takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import traceback
from multiprocessing import connection
from pathlib import Path
from typing import Any

from reverie.distributed.launch import Launch

SIZE = 3
"""Number of processes; a call may use fewer."""
FAILURE_SECONDS = 60
"""Time that a call waits for the other ranks after one has failed."""


class RankGroup:
    """Runs functions of test modules in several processes."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.calls = 0
        self.pipes, self.processes = [], []
        for _ in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, ranks: int, function: Any, *args: Any) -> list[Any]:
        """Return the results of `function(*args)` on every rank of a process group.

        The function is at the top level of a module; arguments and results are
        pickled.
        """
        self.calls += 1
        store = str(Path(self.folder.name) / f"store{self.calls}")
        return self._call(ranks, {}, store, function, args)

    def launch(self, ranks: int, function: Any, *args: Any) -> list[Any]:
        """Return the results of `function(*args)` in processes started by a launcher.

        They have its environment variables, and no process group yet.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return self._call(ranks, shared, "", function, args)

    def _call(
        self, ranks: int, shared: dict[str, str], store: str, function: Any, args: Any
    ) -> list[Any]:
        pipes = self.pipes[:ranks]
        for rank, pipe in enumerate(pipes):
            place = Launch(rank, ranks, rank, ranks).environment() if shared else {}
            pipe.send(({**shared, **place}, store, rank, ranks, function, args))
        results: dict[int, Any] = {}
        errors: list[str] = []
        while len(results) < ranks:
            waiting = [pipe for i, pipe in enumerate(pipes) if i not in results]
            # after an error, the other ranks may wait for the failed one
            ready = connection.wait(waiting, FAILURE_SECONDS if errors else None)
            assert ready, "\n".join(errors)
            for pipe in ready:
                result, error = pipe.recv()
                results[pipes.index(pipe)] = result
                errors += [error] * bool(error)
        assert not errors, "\n".join(errors)
        return [results[rank] for rank in range(ranks)]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
        self.folder.cleanup()


def _serve(pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while (call := pipe.recv()) is not None:
        variables, store, rank, ranks, function, args = call
        os.environ.update(variables)
        try:
            if store:
                dist.init_process_group(
                    "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
                )
                # a rank that closes its connections early would fail the others here
                dist.barrier()
            pipe.send((function(*args), ""))
        except BaseException:
            pipe.send((None, f"rank {rank} of {ranks}:\n{traceback.format_exc()}"))
        finally:
            for name in variables:
                del os.environ[name]
            if dist.is_initialized():
                dist.destroy_process_group()
