"""Runs whose losses or weights are not finite end with advice to restart them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from reverie.agents.options import BuildOptions
from reverie.agents.random import RandomAgent, RandomConfig
from reverie.api import UserError
from reverie.run import nonfinite
from reverie.run.checkpoint import Checkpoints, find_checkpoint
from reverie.run.nonfinite import NonfiniteCheck, restart_advice


class NonfiniteAgent(RandomAgent):
    def nonfinite(self):
        return ["loss/rew"]


AGENT = NonfiniteAgent({}, {}, RandomConfig(), BuildOptions(torch.device("cpu")))


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


def test_the_limit_of_skipped_updates_is_checked_in_every_update(checkpoints):
    check = NonfiniteCheck(3, checkpoints)
    for count in (1, 2, 0, 1, 2):
        check.check(AGENT, {"opt/consecutive_skips": torch.tensor(count)})
    check.check(AGENT, {})
    with pytest.raises(UserError, match=r"3 updates in a row .* loss/rew"):
        check.check(AGENT, {"opt/consecutive_skips": torch.tensor(3)})


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_the_count_on_another_device_is_checked_in_a_later_update(
    device, checkpoints, monkeypatch
):
    """The tensors are on the CPU, but name another device."""

    named = torch.device(device)

    class OnDevice(torch.Tensor):
        device = named

    copies = []

    def copy_to_host(value):
        copied = iter([False, True])
        copies.append(value.clone())
        return copies[-1], SimpleNamespace(query=lambda: next(copied))

    monkeypatch.setattr(nonfinite, "copy_to_host", copy_to_host)
    check = NonfiniteCheck(3, checkpoints)
    skips = torch.tensor(4).as_subclass(OnDevice)
    metrics = {"opt/consecutive_skips": skips}
    later = 2 if device == "cuda" else 0  # the copy is ready after two updates
    for _ in range(check.CHECK_EVERY + later - 1):
        check.check(AGENT, metrics)
    with pytest.raises(UserError, match="4 updates in a row"):
        check.check(AGENT, metrics)
    assert len(copies) == (device == "cuda")


@pytest.mark.gpu
def test_the_check_does_not_wait_for_a_gpu(checkpoints):
    check = NonfiniteCheck(3, checkpoints)
    skips = torch.zeros((), dtype=torch.int64, device="cuda")
    metrics = {"opt/consecutive_skips": skips}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(check.CHECK_EVERY + 5):
            check.check(AGENT, metrics)
        skips.fill_(4)
        with pytest.raises(UserError, match="4 updates in a row"):
            check_often(check, metrics)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_often(check, metrics):
    for _ in range(10_000):
        check.check(AGENT, metrics)
