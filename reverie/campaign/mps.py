"""NVIDIA MPS, with which kernels of several processes run on a GPU at the same time.

Without MPS, the processes that share a GPU take turns (time slicing). Many kernels of
an update use only a part of the GPU, and the rest of it is idle then.

All campaigns of a user on a machine share one MPS daemon. The first of them starts it,
and the last one stops it. Runs are not limited to a part of the multiprocessors
(`CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`): some matrix products of cuBLAS were wrong then.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any

from reverie.storage.atomic import open_append
from reverie.storage.os_errors import WriteFailed
from reverie.storage.system import lock_file

PROGRAM = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
"""Environment variables with the folder of the daemon's pipes and that of its log."""
TIMEOUT = 20.0
"""Time limit of a call of the control program, in seconds."""


class MpsUnavailable(Exception):
    """MPS cannot be used on this machine; the message says why."""


class MpsDaemon:
    """The MPS daemon of this user.

    Processes with the environment variables in `variables` connect to it.
    """

    def __init__(self) -> None:
        user = os.getuid() if hasattr(os, "getuid") else ""
        folder = Path(tempfile.gettempdir()) / f"reverie-mps-{user}"
        self.folder = folder
        self.variables = {PIPES: str(folder), LOGS: str(folder)}
        # File on which each campaign that uses the daemon holds a shared lock. The
        # campaign that can get an exclusive lock is the last one: it stops the daemon.
        self._users: IO[Any] | None = None

    def open(self) -> None:
        """Start the daemon, unless another campaign has started it."""
        if PIPES in os.environ:  # a daemon that the user started
            self.variables = {}
            return
        if shutil.which(PROGRAM) is None:
            raise MpsUnavailable(f"{PROGRAM} is not installed")
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            info = self.folder.lstat()
            if self.folder.is_symlink() or info.st_uid != os.getuid():
                raise MpsUnavailable(f"{self.folder} belongs to another user")
            self._users = os.fdopen(open_append(self.folder / "users.lock"), "ab")
            lock_file(self._users, exclusive=False, seconds=TIMEOUT)
            if not self._is_running():
                self._call("-d")
                if not self._is_running():
                    raise MpsUnavailable("its daemon does not answer")
        except (OSError, WriteFailed, subprocess.SubprocessError) as error:
            self.close()
            raise MpsUnavailable(" ".join(str(error).split())) from None
        except MpsUnavailable:
            self.close()
            raise

    def close(self) -> None:
        """Stop the daemon, unless another campaign uses it."""
        if self._users is None:
            return
        with self._users, contextlib.suppress(OSError, subprocess.SubprocessError):
            lock_file(self._users)
            self._call(command="quit")
        self._users = None

    def _is_running(self) -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):
            self._call(command="get_server_list")
            return True
        return False

    def _call(self, *arguments: str, command: str = "") -> None:
        # Device numbers of the runs refer to the devices that the daemon sees, so the
        # daemon must see all of them.
        hidden = "CUDA_VISIBLE_DEVICES"
        environment = {key: x for key, x in os.environ.items() if key != hidden}
        subprocess.run(
            [PROGRAM, *arguments],
            input=f"{command}\n".encode(),
            env={**environment, **self.variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT,
            check=True,
        )
