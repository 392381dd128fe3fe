"""Rank of this process and number of processes, from environment variables.

`torchrun` and `reverie train --devices N` set RANK, WORLD_SIZE and LOCAL_RANK; `srun`
sets the variables of SLURM, which are used if MASTER_ADDR is set, too. This module does
not import PyTorch, so that the `reverie` command can call it early.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from reverie.api import UserError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Environment variables of `torchrun`, in the order of the fields of `Launch`."""
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
"""Environment variables that `srun` sets: rank, world size and local rank."""
MASTER_PORT = 29500
"""Default port of the store, as in PyTorch."""


class Launch(NamedTuple):
    """Rank of this process, and number of processes that were started together."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # index on this machine
    local_world_size: int = 1
    launcher: str = ""  # `torchrun` (also for `--devices`) or `srun`

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a process with this rank."""
        values = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        return dict(zip(TORCHRUN, map(str, values), strict=True))


def master_address(environ: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Return the address and the port of the store.

    `environ` replaces `os.environ`.
    """
    env = os.environ if environ is None else environ
    port = env.get("MASTER_PORT", str(MASTER_PORT))
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(
            f"MASTER_PORT is {port!r}, which is not a valid port number.\n"
            f"  Fix: export MASTER_PORT={MASTER_PORT}, or another free port."
        )
    return env.get("MASTER_ADDR", "127.0.0.1"), int(port)


def describe_separate_task(environ: Mapping[str, str] | None = None) -> str:
    """Return a message if `srun` started several tasks without MASTER_ADDR.

    Each of them then trains a separate run. Otherwise, return an empty string.
    `environ` replaces `os.environ`.
    """
    env = os.environ if environ is None else environ
    rank, tasks, _ = (env.get(name, "") for name in SLURM)
    if "MASTER_ADDR" in env or not tasks.isdecimal() or int(tasks) < 2:
        return ""
    return (
        f"srun task {rank} of {tasks} trains a separate run; set MASTER_ADDR to train "
        "one run with all tasks"
    )


def find_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Return the rank of this process and the number of processes.

    `Launch()` if this process was started alone. `environ` replaces `os.environ`.
    """
    env = os.environ if environ is None else environ
    try:
        if "RANK" in env and "WORLD_SIZE" in env:
            rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
            local = int(env.get("LOCAL_RANK", rank))
            local_size = int(env.get("LOCAL_WORLD_SIZE", size))
            launch = Launch(rank, size, local, local_size, "torchrun")
        elif "MASTER_ADDR" in env and all(name in env for name in SLURM):
            rank, size, local = (int(env[name]) for name in SLURM)
            # such as `4(x2)` or `4,3`: the number of tasks on each machine
            tasks = env.get("SLURM_STEP_TASKS_PER_NODE", str(size))
            local_size = int(tasks.split(",")[0].split("(")[0])
            launch = Launch(rank, size, local, local_size, "srun")
        else:
            return Launch()
    except ValueError as error:
        raise UserError(
            f"RANK, WORLD_SIZE or a SLURM variable is not a number: {error}.\n"
            "  Fix: start the run with torchrun, srun or `reverie train --devices 2`."
        ) from None
    if not 0 <= launch.rank < launch.world_size:
        raise UserError(
            f"RANK is {launch.rank}, but WORLD_SIZE is {launch.world_size}.\n"
            "  Fix: start the run with torchrun, srun or `reverie train --devices 2`."
        )
    if launch.world_size == 1:
        return Launch()
    master_address(env)  # raises if it is not valid
    return launch
