"""The program that the sweeps in these tests run."""

from __future__ import annotations

import sys

import pytest
from sweep_helpers import PROGRAM

from reverie.sweep import search as sweep


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The command of the program; the sweep checks it at short intervals."""
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(sweep, "PRUNE_SECONDS", 0.0)
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [sys.executable, "-IS", str(path)]  # without site packages, to start faster
