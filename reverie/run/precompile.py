"""Compile the kernels of an agent in parallel, while the run starts.

On a GPU, an agent needs dozens of kernels before its first update is done. If they are
not in the caches on disk, they would be compiled one after the other. Instead, a second
process, the compiler process, builds the same agent, and runs a policy step and an
update that record the kernels instead of launching them. Its worker processes compile
each kernel to the caches, from which the run loads it.

The compiler process gets a copy of the config and shares no memory with the run. If it
fails, the run continues and compiles the kernels that are missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from reverie.run.config import Config

MAX_SECONDS = 60.0
"""The run continues if the kernels are not compiled after this time."""
MIN_FREE_BYTES = 24 << 30
"""With less free GPU memory, kernels are not precompiled: the compiler process needs
memory for an update, which would otherwise be free for the replay buffer of the run."""
MEMORY_FRACTION = 0.2
"""Part of the GPU memory that the compiler process may use."""
MAX_WORKERS = 32
"""Maximum number of worker processes of the compiler process."""
RECORDED_FOLDERS = ("agents", "kernels", "nets", "worlds")
"""Subpackages whose code determines which kernels an agent needs."""

# Code of the compiler process. `python -P` keeps the current folder out of `sys.path`
# until this code sets it.
START_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from reverie.run.precompile import main; main()"
)


class Request(NamedTuple):
    """What the compiler process needs to build the agent."""

    config: Config
    obs_space: Any
    act_space: Any
    num_envs: int
    device: str
    precision: str
    marker: str
    """File that is written if all kernels were compiled."""


class KernelCompiler:
    """The process that records and compiles kernels, as seen by the run."""

    def __init__(self) -> None:
        path = json.dumps([os.path.abspath(entry or os.getcwd()) for entry in sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", START_CODE, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            process_group=0,  # not interrupted by Ctrl-C, and killed with its children
        )

    def send(self, request: Request) -> None:
        """Send a request to the process, which then compiles its kernels.

        A thread writes it, because the process does not read before it has imported
        PyTorch, and a request may be larger than the buffer of a pipe. The pipe stays
        open, because the process exits when its stdin is closed.
        """
        data = pickle.dumps(request)
        threading.Thread(target=self._write, args=(data,), daemon=True).start()

    def _write(self, data: bytes) -> None:
        assert self.process.stdin
        # `wait` reports that the process has ended or was closed
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def wait(self, should_stop: Callable[[], object]) -> str:
        """Wait for the kernels; return why they were not compiled, or an empty string.

        The reason is a clause for a message, such as "the process ended". If
        `should_stop` returns a true value, stop waiting and return an empty string.
        """
        assert self.process.stdout
        deadline = time.monotonic() + MAX_SECONDS
        try:
            while not select.select([self.process.stdout], [], [], 0.1)[0]:
                if should_stop():
                    return ""
                if time.monotonic() > deadline:
                    return f"they took more than {MAX_SECONDS:.0f} seconds"
            answer = self.process.stdout.read()
            return str(json.loads(answer)["error"]) if answer else "the process ended"
        except ValueError:
            return "the process ended"
        finally:
            self.close()

    def close(self) -> None:
        """End the process and its workers."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert pipe
                pipe.close()


_early_compiler: KernelCompiler | None = None


def start_compiler_early() -> None:
    """Start the compiler before PyTorch is imported, if it is probably needed.

    It is needed on the first start with a GPU, when no kernels are in the cache.
    """
    global _early_compiler
    home = os.environ.get("TRITON_HOME") or Path.home()
    cache = os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache")
    has_gpu = os.path.exists("/dev/nvidiactl")
    is_first = has_gpu and not Path(cache, "reverie").exists()
    if is_first and _early_compiler is None:
        with contextlib.suppress(OSError):
            _early_compiler = KernelCompiler()


def stop_early_compiler() -> None:
    """End the process of `start_compiler_early`, if it is not used."""
    global _early_compiler
    if _early_compiler:
        _early_compiler.close()
        _early_compiler = None


def start_compiling(
    config: Config,
    spaces: Any,
    num_envs: int,
    device: torch.device,
    precision: str,
    acceleration: str,
) -> KernelCompiler | None:
    """Start to compile the kernels of a run; None if this is not needed or possible."""
    global _early_compiler
    try:
        marker = _find_marker(config, spaces, num_envs, device, acceleration)
        if marker is None:
            return None
        compiler, _early_compiler = _early_compiler or KernelCompiler(), None
        shapes = spaces.obs_space, spaces.act_space, num_envs
        compiler.send(Request(config, *shapes, str(device), precision, str(marker)))
        return compiler
    except (OSError, TypeError, AttributeError, pickle.PicklingError):
        return None  # for example, spaces or settings that cannot be pickled
    finally:
        stop_early_compiler()


def _find_marker(
    config: Config, spaces: Any, num_envs: int, device: torch.device, acceleration: str
) -> Path | None:
    """Return the marker file of a run; None if its kernels need not be compiled.

    The compiler process creates the marker when it has compiled all kernels. Its name
    is a hash of everything that determines them. It is empty and contains no kernels.
    """
    import torch

    from reverie.kernels.accelerate import kernels_available
    from reverie.plugins import settings_name

    if acceleration == "none" or not kernels_available(device) or os.name != "posix":
        return None
    import triton

    from reverie.kernels.recording import marker_folder

    # Create the CUDA context of the run before the compiler process creates its own:
    # contexts are created one after the other, and the run needs its context first.
    torch.empty(1, device=device)
    if torch.cuda.mem_get_info(device)[0] < MIN_FREE_BYTES:
        return None
    package = Path(__file__).parent.parent
    files = [
        (str(path.relative_to(package)), path.stat().st_mtime_ns)
        for folder in RECORDED_FOLDERS
        for path in sorted((package / folder).rglob("*.py"))
    ]
    key = (
        *(config.agent, getattr(config, settings_name(config.agent)), config.explore),
        *(config.precision, acceleration, num_envs, spaces.obs_space, spaces.act_space),
        *(torch.__version__, triton.__version__, torch.cuda.get_device_name(device)),
        files,
    )
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    marker = Path(marker_folder(), name)
    return None if marker.exists() else marker


