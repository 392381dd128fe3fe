"""`reverie report` on small run folders."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
from pathlib import Path

import numpy as np
import pytest
from score_files import write_run

from reverie.api import UserError
from reverie.cli.main import main
from reverie.results.report import format_number
from reverie.results.runs import find_runs, group_runs


@pytest.fixture
def logdir(tmp_path) -> Path:
    for lr in (1e-4, 1e-3):
        for seed in range(3):
            run = tmp_path / "runs" / f"pong-{lr}-{seed}"
            write_run(run, seed=seed, lr=lr, offset=seed + 10 * (lr > 1e-4))
    return tmp_path / "runs"


def test_runs_are_grouped_by_the_settings_that_differ(logdir):
    runs = find_runs([logdir, *logdir.iterdir()])
    assert len(runs) == 6
    groups = group_runs(runs)
    assert [*groups] == [
        "dreamer, dreamer.opt.lr 0.0001",
        "dreamer, dreamer.opt.lr 0.001",
    ]
    assert all(len(by_task["atari100k_pong"]) == 3 for by_task in groups.values())
    assert [*group_runs(runs, ["agent"])] == ["agent dreamer"]
    with pytest.raises(UserError, match="Fix: give names of settings"):
        group_runs(runs, ["size"])


def test_methods_of_the_same_size_are_not_merged(tmp_path):
    small, large = {"size": "size1m", "units": 8}, {"size": "size12m", "units": 64}
    widths = {f"net{i}": 1 for i in range(3)}
    write_run(tmp_path / "a", **small, **widths, lr=1e-4)
    write_run(tmp_path / "b", **small, **widths, lr=1e-3)
    large_widths = dict.fromkeys(widths, 2)
    write_run(tmp_path / "c", **large, **large_widths, lr=1e-4)
    assert [*group_runs(find_runs([tmp_path]))] == [
        "dreamer, size size1m, dreamer.opt.lr 0.0001",
        "dreamer, size size1m, dreamer.opt.lr 0.001",
        "dreamer, size size12m, dreamer.opt.lr 0.0001",
    ]
    assert [*group_runs(find_runs([tmp_path / "a", tmp_path / "c"]))] == [
        "dreamer, size size1m",
        "dreamer, size size12m",
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("about.json", "5"),
        ("about.json", '[{"command": 5, "seconds": "x", "repeat": "y"}]'),
        ("config.yaml", "task: x\nseed: abc\n"),
        ("scores.jsonl", f'{{"step": {10**400}, "episode/score": {10**400}}}\n'),
        ("scores.jsonl", "[" * 90_000),
    ],
)
def test_invalid_values_in_the_files_of_a_run_are_ignored(tmp_path, name, content):
    run = write_run(tmp_path / "run")
    (run / name).write_text(content)
    (found,) = find_runs([run])
    assert found.seed == 0
    assert found.repeat >= 1
    assert found.seconds in (None, 3600.0)
    assert np.isfinite(found.points("episode/score", "frames")).all()


def test_a_pipe_in_place_of_a_log_does_not_block(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "scores.jsonl").unlink()
    os.mkfifo(run / "scores.jsonl")
    (found,) = find_runs([run])
    assert not len(found.points("episode/score", "frames"))


def test_other_files_next_to_runs_are_skipped(logdir, tmp_path, capsys):
    (logdir / "notes.txt").write_text("text")
    (logdir / "queue").mkdir()
    assert len(find_runs(sorted(logdir.iterdir()))) == 6
    error = capsys.readouterr().err
    assert "warning: " in error
    assert "queue contain no run" in error
    with pytest.raises(UserError, match=r"notes\.txt contains no run"):
        find_runs([logdir / "notes.txt"])


def test_tables_state_the_window_and_the_scores(logdir, capsys):
    assert main(["report", str(logdir), "--baseline", "dreamerv3"]) == 0
    text = capsys.readouterr().out
    # the last 5 % of 400 frames: the episode that ends at frame 400
    assert "mean of episodes at 380 to 400 frames" in text
    assert (
        "| atari100k_pong | dreamer, dreamer.opt.lr 0.0001 | 10 [9, 11] | 3 |" in text
    )
    assert "| 20 [19, 21] | 3 | 1.00 | CPU | abc | reverie train --seed 0 |" in text
    assert "| atari100k_pong | DreamerV3 (published) | -4.9 | 5 |" in text
    assert "Human-normalized" in text
    assert "over dreamer, dreamer.opt.lr 0.001: 0" in text

    assert main(["report", str(logdir), "--window", "0.5", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert float(rows[0]["score"]) == pytest.approx(np.mean([5, 6, 7, 8, 9]) + 1)
    assert (rows[0]["window_start"], rows[0]["x"]) == ("200.0", "frames")

    assert main(["report", str(logdir), "--x", "hours", "--format", "latex"]) == 0
    text = capsys.readouterr().out
    assert r"dreamer.opt.lr 0.0001 & 10 [9, 11]" in text
    assert "0.95 to 1 hours" in text


def test_report_as_json_and_in_a_file(logdir, tmp_path, capsys):
    out = tmp_path / "report.json"
    words = ["--x", "step", "--budget", "50", "--format", "json", "--out", str(out)]
    assert main(["report", str(logdir), *words]) == 0
    data = json.loads(out.read_text())
    # agent steps: four frames each; the episode that ends at step 50 has the score 4
    assert data["windows"]["atari100k_pong"] == {"start": 47.5, "end": 50, "x": "step"}
    assert data["rows"][0]["scores"] == [4, 5, 6]
    assert (
        data["aggregates"]["dreamer, dreamer.opt.lr 0.0001"]["IQM"]["low"] is not None
    )


def test_tasks_without_a_normalization_have_no_aggregates(tmp_path, capsys):
    write_run(tmp_path / "a", task="catch")
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Human-normalized" not in text
    assert "| catch | dreamer | 9 | 1 |" in text


def test_success_rates_are_aggregated_over_tasks(tmp_path, capsys):
    for task, rates in (("catch", [1, 0]), ("reach", [1, 1]), ("memory", [0.5, 0.5])):
        for seed, rate in enumerate(rates):
            run = write_run(tmp_path / f"{task}{seed}", task=task, seed=seed)
            lines = [{"step": 400, "episode/success": rate}]
            (run / "scores.jsonl").write_text(json.dumps(lines[0]))
    assert main(["report", str(tmp_path), "--y", "episode/success"]) == 0
    text = capsys.readouterr().out
    assert "episode/success: mean of episodes at 380 to 400 frames." in text
    assert "Success rate over 3 tasks:" in text
    # means of the tasks: 0.5, 0.5, 1; runs without the lowest and the highest: 0.75;
    # distance to 1 of the tasks: 0.5, 0.5, 0
    expected = ["0.667 [", "0.5 [", "0.75 [", "0.333 ["]
    row = [line for line in text.splitlines() if line.startswith("| dreamer | 0.667")]
    cells = [cell.strip() for cell in row[0].split("|")[2:6]]
    assert all(map(str.startswith, cells, expected))


def test_crafter_score_counts_all_episodes(tmp_path, capsys):
    run = write_run(tmp_path / "run", task="crafter_reward")
    names = ("collect_wood", "place_table")
    unlocked = [(1, 0), (1, 1), (0, 0), (1, 1)]
    lines = [
        {"step": 10 * (i + 1)}
        | {f"episode/achievement_{n}": x for n, x in zip(names, row, strict=True)}
        for i, row in enumerate(unlocked)
    ]
    (run / "scores.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["report", str(tmp_path), "--y", "crafter_score"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "Score: Crafter score of episodes at 0 to 40 frames." in text
    # three and two of four episodes: exp((log(1 + 75) + log(1 + 50)) / 2) - 1
    assert f"| {format_number(np.sqrt(76 * 51) - 1)} | 1 |" in text
    assert main([*words, "--budget", "20"]) == 0
    assert f"| {format_number(np.sqrt(101 * 51) - 1)} | 1 |" in capsys.readouterr().out


def test_published_runs_are_compared(tmp_path, capsys):
    write_run(tmp_path / "a", offset=10)
    pong = [str(tmp_path / "a"), "--baseline", "iris", "dreamerv3"]
    assert main(["report", *pong]) == 0
    text = capsys.readouterr().out
    assert "| atari100k_pong | IRIS (published) | 14.6 [" in text
    assert "| atari100k_pong | DreamerV3 (published) | -4.9 | 5 |" in text
    # four of five runs of IRIS are below 19, the score here
    assert "improvement, dreamer over IRIS (published): 0.8 [" in text
    assert "over DreamerV3" not in text
    assert "IRIS (published): Micheli" in text
    assert main(["report", *pong, "--format", "latex"]) == 0
    text = capsys.readouterr().out
    assert "% dreamer on atari100k_pong: reverie train --seed 0" in text
    assert "% Probability of improvement, dreamer over IRIS (published): 0.8" in text


def test_methods_without_all_tasks_say_so(tmp_path, capsys):
    for task in ("atari100k_boxing", "atari100k_pong"):
        write_run(tmp_path / task, task=task)
    write_run(tmp_path / "iris", task="atari100k_pong", agent="iris")
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Human-normalized score over 2 tasks:" in text
    assert "| iris (1 of 2 tasks) |" in text
    lines = [line for line in text.splitlines() if line.startswith("| atari100k_")]
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| atari100k_boxing", "dreamer"],
        ["| atari100k_pong", "dreamer"],
        ["| atari100k_pong", "iris"],
    ]
    assert "| dreamer (" not in text


def test_task_without_an_episode_is_left_out(tmp_path, capsys):
    write_run(tmp_path / "a", task="catch")
    empty = write_run(tmp_path / "b", task="reach")
    (empty / "scores.jsonl").write_text("")
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "| catch | dreamer | 9 | 1 |" in text
    assert "reach" not in text
    assert "no episode in this window" not in text


def test_windows_of_tasks_and_runs_of_other_lengths(tmp_path, capsys):
    write_run(tmp_path / "a", task="catch")
    short = write_run(tmp_path / "b", task="catch", seed=1)
    lines = (short / "scores.jsonl").read_text().splitlines()[:5]
    (short / "scores.jsonl").write_text("\n".join(lines))
    last = write_run(tmp_path / "c", task="reach")
    lines = (last / "scores.jsonl").read_text().splitlines()[:9]
    (last / "scores.jsonl").write_text("\n".join(lines))
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "episodes in the last 5 % of the training of each task" in text
    assert "ends at 360 to 400 frames." in text
    assert "1 run has no episode in this window; the window of such a run" in text
    assert "| catch | dreamer | 6.5 [4, 9] | 2 |" in text
    # windows of 100 frames: the scores 7, 8, 9, and 2, 3, 4 of the short run
    assert main(["report", str(tmp_path), "--window", "0.25"]) == 0
    assert "| catch | dreamer | 5.5 [3, 8] | 2 |" in capsys.readouterr().out


def test_score_files_with_an_index(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (tmp_path / "kept").mkdir()
    (run / "scores.jsonl").rename(tmp_path / "kept" / "pong-seed0.jsonl")
    settings = {"task": "atari100k_pong", "seed": 0}
    entry = {"settings": settings, "commit": "f00", "repeat": 4, "seconds": 7200}
    (tmp_path / "kept" / "runs.json").write_text(
        json.dumps({"pong-seed0.jsonl": entry})
    )
    assert main(["report", str(tmp_path / "kept"), "--x", "step"]) == 0
    assert "95 to 100 step" in capsys.readouterr().out
    (tmp_path / "kept" / "runs.json").write_text('{"none.jsonl": {}}')
    assert main(["report", str(tmp_path / "kept")]) == 2
    (tmp_path / "kept" / "runs.json").write_text("[")
    assert main(["report", str(tmp_path / "kept")]) == 2


def test_commands_are_quoted_for_a_shell(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    command = ["/bin/reverie", "train", "--logdir", "my run", "--.*\\.units", "8"]
    (run / "about.json").write_text(json.dumps([{"command": command}]))
    assert main(["report", str(run), "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert shlex.split(row["command"]) == ["reverie", *command[1:]]


def test_the_command_of_a_resumed_run_is_that_of_its_first_start(tmp_path):
    run = write_run(tmp_path / "run")
    first = {"command": ["x", "train", "--seed", "0"], "commit": "a"}
    resumed = {"command": ["x", "train", "--logdir", "run"], "commit": "b"}
    (run / "about.json").write_text(json.dumps([first, resumed, resumed]))
    (found,) = find_runs([run])
    assert found.about == {"command": first["command"], "commit": "b"}
    other = {**resumed, "first_command": ["x", "train", "--seed", "1"]}
    (run / "about.json").write_text(json.dumps([first, resumed, other]))
    (found,) = find_runs([run])
    assert found.about["command"] == ["x", "train", "--seed", "1"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "needs at least one run folder"),
        (["nowhere"], "does not exist"),
        (["."], "contains no run"),
        (["RUNS", "--format", "html"], "choose from md, latex, csv, json"),
        (["RUNS", "--x", "updates"], "choose from frames, step, hours"),
        (["RUNS", "--window", "0"], "--window must be above 0"),
        (["RUNS", "--budget", "-1"], "must not be negative"),
        (["RUNS", "--baseline", "dreamer"], "Did you mean 'dreamerv3'"),
        (["RUNS", "--y", "x", "--baseline", "iris"], "Fix: remove --y or --baseline"),
        (["RUNS", "--baseline", "dreamerv3/procgen"], "do not contain"),
        (["RUNS", "--y", "episode/nothing"], "has values of 'episode/nothing'"),
        (["RUNS", "--styel", "x"], "has no option --styel"),
        (["RUNS", "--configs", "debug"], "reads the settings of the runs"),
    ],
)
def test_invalid_commands_exit_with_2(logdir, words, complaint, capsys, monkeypatch):
    (logdir.parent / "empty").mkdir()
    monkeypatch.chdir(logdir.parent / "empty")
    words = [str(logdir) if word == "RUNS" else word for word in words]
    assert main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert "Fix:" in error
