"""The tool that injects faults: its table, exit codes, skipped sections and shim."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from chaos import bad_env, disks, files, hostile, main, processes, shim, soak  # noqa: E402
from chaos.sections import Result, Section, format_table, run_section  # noqa: E402

FOREVER = float("inf")


def make_section(name="disks", trial=lambda name, rng, folder: [], skip_reason=""):
    return Section(name, "", lambda: ("full", "slow"), trial, lambda: skip_reason)


def fail_slow(name, rng, folder):
    return ["it was slow"] if name == "slow" else []


def test_table_has_class_trials_and_failures():
    results = [
        Result(make_section(), "", {"full": 3, "slow": 2}, {"slow": 1}),
        Result(make_section("mounts"), "mounting needs root"),
    ]
    assert format_table(results).splitlines() == [
        "section  class  trials  failures",
        "disks    full        3         0",
        "disks    slow        2         1",
        "mounts   skipped: mounting needs root",
        "all                  5         1",
    ]


def run_main(monkeypatch, sections, *words) -> int:
    monkeypatch.setenv(main.PRELOADED, "1")
    monkeypatch.setattr(main, "load_sections", lambda: sections)
    for name in ("HOME", "XDG_STATE_HOME", "TMPDIR", "WANDB_MODE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # restored afterwards
    monkeypatch.setattr(main, "PRELOADED_MODULES", ())
    return main.main(words)


@pytest.mark.parametrize(("trial", "code"), [(fail_slow, 1), (lambda *_: [], 0)])
def test_exit_code_is_1_if_a_trial_failed(monkeypatch, capsys, trial, code):
    sections = [make_section(trial=trial), make_section("other", skip_reason="no root")]
    assert run_main(monkeypatch, sections, "all", "--trials", "4") == code
    captured = capsys.readouterr()
    assert "other    skipped: no root" in captured.out
    assert f"all                  4         {2 * code}" in captured.out
    again = "python tools/chaos.py disks --seed 0 --only 3"
    assert (again in captured.err) == bool(code)


def test_a_skipped_section_is_no_failure(monkeypatch, capsys):
    assert run_main(monkeypatch, [make_section(skip_reason="no cc")], "disks") == 0
    assert "skipped: no cc" in capsys.readouterr().out


def test_trials_depend_only_on_seed_section_and_index(tmp_path):
    def numbers(indices, seed=0):
        found = {}

        def trial(name, rng, folder):
            found[int(folder.name.split("-")[1])] = rng.random()
            return []

        section = make_section(trial=trial)
        run_section(section, tmp_path, seed, indices, FOREVER, print)
        return found

    every = numbers(range(4))
    assert numbers([2]) == {2: every[2]}
    assert len({*every.values(), *numbers(range(4), seed=1).values()}) == 8


def test_a_section_ends_at_its_deadline(tmp_path):
    section = make_section(trial=lambda *_: time.sleep(0.02) or [])
    deadline = time.monotonic() + 0.1
    result = run_section(section, tmp_path, 0, range(10**6), deadline, print)
    assert 1 <= sum(result.trials.values()) <= 6


def test_an_error_of_the_tool_is_a_failure(tmp_path):
    def trial(name, rng, folder):
        raise KeyError("absent")

    messages: list[str] = []
    section = make_section(trial=trial)
    result = run_section(section, tmp_path, 0, range(2), FOREVER, messages.append)
    assert result.failures == {"full": 1, "slow": 1}
    assert "KeyError: 'absent'" in messages[0]


@pytest.mark.parametrize(
    ("code", "output", "problem"),
    [
        (0, "Done", ""),
        (2, "reverie: wrong\n  Fix: other", ""),
        (2, "wrong", "without a message"),
        (1, "", "ended with exit code 1"),
        (-11, "", "ended with signal SIGSEGV"),
        (0, "Traceback (most recent call last):", "printed a traceback"),
    ],
)
def test_commands_must_end_with_a_result_or_a_fix(code, output, problem):
    found = processes.Outcome(("train",), code, output).problems()
    assert (problem in "\n".join(found)) if problem else not found


def test_every_section_and_class_is_listed(capsys):
    names = [section.name for section in main.load_sections()]
    assert len(names) == len({*names}) == 8
    assert all(section.classes() for section in main.load_sections())
    with pytest.raises(SystemExit) as stop:
        main.parse(["--help"])
    assert stop.value.code == 0
    assert all(f"  {name} " in capsys.readouterr().out for name in names[:1])
    with pytest.raises(SystemExit) as stop:
        main.parse(["unknown"])
    assert stop.value.code == 2


PROCESS_SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tools!r})
from chaos import processes
import reverie.run.config  # before the fork, as in the tool

outcome = processes.run(["config", "--run.stps", "3"], Path({folder!r}))
assert (outcome.code, outcome.hung) == (2, False), outcome
assert "Did you mean" in outcome.output
running = processes.Running(["--help"], Path({folder!r}), before=lambda: time.sleep(60))
problems = running.wait(0.2).problems()
assert problems == ["`reverie --help` did not end\\n"], problems
"""


