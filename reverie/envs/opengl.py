"""OpenGL without a screen, for simulators that draw with MuJoCo.

These simulators read `MUJOCO_GL` while they are imported, and guess badly without it:
on a machine without a screen they take a window system that fails at the first image.
So an adapter calls `prepare` before it imports its simulator. `prepare` tries EGL (the
graphics card, or Mesa in its place) and then OSMesa (the processor alone), each in a
process of its own, since a broken driver may end the process that asks it for a
context. A `MUJOCO_GL` that is set already is kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, MutableMapping
from functools import cache

from reverie.api import UserError

Probe = Callable[[str], str]
"""Tries a backend; returns what is wrong with it, empty if nothing is."""

BACKENDS = ("egl", "osmesa")
"""What is tried, in this order."""

OFF = ("disable", "disabled", "off", "false", "0")
WINDOWS = ("glfw", "glx", "cgl", "wgl")
INSTALL = "sudo apt-get install libegl1 libgl1-mesa-dri libosmesa6"
SECONDS = 60.0
"""How long a driver may take to give a context."""


def prepare(
    render: bool = True,
    instead: str = "",
    environ: MutableMapping[str, str] | None = None,
    probe: Probe | None = None,
    platform: str = sys.platform,
) -> str:
    """Choose how to draw, and say so in `MUJOCO_GL`; call it before the import.

    Returns the backend, empty where the simulator may choose by itself or nothing
    works. Raises `UserError` where nothing works, but only if `render` asks for images;
    `instead` is the flag that does without them.
    """
    environ = os.environ if environ is None else environ
    probe = probe or try_backend
    instead = f", or do without images: {instead}" if instead else ""
    chosen = environ.get("MUJOCO_GL", "").strip().lower()
    if chosen:
        if render:
            _refuse_wrong_choice(chosen, environ, probe, instead)
        return chosen
    if not platform.startswith("linux"):
        return ""  # the system's own OpenGL needs no screen there
    problems = []
    for backend in BACKENDS:
        problem = probe(backend)
        if not problem:
            environ["MUJOCO_GL"] = backend
            return backend
        problems.append(f"{backend}: {problem}")
    if render:
        raise UserError(
            "This task draws images, and there is no OpenGL that works without a "
            f"screen ({'; '.join(problems)}).\n  Fix: {INSTALL}{instead}"
        )
    return ""


@cache
def try_backend(name: str) -> str:
    """Make a context as MuJoCo would; what went wrong, or nothing.

    Asked once per process and backend.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-c", PROBES[name]],
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"gave no context within {SECONDS:g} seconds"
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"its driver ended with status {done.returncode}"


def _refuse_wrong_choice(
    chosen: str, environ: MutableMapping[str, str], probe: Probe, instead: str
) -> None:
    problem = ""
    if chosen in OFF:
        problem = "it turns drawing off"
    elif chosen in BACKENDS:
        problem = probe(chosen)
    elif chosen not in WINDOWS:
        problem = f"it must be one of {', '.join((*BACKENDS, *WINDOWS))}"
    elif chosen in ("glfw", "glx") and not (
        environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY")
    ):
        problem = "there is no screen to draw on"
    if problem:
        raise UserError(
            f"This task draws images, but MUJOCO_GL={chosen} does not work here: "
            f"{problem}.\n  Fix: `unset MUJOCO_GL` to have one chosen that works, and "
            f"if none does: {INSTALL}{instead}"
        )


# Plain ctypes, so that a probe takes a tenth of a second and needs no package. The
# calls are those MuJoCo makes: a context on any device, without a surface.
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
    sys.exit("libEGL.so.1 finds no device (is a driver such as Mesa installed?)")
for name in ("eglInitialize", "eglChooseConfig", "eglMakeCurrent", "eglBindAPI"):
    getattr(egl, name).restype = ctypes.c_uint
egl.eglInitialize.argtypes = [pointer, pointer, pointer]
egl.eglChooseConfig.argtypes = [pointer, pointer, pointer, integer, pointer]
egl.eglCreateContext.argtypes = [pointer, pointer, pointer, pointer]
egl.eglCreateContext.restype = pointer
egl.eglMakeCurrent.argtypes = [pointer] * 4
wish = (integer * 13)(
    0x3024, 8, 0x3023, 8, 0x3022, 8, 0x3025, 24, 0x3033, 1, 0x3040, 8, 0x3038
)
for device in devices[: count.value]:
    display = display_of(0x313F, device, None)
    if not display or not egl.eglInitialize(display, None, None):
        continue
    config, found = pointer(), integer()
    egl.eglChooseConfig(
        display, wish, ctypes.byref(config), 1, ctypes.byref(found)
    )
    if not found.value or not egl.eglBindAPI(0x30A2):
        continue
    context = egl.eglCreateContext(display, config, None, None)
    if context and egl.eglMakeCurrent(display, None, None, context):
        sys.exit(0)
sys.exit("no device gives a context")
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
    sys.exit("libOSMesa gives no context")
"""

PROBES = {"egl": _EGL, "osmesa": _OSMESA}
