"""Fixtures for the tests of environments."""

from __future__ import annotations

import pytest

from reverie.envs import opengl


@pytest.fixture
def working_egl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select EGL without testing whether it works, for fake simulators."""
    monkeypatch.setattr(opengl, "probe_backend", lambda name: "")
    monkeypatch.setenv("MUJOCO_GL", "egl")
