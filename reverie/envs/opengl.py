"""Select an OpenGL backend for rendering without a display.

Simulators based on MuJoCo read `MUJOCO_GL` when they are imported. Without it they may
choose a window system that fails at the first image on a machine without a display. So
suites call `select_backend` before they import their simulator. It tries EGL (GPU, or
Mesa on the CPU) and then OSMesa (CPU), each in a separate process, because a broken
driver may crash the process. A `MUJOCO_GL` that is already set is kept.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, MutableMapping
from ctypes.util import find_library
from functools import cache
from importlib import import_module

from reverie.api import UserError

Probe = Callable[[str], str]
"""Tests a backend; returns an error message, empty if it works."""

LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}
"""Backends that need no display, in the order they are tried, and their libraries."""

# code of the process that tests a backend
PROBE_CODE = """
import os, mujoco
mujoco.GLContext(64, 64).make_current()
os._exit(0)  # some drivers crash when the context is freed
"""

DISABLED = ("disable", "disabled", "off", "false", "0")
"""Values of `MUJOCO_GL` that disable rendering."""
WINDOW_SYSTEMS = ("glfw", "glx", "cgl", "wgl")
"""Values of `MUJOCO_GL` that render with a window system."""
INSTALL = "sudo apt-get install libegl1 libgl1-mesa-dri libosmesa6"
"""Command that installs the libraries of both backends on Debian and Ubuntu."""
TIMEOUT = 60.0
"""Seconds that a driver may take to create a context."""


def select_backend(
    render: bool = True,
    no_images_flag: str = "",
    environ: MutableMapping[str, str] | None = None,
    probe: Probe | None = None,
    platform: str = sys.platform,
) -> str:
    """Set `MUJOCO_GL` to a working backend and return it.

    Returns an empty string if no backend works, or if the platform needs none. If no
    backend works and `render` is true, raises `UserError`, which suggests
    `no_images_flag` (a flag that disables rendering) as a fix.
    """
    _import_triton()
    environ = os.environ if environ is None else environ
    probe = probe or probe_backend
    no_images_fix = f", or disable images: {no_images_flag}" if no_images_flag else ""
    backend = environ.get("MUJOCO_GL", "").strip().lower()
    if backend:
        if render:
            _check_user_choice(backend, environ, probe, no_images_fix)
        return backend
    if not platform.startswith("linux"):
        return ""  # the OpenGL of these platforms needs no display
    problems = []
    for backend in LIBRARIES:
        problem = probe(backend)
        if not problem:
            environ["MUJOCO_GL"] = backend
            return backend
        problems.append(f"{backend}: {problem}")
    if render:
        raise UserError(
            "This task renders images, but no OpenGL backend works without a display "
            f"({'; '.join(problems)}).\n  Fix: {INSTALL}{no_images_fix}"
        )
    return ""


@cache
def probe_backend(name: str) -> str:
    """Create a context with MuJoCo; return the error, empty if it works."""
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-c", PROBE_CODE],
            env={**os.environ, "MUJOCO_GL": name},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return f"no context within {TIMEOUT:g} seconds"
    if process.returncode == 0:
        return ""
    if find_library(LIBRARIES[name]) is None:
        return f"lib{LIBRARIES[name]} is not installed"
    lines = process.stderr.strip().splitlines()
    return lines[-1] if lines else f"driver exited with status {process.returncode}"


def _import_triton() -> None:
    """Import Triton, if it is installed, before the simulator loads an OpenGL driver.

    Triton and Mesa contain different versions of LLVM. The process crashes if Triton is
    imported after Mesa has created a context; some functions of PyTorch import it.
    Processes that have not imported PyTorch, such as workers, do not need Triton.
    """
    if "torch" in sys.modules:
        with contextlib.suppress(ImportError):
            import_module("triton")


def _check_user_choice(
    backend: str, environ: MutableMapping[str, str], probe: Probe, no_images_fix: str
) -> None:
    """Raise `UserError` if the backend that the user has set cannot render."""
    problem = ""
    if backend in DISABLED:
        problem = "it disables rendering"
    elif backend in LIBRARIES:
        problem = probe(backend)
    elif backend not in WINDOW_SYSTEMS:
        problem = f"it must be one of {', '.join((*LIBRARIES, *WINDOW_SYSTEMS))}"
    elif backend in ("glfw", "glx") and not (
        environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY")
    ):
        problem = "there is no display"
    if problem:
        raise UserError(
            f"This task renders images, but MUJOCO_GL={backend} does not work: "
            f"{problem}.\n  Fix: `unset MUJOCO_GL`, so that a backend that works is "
            f"selected; if there is none: {INSTALL}{no_images_fix}"
        )
