"""Selection of an OpenGL backend, with fake drivers."""

from __future__ import annotations

import sys
from ctypes.util import find_library
from typing import Any

import pytest

from reverie.api import UserError
from reverie.envs import opengl


class FakeDrivers:
    """Some backends work; records which were tried."""

    def __init__(self, *working: str):
        self.working = working
        self.tried: list[str] = []

    def __call__(self, name: str) -> str:
        self.tried.append(name)
        return "" if name in self.working else f"no {name} here"


def select(
    environ: dict[str, str],
    drivers: FakeDrivers,
    platform: str = "linux",
    **options: Any,
) -> str:
    return opengl.select_backend(
        environ=environ, probe=drivers, platform=platform, **options
    )


@pytest.mark.parametrize("has_torch", [True, False])
def test_triton_is_imported_before_a_driver(
    has_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[str] = []
    monkeypatch.setattr(opengl, "import_module", imported.append)
    if not has_torch:
        monkeypatch.delitem(sys.modules, "torch")
    select({}, FakeDrivers("egl"))
    assert imported == ["triton"] * has_torch


def test_egl_is_preferred() -> None:
    environ: dict[str, str] = {}
    drivers = FakeDrivers("egl", "osmesa")
    assert select(environ, drivers) == "egl"
    assert environ == {"MUJOCO_GL": "egl"}
    assert drivers.tried == ["egl"]


def test_osmesa_is_used_if_egl_fails() -> None:
    environ: dict[str, str] = {}
    assert select(environ, FakeDrivers("osmesa")) == "osmesa"
    assert environ == {"MUJOCO_GL": "osmesa"}


@pytest.mark.parametrize("chosen", ["osmesa", "egl", "EGL", "glfw"])
def test_a_working_choice_of_the_user_is_kept(chosen: str) -> None:
    environ = {"MUJOCO_GL": chosen, "DISPLAY": ":0"}
    assert select(environ, FakeDrivers("egl", "osmesa")) == chosen.lower()
    assert environ["MUJOCO_GL"] == chosen


def test_the_error_lists_packages_to_install() -> None:
    environ: dict[str, str] = {}
    with pytest.raises(UserError) as caught:
        select(environ, FakeDrivers(), no_images_flag="--env.dmc.image False")
    text = str(caught.value)
    for part in ("egl: no egl here", "osmesa: no osmesa here", "libosmesa6", "libegl1"):
        assert part in text
    assert text.endswith("or disable images: --env.dmc.image False")
    assert environ == {}


def test_a_task_without_images_needs_no_opengl() -> None:
    assert select({}, FakeDrivers(), render=False) == ""
    chosen = FakeDrivers()
    assert select({"MUJOCO_GL": "egl"}, chosen, render=False) == "egl"
    assert chosen.tried == []


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ("osmesa", "no osmesa here"),
        ("egl", "no egl here"),
        ("off", "disables rendering"),
        ("glfw", "no display"),
        ("vulkan", "one of egl, osmesa"),
    ],
)
def test_a_choice_that_does_not_work_is_refused(chosen: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"MUJOCO_GL={chosen} does not work.*{reason}"):
        select({"MUJOCO_GL": chosen}, FakeDrivers())


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_platforms_need_no_backend(platform: str) -> None:
    environ: dict[str, str] = {}
    assert select(environ, FakeDrivers(), platform=platform) == ""
    assert environ == {}


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("", ""),
        ("import sys; sys.exit('no device')", "no device"),
        ("import os; os.kill(os.getpid(), 11)", "exited with status -11"),
        ("import time; time.sleep(60)", "no context within 0.5 seconds"),
    ],
)
def test_a_probe_reports_errors_crashes_and_timeouts(
    monkeypatch: pytest.MonkeyPatch, code: str, problem: str
) -> None:
    monkeypatch.setattr(opengl, "PROBE_CODE", code)
    monkeypatch.setattr(opengl, "find_library", lambda name: f"lib{name}.so")
    if "sleep" in code:
        monkeypatch.setattr(opengl, "TIMEOUT", 0.5)
    opengl.probe_backend.cache_clear()
    result = opengl.probe_backend("egl")
    opengl.probe_backend.cache_clear()
    assert problem in result
    assert bool(problem) == bool(result)


@pytest.mark.parametrize(("backend", "library"), opengl.LIBRARIES.items())
def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, backend: str, library: str
) -> None:
    monkeypatch.setattr(opengl, "PROBE_CODE", "raise AttributeError('glGetError')")
    monkeypatch.setattr(opengl, "find_library", lambda name: None)
    opengl.probe_backend.cache_clear()
    assert opengl.probe_backend(backend) == f"lib{library} is not installed"
    opengl.probe_backend.cache_clear()


def test_the_probe_creates_a_context_if_the_library_is_installed() -> None:
    pytest.importorskip("mujoco")
    problem = opengl.probe_backend("osmesa")
    assert (problem == "libOSMesa is not installed") == (not find_library("OSMesa"))