# Functions of the compiler process


def main() -> None:
    """Read a request from stdin, compile its kernels, and write the result to stdout.

    Results: `{"error": ""}`, or the reason why not all kernels were compiled.
    """
    output = os.dup(1)
    os.dup2(2, 1)  # stdout carries the result only, and agents may print
    try:
        error = _compile_requested()
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    os.write(output, json.dumps({"error": error.partition("\n")[0][:300]}).encode())
    os.close(output)
    # ends the workers as well, and skips the slow release of the CUDA context
    os.killpg(0, signal.SIGKILL)


def _compile_requested() -> str:
    """Compile the kernels of the request on stdin; return the first error, if any."""
    import multiprocessing

    from reverie.kernels import recording

    _import_kernels()
    # Workers are forked before CUDA is used, and after all modules are imported.
    count = min(len(os.sched_getaffinity(0)), MAX_WORKERS)
    pool = multiprocessing.get_context("fork").Pool(count)
    utilities = recording.LauncherUtilities()  # needed by the first launch
    results = [pool.apply_async(recording.compile_kernel, [utilities])]
    request: Request = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_exit_with_run, daemon=True).start()

    def add(kernel: Any) -> None:
        results.append(pool.apply_async(recording.compile_kernel, [kernel]))

    error = ""
    try:
        record_agent(request, add)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    errors = [result.get() for result in results]
    error = error or next(filter(None, errors), "")
    if not error:
        marker = Path(request.marker)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    return error


def _import_kernels() -> None:
    """Import all modules with kernels, and those that build an agent."""
    import importlib
    import pkgutil

    from reverie import kernels
    from reverie.run import factory, parts  # noqa: F401

    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        importlib.import_module(module.name)


def _exit_with_run() -> None:
    """End this process and its workers when the run ends or closes the pipe."""
    sys.stdin.buffer.read(1)
    os.killpg(0, signal.SIGKILL)


def record_agent(request: Request, add: Callable[[Any], None]) -> None:
    """Build the agent; record the kernels of a policy step, an update and a report.

    `add` is called with each kernel.
    """
    import torch

    from reverie.kernels.recording import record_kernels
    from reverie.run.device import enable_autotuning
    from reverie.run.factory import make_agent

    config, device = request.config, torch.device(request.device)
    if device.type == "cuda":
        torch.cuda.set_device(0 if device.index is None else device.index)
        torch.cuda.set_per_process_memory_fraction(MEMORY_FRACTION)
    spaces = SimpleNamespace(obs_space=request.obs_space, act_space=request.act_space)
    with record_kernels(add):
        agent = make_agent(config, spaces, device, request.precision)
        record_policy(agent, request.obs_space, request.num_envs)
        feed = open_zeros_feed(agent, spaces, config, device)
        record_update(agent, feed)
        # Without these kernels, only the first report takes longer, so errors, such as
        # too little memory, are left to the report of the run.
        with contextlib.suppress(Exception):
            record_report(agent, feed)
        if device.type == "cuda" and not config.deterministic:
            # While workers compile the recorded kernels, let cuDNN choose algorithms as
            # in the run. The run has to choose again, but this is faster, because
            # libraries have been read and the CUDA driver has cached compiled code.
            enable_autotuning(device)
            with contextlib.suppress(Exception):  # all kernels are recorded already
                record_update(agent, feed)
    del agent, feed
    if device.type == "cuda":
        torch.cuda.empty_cache()


def record_policy(agent: Any, obs_space: Any, num_envs: int) -> None:
    """Run one policy step on zeros."""
    obs = {key: space.zeros(num_envs) for key, space in obs_space.items()}
    agent.policy(agent.initial(num_envs), obs)


def open_zeros_feed(agent: Any, spaces: Any, config: Config, device: Any) -> Any:
    """Return a feed of batches from a replay buffer of zeros."""
    from reverie.replay.buffer import Replay
    from reverie.run import parts

    windows = agent.windows.values()
    steps = max(w.batch * (w.length + w.context) + w.span for w in windows)
    # observations with the prefix `log/` are only logged, and not stored
    row_spaces = {**spaces.obs_space, **spaces.act_space}
    replay = Replay(
        {key: space for key, space in row_spaces.items() if key[:4] != "log/"},
        agent.extras,
        replace(config.replay, storage="ram", save=False, online=False),
        capacity=steps,
        num_envs=1,
        windows=agent.windows,
        directory=None,
        seed=0,
    )
    replay.add_episode({key: x.zeros(steps) for key, x in replay.spaces.items()})
    return parts.open_feed(replay, device, deterministic=True)  # no prefetch thread


def record_update(agent: Any, feed: Any) -> None:
    """Run one update.

    An agent with a schedule updates only some components at a time, so all of its
    `sections` are run instead.
    """
    if agent.schedule is None:
        agent.train(feed)
        return
    for section in agent.sections(feed).values():
        section()


def record_report(agent: Any, feed: Any) -> None:
    """Run the report of the agent on one batch."""
    if "report" in agent.windows:
        agent.report(feed)
