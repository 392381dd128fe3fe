"""The measurements of environments: what is counted, and what is compared."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from reverie import envs
from reverie.api import UserError
from reverie.bench import envs as bench
from reverie.cli.main import main


def test_a_pool_counts_every_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        act_space = envs.make("catch").act_space
        pids = ()

        def __init__(self) -> None:
            self.steps = 0

        def __len__(self) -> int:
            return 7

        def reset(self) -> None:
            pass

        def step(self, action: dict[str, np.ndarray]) -> None:
            assert action["action"].shape == (7,)
            self.steps += 1

    pool = Pool()
    wall, work = itertools.count(), itertools.count(0, 42)  # a second per look
    clock = SimpleNamespace(
        perf_counter=lambda: float(next(wall)), process_time=lambda: float(next(work))
    )
    monkeypatch.setattr(bench, "time", clock)
    sample = bench.steps_of_pool(pool)(3)
    assert pool.steps == 3
    assert sample.rate == 3 * 7
    assert sample.cost == 42 / (3 * 7)


def test_the_overhead_is_that_of_the_median_turn() -> None:
    """One turn in which somebody else was busy does not count."""
    theirs = [bench.Sample(10, 1, work) for work in (1.0, 2.0, 1.0)]
    ours = [bench.Sample(10, 1, work) for work in (1.2, 2.2, 9.0)]
    assert bench.overhead(ours, theirs) == pytest.approx(0.2)


def test_workers_are_counted_with_their_processor_time() -> None:
    busy = (
        "import sys\n"
        "for line in sys.stdin:\n"
        "    sum(range(3_000_000))\n"
        "    print(flush=True)\n"
    )
    command = [sys.executable, "-c", busy]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        before = bench._work([other.pid])
        own = time.process_time()
        print(file=other.stdin, flush=True)
        other.stdout.readline()
        spent = bench._work([other.pid]) - before
        assert spent > time.process_time() - own + 0.005
        other.stdin.close()


@pytest.mark.parametrize(
    ("package", "task"), [("ale_py", "atari_pong"), ("crafter", "crafter_reward")]
)
def test_simulators_play_the_episodes_of_the_pool(package: str, task: str) -> None:
    """Or their costs could not be compared; the last screen tells."""
    pytest.importorskip(package)
    settings = envs.EnvConfig()
    pool = envs.make_vec_env(envs.TaskFactory(task, settings, seed=0), 2)
    bench.steps_of_pool(pool)(40)
    assert pool._obs is not None  # type: ignore[attr-defined]
    wanted = pool._obs["image"]  # type: ignore[attr-defined]
    for index in (0, 1):
        step = bench._raw_step(task, settings, index)
        for turn in range(40):
            image = step(turn)
        assert np.array_equal(np.squeeze(image), np.squeeze(wanted[index]))


def test_the_table_holds_every_way_against_the_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "numbers" / "envs.json"
    line = "bench envs --tasks catch --counts 2 --workers 2 --seconds 0.05 --turns 1"
    assert main([*line.split(), "--output", str(output)]) == 0
    page = capsys.readouterr().out
    found = json.loads(output.read_text())
    ways = ["raw", "single", "2 raw", "pool of 2", "2 raw x 2", "2 in 2 workers"]
    assert list(found["catch"]) == ways
    for way in ways:
        assert f" {way} " in page
        assert found["catch"][way]["rate"] > 0
    assert found["catch"]["raw"]["overhead"] == 0


def test_settings_of_environments_count(capsys: pytest.CaptureFixture[str]) -> None:
    line = "bench envs --tasks dummy_disc --counts 1 --workers 1 --seconds 0.02"
    assert main([*line.split(), "--turns", "1", "--env.dummy.length", "3"]) == 0
    assert "pool of 1" in capsys.readouterr().out


def test_raw_simulators_step() -> None:
    for package, task in (("ale_py", "atari_pong"), ("crafter", "crafter_reward")):
        pytest.importorskip(package)
        assert bench.raw(task, envs.EnvConfig())(3).rate > 0
    assert bench._native("catch") == []
    assert "ale" in bench._native("atari_pong")


def test_suites_that_are_missing_are_passed_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if envs.SUITES["dmlab"].is_installed:
        pytest.skip("it is there")
    config = bench.EnvBenchConfig(tasks=("dmlab_rooms_watermaze",), turns=1)
    assert bench.bench_envs(config).keys() == {"cores", "seconds"}
    assert "tools/install_dmlab.sh" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", [{"tasks": ()}, {"counts": (0,)}, {"counts": ()}, {"turns": 0}]
)
def test_nothing_to_measure_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match="nothing to measure"):
        bench.EnvBenchConfig(**wrong)  # type: ignore[arg-type]


def test_worlds_of_crafter_are_compared() -> None:
    pytest.importorskip("crafter")
    worlds = bench.crafter_worlds(turns=1)
    assert worlds.keys() == {"stock", "ours"}  # and they were the same
