"""Advice to restart a run whose losses or weights are not finite."""

from __future__ import annotations

import re

import pytest
import torch

from reverie.run.checkpoint import Checkpoints, find_checkpoint
from reverie.run.nonfinite import restart_advice


@pytest.fixture
def checkpoints(tmp_path) -> Checkpoints:
    return Checkpoints(tmp_path / "ckpt")


def test_advice_names_only_checkpoints_that_exist(checkpoints):
    parts = {"agent": {"weight": torch.zeros(1)}, "loop": {}}
    left, fix = restart_advice(checkpoints)
    assert "no checkpoint yet" in left
    assert "from_checkpoint" not in fix
    checkpoints.save(100, parts)
    newest = checkpoints.save(200, parts)
    left, fix = restart_advice(checkpoints)
    named = re.search(r"--run\.from_checkpoint (\S+)$", fix)
    assert named
    assert find_checkpoint(checkpoints.folder / named[1]) == newest
    assert newest.name in left
