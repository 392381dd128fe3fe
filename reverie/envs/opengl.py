"""Select an OpenGL backend for rendering without a display.

Simulators based on MuJoCo read `MUJOCO_GL` when they are imported. Without it they may
choose a window system that fails at the first image on a machine without a display. So
suites call `select_backend` before they import their simulator. It tries EGL (GPU, or
Mesa on the CPU) and then OSMesa (CPU), each in a separate process, because a broken
driver may crash the process. A `MUJOCO_GL` that is already set is kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, MutableMapping
from functools import cache

from reverie.api import UserError

Probe = Callable[[str], str]
"""Tests a backend; returns an error message, empty if it works."""

BACKENDS = ("egl", "osmesa")
"""Backends that need no display, in the order they are tried."""

DISABLED = ("disable", "disabled", "off", "false", "0")
WINDOW_SYSTEMS = ("glfw", "glx", "cgl", "wgl")
INSTALL = "sudo apt-get install libegl1 libgl1-mesa-dri libosmesa6"
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

    Returns an empty string if no backend works, or if the platform needs none. If none
    works and `render` is true, raises `UserError`; its message suggests
    `no_images_flag`, the flag that disables rendering.
    """
    environ = os.environ if environ is None else environ
    probe = probe or probe_backend
    alternative = f", or disable images: {no_images_flag}" if no_images_flag else ""
    backend = environ.get("MUJOCO_GL", "").strip().lower()
    if backend:
        if render:
            _check_user_choice(backend, environ, probe, alternative)
        return backend
    if not platform.startswith("linux"):
        return ""  # the OpenGL of these platforms needs no display
    problems = []
    for backend in BACKENDS:
        problem = probe(backend)
        if not problem:
            environ["MUJOCO_GL"] = backend
            return backend
        problems.append(f"{backend}: {problem}")
    if render:
        raise UserError(
            "This task renders images, but no OpenGL backend works without a display "
            f"({'; '.join(problems)}).\n  Fix: {INSTALL}{alternative}"
        )
    return ""


@cache
def probe_backend(name: str) -> str:
    """Create a context as MuJoCo does; return the error, empty if it works."""
    try:
        process = subprocess.run(
            [sys.executable, "-S", "-c", PROBES[name]],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return f"no context within {TIMEOUT:g} seconds"
    if process.returncode == 0:
        return ""
    lines = process.stderr.strip().splitlines()
    return lines[-1] if lines else f"driver exited with status {process.returncode}"


def _check_user_choice(
    backend: str, environ: MutableMapping[str, str], probe: Probe, alternative: str
) -> None:
    """Raise `UserError` if the backend that the user has set cannot render."""
    problem = ""
    if backend in DISABLED:
        problem = "it disables rendering"
    elif backend in BACKENDS:
        problem = probe(backend)
    elif backend not in WINDOW_SYSTEMS:
        problem = f"it must be one of {', '.join((*BACKENDS, *WINDOW_SYSTEMS))}"
    elif backend in ("glfw", "glx") and not (
        environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY")
    ):
        problem = "there is no display"
    if problem:
        raise UserError(
            f"This task renders images, but MUJOCO_GL={backend} does not work: "
            f"{problem}.\n  Fix: `unset MUJOCO_GL` to select one that works; if none "
            f"does: {INSTALL}{alternative}"
        )


# Plain ctypes, so that a probe takes 0.1 seconds and needs no package. These are the
# calls that MuJoCo makes: create a context on any device, without a surface.
_EGL = """
import ctypes, sys
try:
    egl = ctypes.CDLL("libEGL.so.1")
except OSError:
    sys.exit("libEGL.so.1 is not installed")
pointer, integer = ctypes.c_void_p, ctypes.c_int
egl.eglGetProcAddress.restype = pointer

def extension(name, result, *arguments):
    address = egl.eglGetProcAddress(name)
    return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None

query = extension(
    b"eglQueryDevicesEXT", ctypes.c_uint, integer, pointer, ctypes.POINTER(integer)
)
display_of = extension(
    b"eglGetPlatformDisplayEXT", pointer, ctypes.c_uint, pointer, pointer
)
if not query or not display_of:
    sys.exit("libEGL.so.1 cannot list devices")
devices, count = (pointer * 32)(), integer()
if not query(32, devices, ctypes.byref(count)) or not count.value:
    sys.exit("libEGL.so.1 finds no device; a driver such as Mesa may be missing")
for name in ("eglInitialize", "eglChooseConfig", "eglMakeCurrent", "eglBindAPI"):
    getattr(egl, name).restype = ctypes.c_uint
egl.eglInitialize.argtypes = [pointer, pointer, pointer]
egl.eglChooseConfig.argtypes = [pointer, pointer, pointer, integer, pointer]
egl.eglCreateContext.argtypes = [pointer, pointer, pointer, pointer]
egl.eglCreateContext.restype = pointer
egl.eglMakeCurrent.argtypes = [pointer] * 4
attributes = (integer * 13)(
    0x3024, 8, 0x3023, 8, 0x3022, 8, 0x3025, 24, 0x3033, 1, 0x3040, 8, 0x3038
)
for device in devices[: count.value]:
    display = display_of(0x313F, device, None)
    if not display or not egl.eglInitialize(display, None, None):
        continue
    config, config_count = pointer(), integer()
    egl.eglChooseConfig(
        display, attributes, ctypes.byref(config), 1, ctypes.byref(config_count)
    )
    if not config_count.value or not egl.eglBindAPI(0x30A2):
        continue
    context = egl.eglCreateContext(display, config, None, None)
    if context and egl.eglMakeCurrent(display, None, None, context):
        sys.exit(0)
sys.exit("no device can create a context")
"""

_OSMESA = """
import ctypes, ctypes.util, sys
names = [ctypes.util.find_library("OSMesa"), "libOSMesa.so.8", "libOSMesa.so.6"]
for name in filter(None, names):
    try:
        mesa = ctypes.CDLL(name)
        break
    except OSError:
        pass
else:
    sys.exit("libOSMesa is not installed")
mesa.OSMesaCreateContextExt.restype = ctypes.c_void_p
context = mesa.OSMesaCreateContextExt(0x1908, 24, 8, 0, None)
pixels = (ctypes.c_ubyte * (4 * 64 * 64))()
mesa.OSMesaMakeCurrent.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int] * 3
if not context or not mesa.OSMesaMakeCurrent(context, pixels, 0x1401, 64, 64):
    sys.exit("libOSMesa cannot create a context")
"""

PROBES = {"egl": _EGL, "osmesa": _OSMESA}
