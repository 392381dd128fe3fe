"""Without the POSIX parts of the standard library, agents are evaluated and act."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from reverie.run.config import resolve
from reverie.run.train import train

POSIX_MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")
POSIX_NAMES = {
    "os": """
        fork forkpty geteuid getgid getloadavg getpgid getuid killpg memfd_create mkfifo
        nice posix_fallocate posix_spawn pread preadv pwrite pwritev sched_getaffinity
        setsid statvfs sysconf uname wait3 wait4 O_CLOEXEC O_DIRECTORY O_NOFOLLOW
        O_NONBLOCK O_SYNC
    """,
    "signal": """
        SIGALRM SIGBUS SIGCHLD SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGUSR1 SIGUSR2
        SIGXCPU SIGXFSZ alarm pthread_kill setitimer
    """,
    "select": "poll epoll",
    "mmap": "MADV_DONTNEED MAP_SHARED PROT_READ",
    "time": "CLOCK_BOOTTIME clock_gettime",
}
"""Parts of the standard library that Windows does not have."""

WITHOUT_POSIX = """
import importlib, json, pkgutil, sys
import einops, gymnasium, jaxtyping, numpy, PIL.Image, safetensors.torch, torch, yaml

logdir, modules, names = json.loads(sys.argv[1])
for module in modules:
    sys.modules[module] = None
sys.modules["triton"] = None  # it has no builds for Windows
for module_name, attributes in names.items():
    module = importlib.import_module(module_name)
    for name in attributes.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "win32"

import reverie
from reverie.cli import main as cli
from reverie.envs import make

failed = []
for module in pkgutil.walk_packages(reverie.__path__, "reverie."):
    if module.name == "reverie.__main__":
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        failed.append([module.name, error.name])

assert cli.main(["eval", logdir, "--episodes", "2"]) == 0
result = reverie.evaluate(logdir, episodes=1)
player = reverie.load(logdir)
env = make("catch")
action = player.act(env.reset())
print(json.dumps([failed, result.summary["score"], int(action)]))
"""


@pytest.mark.extended
def test_agents_are_evaluated_and_act_without_posix(tmp_path):
    flags = {"task": "catch", "run.steps": 60, "run.envs": 2, "device": "cpu"}
    flags |= {"logdir": str(tmp_path), "logger.outputs": "jsonl"}
    flags |= {"dreamer.batch_size": 2}
    train(resolve(["debug"], flags=list(flags.items())))
    arguments = json.dumps([str(tmp_path), POSIX_MODULES, POSIX_NAMES])
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX, arguments], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    failed, score, action = json.loads(process.stdout.splitlines()[-1])
    # fused kernels, and fast versions that are built from them, need Triton
    assert all(missing.startswith("triton") for _, missing in failed), failed
    assert all(re.search(r"\.kernels\.|\.fast$", name) for name, _ in failed), failed
    assert -1 <= score <= 1
    assert action in range(3)
    result = json.loads((tmp_path / "eval.json").read_text())
    assert result["kind"] == "episodes"
