"""The cost of a replay is known, and refused where it does not fit."""

from __future__ import annotations

import numpy as np
import pytest
from test_replay import EXTRAS, SPACES, make_replay

from reverie.api import UserError
from reverie.replay import budget as plans
from reverie.replay.budget import make_plan
from reverie.replay.buffer import ReplayConfig

STEP = 20 * 20 * 3 + 12 + 4 + 4 + 3 + 1200 + 4
STORED = {key: space for key, space in SPACES.items() if not key.startswith("log/")}


def ask(monkeypatch, tmp_path, memory, disk, storage="auto", capacity=1_000_000):
    monkeypatch.setattr(plans, "available_memory", lambda: memory)
    monkeypatch.setattr(plans, "free_space", lambda directory: disk)
    return make_plan(
        STORED,
        EXTRAS,
        capacity=capacity,
        storage=storage,
        tail=2048,
        saves=True,
        directory=tmp_path,
    )


def test_bytes_are_those_of_the_arrays(monkeypatch, tmp_path):
    plan = ask(monkeypatch, tmp_path, 10**10, 10**10)
    assert plan.step_bytes == STEP
    assert plan.ram_bytes >= STEP * 1_000_000
    assert "1,000,000 steps in memory: 2.4 KB per step, 2.4 GB" in plan.sentence


def test_auto_takes_memory_then_disk_then_refuses(monkeypatch, tmp_path):
    assert ask(monkeypatch, tmp_path, 10**10, 10**10).storage == "ram"
    assert ask(monkeypatch, tmp_path, 10**9, 10**10).storage == "disk"
    with pytest.raises(UserError, match=r"--replay\.capacity 5\d0000"):
        ask(monkeypatch, tmp_path, 10**9, 2 * 10**9)


@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_an_explicit_choice_that_does_not_fit_is_refused(
    monkeypatch, tmp_path, storage
):
    with pytest.raises(UserError, match="does not fit"):
        ask(monkeypatch, tmp_path, 10**7, 10**7, storage)


def test_the_advice_fits(monkeypatch, tmp_path):
    with pytest.raises(UserError) as error:
        ask(monkeypatch, tmp_path, 10**9, 10**9)
    advice = int(str(error.value).split("--replay.capacity ")[1].split(",")[0])
    ask(monkeypatch, tmp_path, 10**9, 10**9, capacity=advice)


def test_a_replay_on_disk_without_a_folder_is_refused():
    with pytest.raises(UserError, match="needs a folder"):
        make_replay(100, 2, ReplayConfig(storage="disk"))


@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_the_plan_bounds_what_is_really_used(storage, tmp_path):
    replay = make_replay(2000, 2, ReplayConfig(storage=storage), tmp_path)
    assert replay.columns.ram_bytes <= replay.plan.ram_bytes
    rows = {k: s.zeros(2) for k, s in {**SPACES, **EXTRAS}.items()}
    for _ in range(1500):
        replay.add(rows)
    replay.collect([replay.save()])
    used = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 0.8 * replay.plan.disk_bytes < used + 2000 * 1200 * (storage == "disk")
    assert used < 1.3 * replay.plan.disk_bytes


def test_memory_and_space_are_read_off_the_machine(tmp_path):
    assert plans.available_memory() > 0
    (tmp_path / "held").write_bytes(np.zeros(1000, np.uint8))
    assert plans.free_space(tmp_path / "not" / "yet") > 0
