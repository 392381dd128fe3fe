"""`reverie bench envs`: steps, CPU time and overhead of environments."""

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


def test_every_vectorized_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
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
    wall, work = itertools.count(), itertools.count(0, 42)  # a second per call
    clock = SimpleNamespace(
        perf_counter=lambda: float(next(wall)), process_time=lambda: float(next(work))
    )
    monkeypatch.setattr(bench, "time", clock)
    sample = bench.measure_vec_env(pool)(3)
    assert pool.steps == 3
    assert sample.rate == 3 * 7
    assert sample.cost == 42 / (3 * 7)


def test_overhead_is_the_median_over_repeats() -> None:
    """A single repeat with other load on the machine does not count."""
    theirs = [bench.StepTiming(10, 1, work) for work in (1.0, 2.0, 1.0)]
    ours = [bench.StepTiming(10, 1, work) for work in (1.2, 2.2, 9.0)]
    assert bench.overhead(ours, theirs) == pytest.approx(0.2)


def test_cpu_time_includes_workers() -> None:
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
        before = bench._cpu_seconds([other.pid])
        own = time.process_time()
        print(file=other.stdin, flush=True)
        other.stdout.readline()
        spent = bench._cpu_seconds([other.pid]) - before
        assert spent > time.process_time() - own + 0.005
        other.stdin.close()


@pytest.mark.parametrize(
    ("package", "task"), [("ale_py", "atari_pong"), ("crafter", "crafter_reward")]
)
def test_simulators_play_the_same_episodes_as_vectorized_envs(
    package: str, task: str
) -> None:
    """Compares the last images; otherwise the costs would not be comparable."""
    pytest.importorskip(package)
    settings = envs.EnvConfig()
    pool = envs.make_vec_env(envs.TaskFactory(task, settings, seed=0), 2)
    bench.measure_vec_env(pool)(40)
    assert pool._obs is not None  # type: ignore[attr-defined]
    wanted = pool._obs["image"]  # type: ignore[attr-defined]
    for index in (0, 1):
        step = bench._simulator_step(task, settings, index)
        for turn in range(40):
            image = step(turn)
        assert np.array_equal(np.squeeze(image), np.squeeze(wanted[index]))


def test_table_compares_every_variant_with_the_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "numbers" / "envs.json"
    line = "bench envs --tasks catch --counts 2 --workers 2 --seconds 0.05 --repeats 1"
    assert main([*line.split(), "--output", str(output)]) == 0
    page = capsys.readouterr().out
    results = json.loads(output.read_text())
    variants = ["simulator", "env", "2 simulators", "2 vectorized"]
    variants += ["2 simulators x 2", "2 in 2 workers"]
    assert list(results["catch"]) == variants
    for variant in variants:
        assert f" {variant} " in page
        assert results["catch"][variant]["rate"] > 0
    assert results["catch"]["simulator"]["overhead"] == 0


def test_env_settings_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    line = "bench envs --tasks dummy_disc --counts 1 --workers 1 --seconds 0.02"
    assert main([*line.split(), "--repeats", "1", "--env.dummy.length", "3"]) == 0
    assert "1 vectorized" in capsys.readouterr().out


def test_simulators_step() -> None:
    for package, task in (("ale_py", "atari_pong"), ("crafter", "crafter_reward")):
        pytest.importorskip(package)
        assert bench.measure_simulators(task, envs.EnvConfig())(3).rate > 0
    assert bench._native_backends("catch") == []
    assert "ale" in bench._native_backends("atari_pong")


def test_suites_that_are_not_installed_are_skipped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if envs.SUITES["dmlab"].is_installed:
        pytest.skip("it is there")
    config = bench.EnvBenchConfig(tasks=("dmlab_rooms_watermaze",), repeats=1)
    assert bench.bench_envs(config).keys() == {"cores", "seconds"}
    assert "tools/install_dmlab.sh" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", [{"tasks": ()}, {"counts": (0,)}, {"counts": ()}, {"repeats": 0}]
)
def test_empty_benchmark_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match="needs tasks"):
        bench.EnvBenchConfig(**wrong)  # type: ignore[arg-type]
