"""Runs of a folder: status, curves, media, configs, and the exported page."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from signal import SIGINT
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from play_runs import COMMON, RUNS
from starlette.testclient import TestClient

from reverie.agents.dreamer.agent import Dreamer
from reverie.api import UserError
from reverie.campaign.queue import Queue, QueuedRun
from reverie.play.export import SCRIPTS, make_page, record_session
from reverie.play.load import AGENT_MODEL
from reverie.play.runs import MetricsFile, RunIndex
from reverie.play.server import AccessCheck, Sessions, make_app, page_files
from reverie.run.config import resolve
from reverie.run.folder import write_config
from reverie.run.signals import Interrupted
from reverie.run.train import train


@pytest.fixture
def folder(run_folder, tmp_path) -> Path:
    """Two runs, one of them below another folder."""
    for name, path in (("dreamer", "one"), ("iris", "group/two")):
        target = tmp_path / "runs" / path
        shutil.copytree(
            run_folder(name), target, ignore=shutil.ignore_patterns("replay")
        )
    return tmp_path / "runs"


def test_runs_are_listed_with_task_agent_and_steps(folder):
    runs = {run["name"]: run for run in RunIndex(folder).summaries()}
    assert set(runs) == {"one", "group/two"}
    one = runs["one"]
    assert (one["task"], one["agent"]) == ("catch", "dreamer")
    assert one["status"] == "finished"
    assert runs["group/two"]["status"] == "finished"  # after its epochs
    assert one["steps"] >= 40
    assert one["metrics"][0] == "score"
    assert -1 <= one["score"] <= 1


def test_the_status_shows_runs_that_are_trained_now_or_failed(folder):
    index = RunIndex(folder)

    def status(name: str) -> str:
        return {run["name"]: run["status"] for run in index.summaries()}[name]

    with (folder / "one" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert status("one") == "running"
    assert status("one") == "finished"
    (folder / "one" / "about.json").write_text('[{"error": "ValueError: broken"}]')
    assert status("one") == "failed"
    (run,) = (run for run in index.summaries() if run["name"] == "one")
    assert index.details(run["id"])["error"] == "ValueError: broken"
    (folder / "one" / "config.yaml").write_text("{")
    other = RunIndex(folder).summaries()
    assert len(other) == 2


def test_the_error_that_ended_a_run_is_shown_until_it_is_resumed(
    run_folder, tmp_path, monkeypatch
):
    run = shutil.copytree(run_folder("dreamer"), tmp_path / "run")
    presets, flags = RUNS["dreamer"]
    flags = {**COMMON, **flags, "logdir": str(run)}
    index = RunIndex(tmp_path)

    def resume(steps: int) -> None:
        train(resolve(presets, flags={**flags, "run.steps": steps}))

    def shown() -> tuple[str, str]:
        (summary,) = index.summaries()
        return summary["status"], index.details(summary["id"])["error"]

    def fail(agent, feed):
        raise ValueError("the loss is undefined")

    monkeypatch.setattr(Dreamer, "train", fail)
    with pytest.raises(ValueError, match="undefined"):
        resume(80)
    assert shown() == ("failed", "ValueError: the loss is undefined")
    monkeypatch.setattr(Dreamer, "train", lambda *_: os.kill(os.getpid(), SIGINT))
    with pytest.raises(Interrupted):
        resume(80)
    assert shown()[1] == ""  # a signal is not an error
    monkeypatch.undo()
    resume(44)
    assert shown() == ("finished", "")


def test_an_error_of_a_new_run_leaves_no_folder(tmp_path):
    flags = {**COMMON, "logdir": str(tmp_path / "run"), "run.steps": 40}
    with pytest.raises(UserError, match="no simulator"):
        train(resolve(["debug"], flags=flags), make_env=_fail)
    assert not (tmp_path / "run").exists()


def _fail(*arguments: object) -> Any:
    raise ValueError("no simulator")


def test_episodes_that_end_at_the_same_step_are_one_point(folder):
    lines = [(40, 1.0), (40, -1.0), (40, 1.0), (48, -1.0)]
    with (folder / "one" / "scores.jsonl").open("w") as file:
        for number, (step, score) in enumerate(lines):
            entry = {"step": step, "seconds": number, "episode/score": score}
            file.write(json.dumps(entry) + "\n")
    index = RunIndex(folder)
    (run,) = (run for run in index.summaries() if run["name"] == "one")
    series = index.series(run["id"], "score")
    assert series["step"] == [40, 48]
    assert series["value"] == pytest.approx([1 / 3, -1.0])
    assert series["hours"] == pytest.approx([2 / 3600, 3 / 3600])


def test_lines_are_read_as_they_are_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.update()
    path.write_text('{"step": 1, "a": 0.5}\n{"step": 2, "a": 1, "b": nu')
    file.update()
    assert file.columns == {"a": [(1, 0.0, 0.5)]}
    with path.open("a") as stream:
        stream.write('ll}\nnot json\n{"step": 3, "seconds": 2, "a": 4}\n')
    file.update()
    assert [point[2] for point in file.columns["a"]] == [0.5, 1.0, 4.0]
    assert "b" not in file.columns
    path.write_text('{"step": 9, "a": 7}\n')  # resumed from an earlier checkpoint
    file.update()
    assert file.columns == {"a": [(9, 0.0, 7.0)]}


def test_series_have_steps_frames_and_hours(folder):
    index = RunIndex(folder)
    (run,) = (run for run in index.summaries() if run["name"] == "one")
    series = index.series(run["id"], "score")
    assert set(series) == {"step", "frames", "hours", "value"}
    assert len({len(column) for column in series.values()}) == 1
    assert series["step"] == sorted(series["step"])
    assert index.series(run["id"], "unknown")["value"] == []


def test_logs_count_frames_of_repeated_actions(folder):
    config = folder / "one" / "config.yaml"
    text = config.read_text()
    assert "\n  repeat: 1\n" in text
    before = _run_named_one(folder)
    config.write_text(text.replace("\n  repeat: 1\n", "\n  repeat: 4\n"))
    after = _run_named_one(folder)
    assert after["steps"] == before["steps"] // 4
    series = RunIndex(folder)
    series.summaries()
    columns = series.series(after["id"], "score")
    assert columns["step"] == [frames // 4 for frames in columns["frames"]]


def _run_named_one(folder: Path) -> dict:
    return next(r for r in RunIndex(folder).summaries() if r["name"] == "one")


def test_recorded_episodes_are_listed(run_folder):
    index = RunIndex(run_folder("dreamer"))
    (run,) = index.summaries()
    episodes = index.episodes(run["id"])
    assert {episode["source"] for episode in episodes} == {"replay"}
    assert all(episode["rows"] > 0 for episode in episodes)


def test_configs_are_compared(folder):
    index = RunIndex(folder)
    ids = {run["name"]: run["id"] for run in index.summaries()}
    different = index.config_diff(ids["one"], ids["group/two"])
    assert different["agent"] == ["dreamer", "iris"]
    assert "task" not in different
    assert index.config_diff(ids["one"], ids["one"]) == {}


def test_a_folder_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        RunIndex(tmp_path / "nothing")


def test_the_server_answers_by_id_and_number_only(folder):
    index = RunIndex(folder)
    app = make_app(AccessCheck("t", "127.0.0.1"), Sessions(), index)
    with TestClient(app, base_url="http://127.0.0.1:8642") as client:
        assert client.get("/api/runs").status_code == 403
        assert client.get("/api/info?token=t").json() == {"view": True}
        runs = client.get("/api/runs?token=t").json()
        ids = [run["id"] for run in runs]
        assert all(str(folder) not in json.dumps(run) for run in runs)
        details = client.get(f"/api/runs/{ids[0]}?token=t").json()
        assert details["config"]["task"] == "catch"
        series = client.get(f"/api/runs/{ids[0]}/series?token=t&key=score").json()
        assert series["value"]
        path = f"/api/difference?token=t&a={ids[0]}&b={ids[1]}"
        assert "agent" in client.get(path).json()
        if details["media"]:
            media = client.get(f"/api/runs/{ids[0]}/media/0?token=t")
            assert media.headers["content-type"] in ("image/gif", "image/png")
        for bad in ("x", "..%2f..", f"{ids[0]}/media/999", f"{ids[0]}/media/../x"):
            assert client.get(f"/api/runs/{bad}?token=t").status_code == 404


def test_an_exported_page_contains_everything(folder):
    runs = RunIndex(folder).summaries()
    page = make_page({"runs": runs, "details": {}, "series": {}, "x": "</script>"})
    assert "import {" not in page
    assert "export class" not in page
    assert 'src="main.js"' not in page
    assert page.count("</script>") == 1
    assert set(SCRIPTS) == {name for name in page_files() if name.endswith(".js")}


def test_a_session_is_recorded_as_sheets_of_frames(loaded):
    session = record_session(loaded, AGENT_MODEL, steps=7)
    assert [pane["kind"] for pane in session["panes"]] == [
        "real",
        "model",
        "difference",
    ]
    assert len(session["steps"]) == 7
    assert all(sheet.startswith("data:image/png") for sheet in session["sprite_sheets"])
    assert all(len(step["shown"]) == 3 for step in session["steps"])


def test_lines_with_numbers_that_are_too_large_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1e999, "a": 1}', f'{{"step": 1, "a": {10**400}}}']
    path.write_text("\n".join([*lines, '{"step": 2, "a": 3}', ""]))
    file = MetricsFile(path)
    file.update()
    assert file.columns == {"a": [(2, 0.0, 3.0)]}


def test_runs_of_a_campaign_have_its_state_before_and_after_they_start(tmp_path):
    queue = Queue(tmp_path / "campaign")
    queue.folder.mkdir()
    (queue.folder / "campaign.yaml").write_text("tasks: [catch]\n")
    queue.add([QueuedRun(name, "catch", "", 0, []) for name in ("a", "b", "c")])
    queue.open_worker()
    first, second, _ = queue.statuses()
    queue.end_attempt(queue.claim(first), "failed", "No simulator.")
    queue.claim(second)
    index = RunIndex(tmp_path)
    runs = {run["name"]: run for run in index.summaries()}
    states = {name.rpartition("/")[2]: run["status"] for name, run in runs.items()}
    assert states == {"a": "failed", "b": "running", "c": "waiting"}
    assert runs["campaign/runs/c"]["task"] == "catch"
    failed = runs["campaign/runs/a"]["id"]
    assert index.details(failed)["error"] == "No simulator."
    folder = queue.run_folder("c")
    folder.mkdir()
    write_config(folder, resolve(flags={"task": "catch"}, presets=["debug"]))
    (started,) = (run for run in index.summaries() if run["name"].endswith("/c"))
    assert started["id"] == runs["campaign/runs/c"]["id"]
    assert started["agent"] == "dreamer"  # its config has been read
    queue.close_worker()


def test_images_outside_of_a_run_are_not_shown(tmp_path):
    """A shared run may have links to images of the user, or pipes."""
    folder = tmp_path / "runs" / "one"
    (folder / "media").mkdir(parents=True)
    write_config(folder, resolve((), (), []))
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "photo.png").write_bytes(b"private")
    (folder / "media" / "folder").symlink_to(tmp_path / "private")
    (folder / "eval").symlink_to(tmp_path / "private")
    (folder / "link.png").symlink_to(tmp_path / "private" / "photo.png")
    os.mkfifo(folder / "pipe.png")
    (folder / "folder.png").mkdir()
    (folder / "media" / "own.png").write_bytes(b"")
    index = RunIndex(tmp_path / "runs")
    (run,) = index.summaries()
    assert [x["name"] for x in index.details(run["id"])["media"]] == ["own"]
