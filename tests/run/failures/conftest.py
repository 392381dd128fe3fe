"""Fixture of the tests of failures."""

from __future__ import annotations

import sys

import pytest
from failure_helpers import TrainingCommand


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return lambda **flags: TrainingCommand(tmp_path, capsys, **flags)
