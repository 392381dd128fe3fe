"""`reverie campaign` from the command line, with real runs, and as SLURM jobs."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from campaign_helpers import make_run, make_spec, starts

from reverie.campaign import jobs, slurm, worker
from reverie.campaign.queue import Queue
from reverie.cli.main import main

SETTINGS = "--run.steps 60 --run.report_every 0 --logger.outputs jsonl"


@pytest.mark.extended
def test_campaign_of_two_tasks_and_two_seeds(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(worker, "SCAN_SECONDS", 0.05)
    folder = tmp_path / "campaign"
    tasks = "--tasks catch,gym_CartPole-v1 --seeds 2 --configs debug --workers 2"
    words = f"campaign {tasks} {SETTINGS} --run.envs 1 --logdir {folder}".split()
    assert main(words) == 0
    report = (folder / "report.md").read_text()
    assert report in capsys.readouterr().out
    rows = [line.split(" | ") for line in report.splitlines() if "| dreamer |" in line]
    assert [(row[0], row[3]) for row in rows] == [
        ("| catch", "2"),
        ("| gym_CartPole-v1", "2"),
    ]
    assert main(["campaign", str(folder)]) == 0  # nothing is left
    assert main(["campaign", str(folder), "--status"]) == 0
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[:3] for line in lines] == [
        [f"{task}-debug-seed{seed}", "finished", "100%"]
        for task in ("catch", "gym_CartPole-v1")
        for seed in (0, 1)
    ]
    assert all(len(s.attempts) == 1 for s in Queue(folder).statuses())


def test_failed_run_is_named_with_its_fix(tmp_path, program, monkeypatch, capsys):
    run_worker = partial(worker.run_worker, program=program)
    monkeypatch.setattr(worker, "run_worker", run_worker)
    folder = tmp_path / "my c"
    tasks = "--tasks catch,memory --configs debug"
    words = f"campaign {tasks} --retries 0".split()
    program_text = (tmp_path / "program.py").read_text()
    (tmp_path / "program.py").write_text(
        program_text.replace(
            'flags.get("--fail", 0)', '9 * (flags["--task"] == "catch")'
        )
    )
    assert main([*words, "--logdir", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert "catch-debug-seed0 failed (attempt 1 of 1): The simulator is missing." in out
    assert "| memory |" in out  # the report
    assert "1 of 2 runs failed" in err
    assert f"another machine: reverie campaign '{folder}'\n" in err
    assert f"again: reverie campaign '{folder}' --retries 1" in err
    names = ("catch-debug-seed0", "memory-debug-seed0")
    assert [starts(folder, name) for name in names] == [1, 1]


@pytest.fixture
def run_program(program, monkeypatch):
    """`reverie campaign` executes the program instead of `reverie train`."""
    run_worker = partial(worker.run_worker, program=program)
    monkeypatch.setattr(worker, "run_worker", run_worker)


def test_resume_command_and_status_have_the_options_of_the_campaign(
    tmp_path, run_program, capsys
):
    folder = tmp_path / "campaign"
    words = "campaign --tasks catch --configs debug --device cpu --workers 2"
    assert main([*words.split(), "--retries", "4", "--logdir", str(folder)]) == 0
    resume = f"resume: reverie campaign {folder} --workers 2\n"
    err = capsys.readouterr().err
    assert (
        f"{resume}  start a worker on another machine: reverie campaign {folder}\n"
        in (err)
    )
    queue = Queue(folder)
    queue.add([make_run("other")])
    queue.open_worker()
    claim = queue.claim(queue.statuses()[-1])
    queue.end_attempt(claim, "failed", "The simulator is missing.")
    assert main(["campaign", str(folder), "--status"]) == 0
    assert "other failed (attempt 1 of 5)" in capsys.readouterr().out


def test_change_of_the_saved_file_is_named(tmp_path, run_program, capsys):
    folder = tmp_path / "campaign"
    words = "campaign --tasks catch,memory --seeds 2 --configs debug --logdir"
    assert main([*words.split(), str(folder)]) == 0
    file = folder / "campaign.yaml"
    original = file.read_text()
    file.write_text(original.replace("settings: {}", "settings: {run.steps: 7}"))
    old = "reverie train --configs debug --task catch --seed 0"
    new = "reverie train --configs debug --run.steps 7 --task catch --seed 0"
    assert main(["campaign", str(folder), "--workers", "2"]) == 2
    err = capsys.readouterr().err
    assert f"{file} differs from the runs that the campaign already has" in err
    assert f"the run catch-debug-seed0 was `{old}` and now is `{new}`.\n" in err
    assert "Fix: undo the change" in err
    assert "another --logdir" in err
    file.write_text(original.replace("- memory\n", ""))
    assert main(["campaign", str(folder)]) == 2
    assert "--task memory --seed 0` and is missing.\n" in capsys.readouterr().err
    file.write_text(original)
    assert main(["campaign", str(folder), "--seeds", "1"]) == 2  # a flag is the cause
    assert f"Fix: reverie campaign {folder} to resume" in capsys.readouterr().err
    assert main(["campaign", str(folder)]) == 0


@pytest.mark.extended
def test_slurm_jobs_are_workers(tmp_path, monkeypatch, capsys):
    pytest.importorskip("submitit")
    monkeypatch.setattr(worker, "SCAN_SECONDS", 0.2)
    folder = tmp_path / "campaign"
    tasks = "--tasks dummy_disc --configs debug --slurm cluster=local,jobs=1"
    words = f"campaign {tasks} {SETTINGS} --agent random --logdir {folder}"
    assert main(words.split()) == 0
    assert "submitted job" in capsys.readouterr().err
    (status,) = Queue(folder).statuses()
    assert (status.state, len(status.attempts)) == ("finished", 1)


@pytest.mark.parametrize("message", ["Traceback\nMemoryError", ""])
def test_jobs_that_fail_in_a_row_end_the_campaign(message):
    error = RuntimeError(message)
    ended = [SimpleNamespace(exception=lambda: error, output="job.log")] * 3
    last = "MemoryError" if message else r"RuntimeError\(''\)"
    with pytest.raises(slurm.UserError, match=f"failed: {last}\n  Fix: .* job.log"):
        jobs._count_failed(ended, failed=0)
    assert jobs._count_failed(ended[:2], failed=0) == 2


@pytest.mark.parametrize("text", ["gpu", "jobs=x", "jobs=0", "partition="])
def test_invalid_options_of_slurm_are_refused(text):
    with pytest.raises(slurm.UserError, match="--slurm jobs=4,partition=gpu"):
        jobs.parse_options("--slurm", text, slurm.EXAMPLE)


def test_options_that_submitit_does_not_have_are_refused(tmp_path):
    submitit = pytest.importorskip("submitit")
    options = {"cluster": "local", "nodez": "2", "partition": "gpu"}
    slurm.make_executor(submitit, tmp_path, {"cluster": "local", "partition": "gpu"})
    with pytest.raises(slurm.UserError, match="submitit does not accept"):
        slurm.make_executor(submitit, tmp_path, {**options, "name": "x", "slurm": "y"})


@pytest.mark.parametrize("message", ["", "no sbatch\nsecond line"])
def test_options_reach_submitit_as_numbers_and_booleans(message, tmp_path):
    received = {}

    class Executor:
        def __init__(self, folder, cluster):
            assert cluster == "slurm"

        def update_parameters(self, **parameters):
            received.update(parameters)
            assert "slurm_gres" not in received, message

    submitit = SimpleNamespace(AutoExecutor=Executor)
    options = {"time": "240", "exclusive": "True", "wckey": "false"}
    slurm.make_executor(submitit, tmp_path, options)
    expected = {"slurm_time": 240, "slurm_exclusive": True, "slurm_wckey": False}
    assert received == expected
    reason = message.partition("\n")[0] or "AssertionError"
    with pytest.raises(slurm.UserError, match=f"accept --slurm: {reason}"):
        slurm.make_executor(submitit, tmp_path, {"gres": "gpu:1"})


@pytest.mark.parametrize(
    "options",
    ["slurm gpu", "slurm nodez=2", "slurm cluster=local,nodez=2", "ray jobs=x"],
)
def test_invalid_options_leave_no_folder(options, tmp_path, capsys):
    pytest.importorskip("submitit")
    folder = tmp_path / "campaign"
    words = f"campaign --tasks catch --configs debug --{options} --logdir {folder}"
    assert main(words.split()) == 2
    assert "Fix: " in capsys.readouterr().err
    assert not folder.exists()


def test_job_that_sbatch_refuses_is_an_error(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")

    class Executor:
        def submit(self, job):
            raise submitit.core.utils.FailedJobError("invalid partition: gpus")

    monkeypatch.setattr(slurm, "make_executor", lambda *_: Executor())
    spec = make_spec(tmp_path / "campaign", [make_run("a")], slurm="partition=gpus")
    spec = worker.create_campaign(spec)
    with pytest.raises(slurm.UserError, match="submitted: invalid partition: gpus\n"):
        slurm.submit(spec)