@pytest.mark.extended
def test_commands_run_in_a_process_of_their_own(tmp_path):
    """In a new interpreter, because libraries of other tests do not survive a fork."""
    tools = Path(processes.__file__).parents[1]
    script = PROCESS_SCRIPT.format(tools=str(tools), folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_without_a_compiler_there_is_no_shim(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    library, reason = shim.build(tmp_path)
    assert library is None
    assert "C compiler" in reason
    assert "shim is not loaded" in shim.skip_reason()


def test_without_root_nothing_is_mounted(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in disks.mounts_skip_reason()


PROGRAM = """
import os, pathlib, sys
sys.path.insert(0, {tools!r})
from chaos import shim
folder = pathlib.Path({folder!r})
shim.arm(folder, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), True)
pathlib.Path("elsewhere").write_bytes(b"not counted")
(folder / "a.tmp").write_bytes(b"12345678")
os.fsync(os.open(folder / "a.tmp", os.O_RDONLY))
os.replace(folder / "a.tmp", folder / "a")
(folder / "b").write_bytes(b"12345678")
print(sorted(shim.counts().items()))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path, reason = shim.build(tmp_path_factory.mktemp("shim"))
    if path is None:
        pytest.skip(reason)
    return path


def run_with_shim(library, tmp_path, *words):
    (folder := tmp_path / "run").mkdir()
    program = PROGRAM.format(tools=str(ROOT / "tools"), folder=str(folder))
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, *map(str, words)],
        env={**os.environ, "LD_PRELOAD": str(library)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    return done, {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shim_kills_in_the_middle_of_a_write(library, tmp_path):
    done, left = run_with_shim(library, tmp_path, "write", 2, 0)
    assert done.returncode == -signal.SIGKILL
    assert left == {"a": b"12345678", "b": b"1234"}
    assert (tmp_path / "elsewhere").read_bytes() == b"not counted"


def test_shim_lets_calls_fail_with_an_error(library, tmp_path):
    done, left = run_with_shim(library, tmp_path, "rename", 1, 5)
    assert "OSError: [Errno 5]" in done.stderr
    assert left == {"a.tmp": b"12345678"}


def test_shim_counts_calls_below_the_folder(library, tmp_path):
    done, _ = run_with_shim(library, tmp_path, "", 0, 0)
    counts = dict(eval(done.stdout))
    assert counts["write"] == counts["open"] == 2
    assert counts["fsync"] == counts["rename"] == counts["after_rename"] == 1


@pytest.mark.parametrize("kind", ["exceptions", "values", "side effects"])
def test_bad_environments_have_their_faults(kind, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    harmless = {"in_close", "same_buffer", "output", "seeds_numpy", "no_info"}
    left_out = {
        "closes_streams",
        "no_streams",
        "closes_files",
        "ignores_signals",
        "blocks_signals",
        "timer",
        "no_print",
        "no_grad",
    }
    for fault in {*bad_env.FAULTS[kind]} - left_out - harmless:
        monkeypatch.setenv("CHAOS_FAULT", fault)
        if fault in ("children", "threads", "changes_folder", "default_dtype"):
            continue
        assert is_wrong(bad_env), fault


def is_wrong(module) -> bool:
    """True if an episode raises, or has something else than numbers of its spaces."""
    try:
        env = module.make_env()
        env.reset()
        for _ in range(3):
            obs, reward, done, _, _ = env.step(0)
            assert env.observation_space.contains(obs)
            assert isinstance(reward, float)
            assert abs(reward) < 1e38
            assert isinstance(done, bool)
        obs, _ = env.reset()
        return not env.observation_space.contains(obs)
    except BaseException:
        return True


def test_hostile_files_depend_on_the_seed(tmp_path):
    for make in (hostile.hostile_pickle, hostile.hostile_npz):
        first, second = (make(random.Random(3), tmp_path / "x") for _ in range(2))
        if make is hostile.hostile_pickle:
            assert first == second
        assert first
    text, description = hostile.hostile_yaml(
        "task: catch\nrun: {steps: 1}\n", random.Random(0)
    )
    assert text
    assert description
    assert len({hostile.mutate(b"x" * 50, random.Random(i)) for i in range(20)}) > 10
    assert not (tmp_path / "x").exists()


def test_values_are_replaced_and_checksums_match(tmp_path):
    data = {"files": {"a": [1, {"b": 2}]}}
    places = list(files._leaves(data))
    assert ("files", "a", 1, "b") in places
    files._set(data, ("files", "a", 1, "b"), None)
    assert data == {"files": {"a": [1, {"b": None}]}}
    folder = tmp_path / "ckpt" / "1"
    folder.mkdir(parents=True)
    (folder / "part").write_text("text")
    (folder / "manifest.json").write_text('{"files": {"part": {"bytes": 0}}}')
    files._fix_checksums(tmp_path)
    assert '"bytes": 4' in (folder / "manifest.json").read_text()


def test_growth_is_found():
    flat = [soak.Usage(10**9, 20, 4)] * 40
    assert not soak.compare(flat)
    assert soak.compare(flat[:4]) == ["only 4 measurements"]
    growing = [soak.Usage(10**9 + i * 10**7, 20 + i, 4) for i in range(40)]
    assert [text.split()[0] for text in soak.compare(growing)] == ["memory", "files"]
    assert soak.usage(os.getpid()).files > 2
    assert np.isfinite(soak.usage(os.getpid()).memory)
