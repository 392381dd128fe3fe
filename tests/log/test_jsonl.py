"""The JSON lines sink: complete lines, truncation, full disks."""

from __future__ import annotations

import errno
import json
import math
import subprocess
import sys

import pytest

from reverie.log.append_file import AppendFile
from reverie.log.jsonl import (
    JsonlSink,
    read_lines,
    remove_incomplete_line,
    remove_lines_after,
)
from reverie.log.record import Record, Score


def record(step, **scalars):
    return Record(step, scalars=scalars, scores=(Score(step, "episode/score", 0.5),))


def test_lines_are_valid_json_and_scores_are_separate(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.write(record(1, b=2.0, a=math.nan, c=math.inf))
    sink.write(Record(2, scalars={"a": 0.1}))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    strict = [json.loads(line, parse_constant=str.upper) for line in lines]
    assert strict == [{"step": 1, "a": None, "b": 2, "c": None}, {"step": 2, "a": 0.1}]
    scores = (tmp_path / "scores.jsonl").read_text()
    assert scores == '{"step": 1, "episode/score": 0.5}\n'


def test_lines_have_the_duration_of_the_run_and_episodes_their_length(tmp_path):
    sink = JsonlSink(tmp_path)
    scores = [Score(4, "episode/score", 0.5, 9.0, 1.23456), Score(5, "eval/score", 1.0)]
    sink.write(Record(6, scalars={"a": 1.0}, scores=tuple(scores), seconds=2.0))
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 6, "seconds": 2, "a": 1}]
    assert read_lines(tmp_path / "scores.jsonl") == [
        {"step": 4, "seconds": 1.235, "episode/score": 0.5, "episode/length": 9},
        {"step": 5, "eval/score": 1},
    ]


def test_the_final_lines_of_a_finished_run_are_kept(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.write(record(1, a=1))
    state = sink.state_dict()
    for step, value in ((2, 2), (2, 3), (3, 4)):  # the others are repeated
        sink.write(record(step, a=value))
    sink.load_state_dict(state, final_step=2)
    assert sink.has_final_line
    assert [line["a"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [x["step"] for x in read_lines(tmp_path / "scores.jsonl")] == [1, 2, 2]
    sink.load_state_dict(state)
    assert not sink.has_final_line
    assert [line["a"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1]


def test_lines_that_were_written_after_the_save_are_not_written_again(
    tmp_path, monkeypatch
):
    sink = JsonlSink(tmp_path)
    sink.write(record(1, a=1))

    def fail(file, data):
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(AppendFile, "write", fail)
        with pytest.raises(OSError, match="kept in memory"):
            sink.write(record(2, a=2))
    state = sink.state_dict()
    sink.write(record(3, a=3))  # the disk works again
    for _ in range(2):  # resumed twice from the same state
        sink = JsonlSink(tmp_path)
        sink.load_state_dict(state, final_step=3)
        sink.close()
        assert sink.has_final_line
        for name in ("metrics", "scores"):
            steps = [line["step"] for line in read_lines(tmp_path / f"{name}.jsonl")]
            assert steps == [1, 2, 3]


def test_a_run_killed_before_its_final_line_has_none(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.write(record(1, a=1))
    state = sink.state_dict()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "a"')
    sink.load_state_dict(state, final_step=2)
    assert not sink.has_final_line
    assert [line["a"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1]


def test_a_write_can_be_read_before_the_file_is_closed(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.write(record(1, a=1.0))
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1}]


def test_both_files_exist_before_an_episode_ends(tmp_path):
    JsonlSink(tmp_path).write(Record(1, scalars={"a": 1.0}))
    assert (tmp_path / "scores.jsonl").read_bytes() == b""


def test_truncation_removes_later_and_incomplete_lines(tmp_path):
    sink = JsonlSink(tmp_path)
    for step in (1, 2, 3):
        sink.write(record(step, a=step))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'garbage\n{"step": 2, "a": 5')
    sink.truncate_after(2)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [line["step"] for line in read_lines(tmp_path / "scores.jsonl")] == [1, 2]
    sink.write(record(3, a=9.0))
    assert read_lines(tmp_path / "metrics.jsonl")[-1] == {"step": 3, "a": 9}
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "scores.jsonl",
    ]


def test_truncating_missing_files(tmp_path):
    remove_lines_after(tmp_path / "none.jsonl", 5)
    remove_incomplete_line(tmp_path / "none.jsonl")
    path = tmp_path / "incomplete.jsonl"
    path.write_bytes(b"x" * 10_000)
    remove_incomplete_line(path)
    assert path.read_bytes() == b""


def test_a_file_shorter_than_the_state_loses_only_its_incomplete_line(tmp_path):
    sink = JsonlSink(tmp_path)
    for step in (1, 2, 3):
        sink.write(record(step, a=step))
    state = sink.state_dict()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    sink.load_state_dict(state)
    assert [line["step"] for line in read_lines(path)] == [1, 2]


FULL_DISK_SCRIPT = """
import resource, signal, sys
from pathlib import Path
from reverie.log.jsonl import JsonlSink
from reverie.log.logger import Logger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
logger = Logger([JsonlSink(folder)])
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
for step in range(20):
    logger.add({"name": step})
    logger.write(step)
content = (folder / "metrics.jsonl").read_bytes()
assert len(content) <= 200 and content.endswith(b"\\n"), content
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
logger.write(20)
logger.close()
"""


def test_a_full_disk_loses_no_line_and_gives_one_warning(tmp_path):
    """A limit on the file size makes a write fail in the middle of a line."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK_SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    steps = [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")]
    assert steps == list(range(20))
    first, again = done.stderr.splitlines()
    assert "metrics.jsonl cannot be written (File too large)" in first
    assert "Fix: free some space" in first
    assert "works again" in again
