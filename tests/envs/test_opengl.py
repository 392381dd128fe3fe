"""Choosing an OpenGL backend, with drivers that are only pretended."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from reverie.api import UserError
from reverie.envs import opengl


class Drivers:
    """A machine on which some backends work; remembers which were tried."""

    def __init__(self, *working: str):
        self.working = working
        self.tried: list[str] = []

    def __call__(self, name: str) -> str:
        self.tried.append(name)
        return "" if name in self.working else f"no {name} here"


def select(
    environ: dict[str, str], drivers: Drivers, platform: str = "linux", **options: Any
) -> str:
    return opengl.select_backend(
        environ=environ, probe=drivers, platform=platform, **options
    )


def test_the_graphics_card_comes_first_and_is_said_to_the_simulator() -> None:
    environ: dict[str, str] = {}
    drivers = Drivers("egl", "osmesa")
    assert select(environ, drivers) == "egl"
    assert environ == {"MUJOCO_GL": "egl"}
    assert drivers.tried == ["egl"]


def test_the_processor_draws_where_the_graphics_card_cannot() -> None:
    environ: dict[str, str] = {}
    assert select(environ, Drivers("osmesa")) == "osmesa"
    assert environ == {"MUJOCO_GL": "osmesa"}


@pytest.mark.parametrize("chosen", ["osmesa", "egl", "EGL", "glfw"])
def test_what_the_user_chose_stays(chosen: str) -> None:
    environ = {"MUJOCO_GL": chosen, "DISPLAY": ":0"}
    assert select(environ, Drivers("egl", "osmesa")) == chosen.lower()
    assert environ["MUJOCO_GL"] == chosen


def test_where_nothing_works_it_says_what_to_install() -> None:
    environ: dict[str, str] = {}
    with pytest.raises(UserError) as caught:
        select(environ, Drivers(), no_images_flag="--env.dmc.image False")
    text = str(caught.value)
    for part in ("egl: no egl here", "osmesa: no osmesa here", "libosmesa6", "libegl1"):
        assert part in text
    assert text.endswith("or disable images: --env.dmc.image False")
    assert environ == {}


def test_a_task_without_images_needs_no_opengl() -> None:
    assert select({}, Drivers(), render=False) == ""
    chosen = Drivers()
    assert select({"MUJOCO_GL": "egl"}, chosen, render=False) == "egl"
    assert chosen.tried == []


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ("osmesa", "no osmesa here"),
        ("egl", "no egl here"),
        ("off", "disables rendering"),
        ("glfw", "no display"),
        ("vulkan", "one of egl, osmesa"),
    ],
)
def test_a_choice_that_cannot_work_is_refused_before_the_import(
    chosen: str, why: str
) -> None:
    with pytest.raises(UserError, match=f"MUJOCO_GL={chosen} does not work.*{why}"):
        select({"MUJOCO_GL": chosen}, Drivers())


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_systems_with_an_opengl_of_their_own_are_left_alone(platform: str) -> None:
    environ: dict[str, str] = {}
    assert select(environ, Drivers(), platform=platform) == ""
    assert environ == {}


@pytest.mark.parametrize(
    ("probe", "answer"),
    [
        ("", ""),
        ("import sys; sys.exit('libEGL.so.1 is not installed')", "is not installed"),
        ("import os; os.kill(os.getpid(), 11)", "exited with status -11"),
    ],
)
def test_a_probe_answers_whatever_its_driver_does(
    monkeypatch: pytest.MonkeyPatch, probe: str, answer: str
) -> None:
    monkeypatch.setitem(opengl.PROBES, "fake", probe)
    opengl.probe_backend.cache_clear()
    found = opengl.probe_backend("fake")
    assert answer in found
    assert bool(answer) == bool(found)


def test_a_driver_that_hangs_counts_as_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(opengl.PROBES, "fake", "import time; time.sleep(60)")
    monkeypatch.setattr(opengl, "TIMEOUT", 0.2)
    opengl.probe_backend.cache_clear()
    assert "no context within 0.2 seconds" in opengl.probe_backend("fake")


@pytest.mark.parametrize("backend", opengl.BACKENDS)
def test_the_real_probes_end_with_yes_or_a_reason(backend: str) -> None:
    opengl.probe_backend.cache_clear()
    answer = opengl.probe_backend(backend)
    assert "Traceback" not in answer
    assert "Error" not in answer  # of the probe itself


def test_a_machine_without_the_libraries_is_told_so() -> None:
    for backend in opengl.BACKENDS:
        code = (
            "import ctypes, ctypes.util\n"
            "def missing(*_): raise OSError('none')\n"
            "ctypes.CDLL, ctypes.util.find_library = missing, lambda name: None\n"
        )
        done = subprocess.run(
            [sys.executable, "-S", "-c", code + opengl.PROBES[backend]],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert done.stderr.strip().endswith("is not installed")
