"""The logger: averages, failing sinks, exact resume."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest
import torch

from reverie.api import UserError
from reverie.log.device_sums import find_vector
from reverie.log.jsonl import JsonlSink, read_lines
from reverie.log.logger import Logger, LoggerConfig, make_logger
from reverie.log.record import Record, Sink


class ListSink(Sink):
    """Stores records in a list, or fails if `broken`."""

    name = "memory"

    def __init__(self):
        self.records: list[Record] = []
        self.truncated: list[int] = []
        self.broken = False

    def write(self, record):
        if self.broken:
            raise ConnectionError("server down")
        self.records.append(record)

    def truncate_after(self, step):
        self.truncated.append(step)


@pytest.fixture
def sink():
    return ListSink()


@pytest.fixture
def logger(sink):
    return Logger([sink])


def test_scalars_are_averaged_between_writes_ignoring_nan(logger):
    for value in (1.0, math.nan, 3.0):
        logger.add({"loss": torch.tensor(value), "plain": value}, prefix="train")
    scalars = logger.write(5).scalars
    assert scalars == {"train/loss": 2.0, "train/plain": 2.0}
    logger.add({"loss": torch.tensor(7.0)}, prefix="train")
    assert logger.write(6).scalars == {"train/loss": 7.0}


def test_a_metric_that_is_always_nan_is_nan(logger):
    logger.add({"a": torch.tensor(math.nan), "b": math.nan, "c": np.inf})
    scalars = logger.write(0).scalars
    assert math.isnan(scalars["a"])
    assert math.isnan(scalars["b"])
    assert scalars["c"] == math.inf


def test_all_number_types_are_scalars(logger):
    values = {
        "int": 3,
        "bool": True,
        "numpy": np.float32(0.5),
        "array": np.array(2),
        "long": torch.tensor(2**40),
        "half": torch.tensor(0.25, dtype=torch.bfloat16),
        "truth": torch.tensor(True),
        "float": torch.tensor(1.5),
    }
    logger.add(values)
    expected = {"int": 3, "bool": 1, "numpy": 0.5, "array": 2, "long": 2**40}
    expected |= {"half": 0.25, "truth": 1, "float": 1.5}
    assert logger.write(0).scalars == expected


def test_metrics_of_different_calls_are_averaged_by_name(logger):
    logger.add({"a": torch.tensor(1.0), "b": torch.tensor(4.0)})
    logger.add({"a": torch.tensor(3.0)})
    logger.add({"a": 5.0})
    assert logger.write(0).scalars == {"a": 3.0, "b": 4.0}


def test_tensors_may_be_overwritten_after_add(logger):
    value = torch.tensor(1.0)
    video = np.zeros((2, 4, 4, 3), np.uint8)
    logger.add({"x": value, "video": video})
    value.fill_(9)
    video.fill(9)
    record = logger.write(0)
    assert record.scalars["x"] == 1.0
    assert record.videos["video"].max() == 0


def test_the_same_tensors_with_new_values_are_averaged(logger):
    vector = torch.tensor([1.0, 2.0, math.nan])
    counts = torch.tensor([3])
    metrics = dict(zip("abc", vector.unbind(), strict=True))
    metrics |= {"n": counts.unbind()[0], "size": 7.0}
    logger.add(metrics, prefix="train")
    for value in (4.0, 6.0):
        vector.fill_(value)
        counts.fill_(int(value))
        logger.add(metrics, prefix="train")
    assert logger._repeated
    other = {**metrics, "b": torch.tensor(100.0)}  # another tensor with this name
    logger.add(other, prefix="train")
    logger.add(metrics)  # without a prefix
    scalars = logger.write(0).scalars
    assert scalars["train/a"] == pytest.approx((1 + 4 + 6 + 6) / 4)
    assert scalars["train/b"] == pytest.approx((2 + 4 + 6 + 100) / 4)
    assert scalars["train/c"] == pytest.approx((4 + 6 + 6) / 3)
    assert scalars["train/n"] == pytest.approx((3 + 4 + 6 + 6) / 4)
    assert scalars["train/size"] == 7.0
    assert scalars["a"] == 6.0
    logger.add(metrics, prefix="train")
    assert logger.write(1).scalars["train/a"] == 6.0


def test_only_elements_of_one_vector_in_their_order_are_its_elements():
    one, two = torch.arange(3.0), torch.arange(3.0)
    assert find_vector(list(one.unbind())).data_ptr() == one.data_ptr()
    assert find_vector(list(one.unbind())[::-1]) is None
    assert find_vector(list(one.unbind())[:2]) is None
    assert find_vector([*one.unbind()[:2], two.unbind()[2]]) is None
    assert find_vector(list(torch.arange(6.0)[::2].unbind())) is None
    assert find_vector([torch.tensor(1.0)]) is None


def test_gradients_are_not_kept_alive(logger):
    weight = torch.ones(3, requires_grad=True)
    logger.add({"loss": (weight * 2).sum()})
    assert logger.write(0).scalars["loss"] == 6.0


def test_images_and_videos_are_recognized_and_the_last_is_written(logger):
    logger.add({"image": np.zeros((4, 6, 3), np.uint8), "text": "old"})
    logger.add({"image": torch.full((4, 6, 1), 0.5), "text": "new"})
    logger.add({"video": torch.zeros(5, 4, 6, 3, dtype=torch.uint8)})
    record = logger.write(0)
    assert record.images["image"].shape == (4, 6, 1)
    assert record.images["image"].dtype == np.uint8
    assert record.images["image"][0, 0, 0] == 128
    assert record.videos["video"].shape == (5, 4, 6, 3)
    assert record.texts == {"text": "new"}
    with pytest.raises(ValueError, match=r"'matrix' has shape \(2, 2\)"):
        logger.add({"matrix": np.zeros((2, 2))})


def test_every_episode_has_a_score_at_its_own_step(logger):
    logger.add({"episode/score": np.array([1.0, 3.0])}, step=10)
    logger.add({"episode/score": 5.0}, step=20)
    logger.add({"score": torch.tensor(7.0)}, prefix="eval/episode")
    record = logger.write(30)
    assert record.scalars == {"episode/score": 3.0, "eval/episode/score": 7.0}
    scores = [(score.step, score.name, score.value) for score in record.scores]
    assert scores == [
        (10, "episode/score", 1.0),
        (10, "episode/score", 3.0),
        (20, "episode/score", 5.0),
        (30, "eval/episode/score", 7.0),
    ]
    assert logger.write(40).scores == ()


def test_a_failing_sink_gives_one_warning_and_the_others_continue(sink, capsys):
    broken = ListSink()
    broken.name, broken.broken = "broken", True
    logger = Logger([broken, sink])
    for step in range(3):
        logger.add({"x": step})
        logger.write(step)
    assert [record.step for record in sink.records] == [0, 1, 2]
    assert capsys.readouterr().err.count("broken log failed") == 1
    broken.broken = False
    logger.write(3)
    assert "broken log works again" in capsys.readouterr().err


def test_resuming_gives_the_same_files_as_an_uninterrupted_run(tmp_path):
    random = np.random.default_rng(0)
    losses = random.normal(size=(40, 2)).astype(np.float32) * 1e3

    def run(logger, steps, save_at=None):
        state = None
        for step in steps:
            loss, other = losses[step]
            logger.add({"loss": torch.tensor(loss), "plain": float(other)})
            if step % 3 == 0:
                logger.add({"episode/score": losses[step, :1]}, step=step)
            if step % 7 == 6:
                logger.write(step)
            if step == save_at:
                state = logger.state_dict()
        return state

    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    run(Logger([JsonlSink(uninterrupted)]), range(40))
    # Killed at step 30, after the state of step 17 was saved, while writing a line.
    state = run(Logger([JsonlSink(resumed)]), range(30), save_at=17)
    with open(resumed / "metrics.jsonl", "a") as file:
        file.write('{"step": 31, "lo')
    again = Logger([JsonlSink(resumed)])
    again.load_state_dict(state)
    run(again, range(18, 40))
    for name in ("metrics.jsonl", "scores.jsonl"):
        assert (resumed / name).read_bytes() == (uninterrupted / name).read_bytes()


def test_sinks_without_a_state_are_truncated(sink):
    logger = Logger([sink])
    logger.write(12)
    other = Logger([sink])
    other.load_state_dict(logger.state_dict())
    assert sink.truncated == [12]
    assert other.step == 12


def test_sinks_are_built_by_name(tmp_path, capsys):
    config = LoggerConfig(outputs=("terminal", "jsonl", "media", "jsonl"))
    logger = make_logger(config, tmp_path, total=10)
    assert [sink.name for sink in logger.sinks] == ["terminal", "jsonl", "media"]
    logger.add({"episode/score": 1.0, "video": np.zeros((2, 8, 8, 3), np.uint8)})
    logger.progress(4)
    logger.write(5)
    logger.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 5
    assert len(list((tmp_path / "media").iterdir())) == 1
    assert "step 5 of 10 (50%)" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"'prtinter'.*\n.*terminal, jsonl"):
        make_logger(LoggerConfig(outputs=("prtinter",)), tmp_path)


def test_files_without_timing_metrics(tmp_path):
    logger = make_logger(
        LoggerConfig(outputs=("jsonl",), timing_metrics=False), tmp_path
    )
    logger.add({"fps/train": 3.0, "timer/policy/avg_ms": 1, "usage/cpu": 1, "x": 2})
    logger.write(1)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line == {"step": 1, "x": 2}


def test_scores_have_the_length_of_their_episode(tmp_path):
    logger = make_logger(LoggerConfig(outputs=("jsonl",)), tmp_path)
    score, length = np.array([1.0, 2.0]), np.array([8, 9])
    logger.add({"episode/score": score, "episode/length": length}, step=3)
    logger.add({"score": 7.0, "length": 4.5}, prefix="eval/episode", step=4)
    resumed = make_logger(LoggerConfig(outputs=("jsonl",)), tmp_path)
    resumed.load_state_dict(logger.state_dict() | {"seconds": 100.0})
    record = resumed.write(5)
    assert [(x.value, x.length) for x in record.scores] == [(1, 8), (2, 9), (7, 4.5)]
    assert all(0 <= x.seconds < 10 for x in record.scores)
    assert 100 <= record.seconds < 110  # without the time in between
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["seconds"] == pytest.approx(record.seconds, abs=1e-3)


def test_scores_have_other_values_of_their_episode(tmp_path):
    logger = make_logger(LoggerConfig(outputs=("jsonl",)), tmp_path)
    score, success = np.array([1.0, 2.0]), np.array([math.nan, 1.0])
    metrics = {"episode/score": score, "episode/success": success, "episode/x": "text"}
    logger.add(metrics, step=3)
    logger.add({"episode/score": 5.0, "episode/success": 0.0}, prefix="eval", step=4)
    state = logger.state_dict()
    for saved, expected in (
        # of a version that did not save them
        ({k: v for k, v in state.items() if k != "score_others"}, [{}] * 3),
        (state, [{}, {"episode/success": 1}, {"eval/episode/success": 0}]),
    ):
        resumed = make_logger(LoggerConfig(outputs=("jsonl",)), tmp_path)
        resumed.load_state_dict(saved)
        record = resumed.write(5)
        assert [score.others for score in record.scores] == expected
        assert record.scalars["episode/success"] == 1  # the mean without NaN
        resumed.close()
    lines = read_lines(tmp_path / "scores.jsonl")
    assert [line.get("episode/success") for line in lines] == [None, 1, None]


@pytest.mark.parametrize("due", [True, False])
def test_the_final_write_of_a_finished_run_is_kept(tmp_path, due):
    logger = Logger([JsonlSink(tmp_path)])
    logger.add({"episode/score": 1.0}, step=3)
    state = logger.state_dict()
    logger.add({"report": 9.0})
    logger.write(4)
    resumed = Logger([JsonlSink(tmp_path)])
    resumed.load_state_dict(state, {"step": 4, "due": due})
    assert resumed.has_final_write
    resumed.add({"episode/score": 3.0}, step=5)
    assert resumed.write(6).scalars == {"episode/score": 3.0 if due else 2.0}
    assert [x["step"] for x in read_lines(tmp_path / "metrics.jsonl")] == [4, 6]
    assert [x["step"] for x in read_lines(tmp_path / "scores.jsonl")] == [3, 5]


def test_metrics_of_a_final_write_that_is_missing_are_written_later(tmp_path):
    logger = Logger([JsonlSink(tmp_path)])
    logger.add({"episode/score": 1.0}, step=3)
    state = logger.state_dict()
    resumed = Logger([JsonlSink(tmp_path)])
    resumed.load_state_dict(state, {"step": 4, "due": True})
    assert not resumed.has_final_write
    assert resumed.write(6).scalars == {"episode/score": 1.0}
    assert [x["step"] for x in read_lines(tmp_path / "scores.jsonl")] == [3]


def test_auto_is_tensorboard_if_it_is_installed(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tensorboard")
    config = LoggerConfig()
    names = [sink.name for sink in make_logger(config, tmp_path).sinks]
    assert names == ["terminal", "jsonl", "media", "tensorboard"]
    added = LoggerConfig(outputs=(*config.outputs, "tensorboard"))
    names = [sink.name for sink in make_logger(added, tmp_path).sinks]
    assert names.count("tensorboard") == 1
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    names = [sink.name for sink in make_logger(config, tmp_path).sinks]
    assert names == ["terminal", "jsonl", "media"]
    assert capsys.readouterr().err == ""


def test_a_tensorboard_that_cannot_be_imported_does_not_stop_the_run(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "tensorboard.py").write_text("from json import no_such_name")
    for name in [name for name in sys.modules if name.startswith("tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    logger = make_logger(LoggerConfig(), tmp_path)
    assert [sink.name for sink in logger.sinks] == ["terminal", "jsonl", "media"]
    assert "tensorboard log cannot start" in capsys.readouterr().err
