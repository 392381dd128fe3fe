"""Memory and disk space of a replay, and errors if it does not fit."""

from __future__ import annotations

import numpy as np
import pytest
from test_replay import EXTRAS, SPACES, make_replay

from reverie.api import UserError
from reverie.replay import memory_plan
from reverie.replay.config import ReplayConfig
from reverie.replay.memory_plan import make_memory_plan

STEP = 20 * 20 * 3 + 12 + 4 + 4 + 3 + 1200 + 4
STORED = {key: space for key, space in SPACES.items() if not key.startswith("log/")}


def plan_for(monkeypatch, tmp_path, memory, disk, storage="auto", **options):
    monkeypatch.setattr(memory_plan, "available_memory", lambda: memory)
    monkeypatch.setattr(memory_plan, "free_space", lambda directory: disk)
    return make_memory_plan(
        STORED,
        EXTRAS,
        **{"capacity": 1_000_000, **options},
        storage=storage,
        tail=2048,
        save=True,
        directory=tmp_path,
    )


def test_bytes_match_the_arrays(monkeypatch, tmp_path):
    plan = plan_for(monkeypatch, tmp_path, 10**10, 10**10)
    assert plan.step_bytes == STEP
    assert plan.ram_bytes >= STEP * 1_000_000
    assert "1,000,000 steps in memory: 2.4 KB per step, 2.4 GB" in plan.describe()


def test_auto_tries_memory_then_disk_then_raises(monkeypatch, tmp_path):
    assert plan_for(monkeypatch, tmp_path, 10**10, 10**10).storage == "ram"
    assert plan_for(monkeypatch, tmp_path, 10**9, 10**10).storage == "disk"
    with pytest.raises(UserError, match=r"--replay\.capacity 5\d0000"):
        plan_for(monkeypatch, tmp_path, 10**9, 2 * 10**9)


@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_an_explicit_choice_that_does_not_fit_raises(monkeypatch, tmp_path, storage):
    with pytest.raises(UserError, match="does not fit"):
        plan_for(monkeypatch, tmp_path, 10**7, 10**7, storage)


def test_the_suggested_capacity_fits(monkeypatch, tmp_path):
    with pytest.raises(UserError) as error:
        plan_for(monkeypatch, tmp_path, 10**9, 10**9)
    advice = int(str(error.value).split("--replay.capacity ")[1].split(",")[0])
    plan_for(monkeypatch, tmp_path, 10**9, 10**9, capacity=advice)


@pytest.mark.parametrize(("memory", "disk"), [(10**9, 10**9), (10**9, 2 * 10**9)])
def test_a_capacity_is_reduced_to_what_fits(monkeypatch, tmp_path, memory, disk):
    plan = plan_for(monkeypatch, tmp_path, memory, disk, fit=True)
    assert plan.requested_capacity == 1_000_000
    assert min(memory, disk) // STEP // 4 < plan.capacity < 1_000_000
    assert plan.disk_bytes <= disk * memory_plan.FITTED_DISK_FRACTION
    assert f"capacity is {plan.capacity:,} steps" in plan.describe_reduction()
    same = plan_for(monkeypatch, tmp_path, 10**10, 10**10, fit=True)
    assert (same.requested_capacity, same.capacity) == (0, 1_000_000)
    assert same.describe_reduction() == ""


def test_the_error_names_the_share_of_the_latents(monkeypatch, tmp_path):
    flag = "--configs size1m"
    with pytest.raises(UserError) as error:
        plan_for(monkeypatch, tmp_path, 10**9, 10**9, smaller_extras=flag)
    assert "2.4 KB, of which 1.2 KB are latents of the agent" in str(error.value)
    assert "smaller latents (--configs size1m)" in str(error.value)


def test_a_replay_on_disk_needs_a_folder():
    with pytest.raises(UserError, match="needs a folder"):
        make_replay(100, 2, ReplayConfig(storage="disk"))


@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_the_plan_is_an_upper_bound_of_the_real_usage(storage, tmp_path):
    replay = make_replay(2000, 2, ReplayConfig(storage=storage), tmp_path)
    assert replay.store.ram_bytes <= replay.memory_plan.ram_bytes
    rows = {k: s.zeros(2) for k, s in {**SPACES, **EXTRAS}.items()}
    for _ in range(1500):
        replay.add(rows)
    replay.delete_unused_files([replay.save()])
    used = sum(path.stat().st_size for path in tmp_path.iterdir())
    planned = replay.memory_plan.disk_bytes
    assert 0.8 * planned < used + 2000 * 1200 * (storage == "disk")
    assert used < 1.3 * planned


def test_available_memory_and_free_space_are_positive(tmp_path):
    assert memory_plan.available_memory() > 0
    (tmp_path / "held").write_bytes(np.zeros(1000, np.uint8))
    assert memory_plan.free_space(tmp_path / "not" / "yet") > 0
