"""The program that the campaigns in these tests run."""

from __future__ import annotations

import sys

import pytest
from campaign_helpers import PROGRAM

from reverie.campaign import worker


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The command of the program; workers check it at short intervals."""
    monkeypatch.setattr(worker, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(worker, "SCAN_SECONDS", 0.02)
    monkeypatch.setattr(worker, "HEARTBEAT_SECONDS", 0.02)
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [sys.executable, "-IS", str(path)]  # without site packages, to start faster
