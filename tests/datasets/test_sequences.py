"""Sequence datasets: registration, user classes, checks of their arrays."""

from __future__ import annotations

import sys
from typing import Literal

import numpy as np
import pytest
import torch

from reverie.api import UserError
from reverie.datasets.sequences import (
    SEQUENCE_DATASETS,
    SequenceConfig,
    SequenceDataset,
    find_sequence_class,
    make_sequence_dataset,
)
from reverie.datasets.sequences.feed import SequenceFeed
from reverie.rows import Window
from reverie.spaces import EVENT, Space

WINDOW = Window(4, 12)


def test_an_unknown_dataset_is_an_error_with_a_suggestion():
    with pytest.raises(UserError, match="sequences_balls"):
        find_sequence_class("sequences_bals")
    with pytest.raises(UserError, match="cannot be imported"):
        find_sequence_class("sequences_nowhere.at:All")


class Blinks:
    """A complete sequence dataset: a lamp that is switched at random."""

    loss: Literal["bernoulli", "gaussian"] = "bernoulli"

    def __init__(self, config: SequenceConfig, window: Window, seed: int):
        self.obs_space = {"image": Space(np.uint8, (32, 32, 3), 0, 256)}
        self.act_space: dict[str, Space] = {}
        self.shape, self.seed = (window.batch, window.length), seed

    def batch(self, step: int):
        event = np.random.default_rng([self.seed, step]).random(self.shape) < 0.2
        light = (event.cumsum(1) % 2 * 255).astype(np.uint8)
        image = np.broadcast_to(light[..., None, None, None], (*self.shape, 32, 32, 3))
        return {"image": image, "log/event": event}

    def evaluation(self):
        return self.batch(-1 % 2**32)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("task", ["sequences_blinks", f"sequences_{__name__}:Blinks"])
def test_a_dataset_is_registered_or_named_by_its_class(monkeypatch, task):
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.setitem(SEQUENCE_DATASETS, "blinks", f"{__name__}:Blinks")
    source = make_sequence_dataset(task, SequenceConfig(), WINDOW, 0)
    assert isinstance(source, SequenceDataset)
    assert source.batch(0)["image"].shape == (4, 12, 32, 32, 3)


def test_a_dataset_class_in_the_working_directory(tmp_path, monkeypatch):
    text = "from reverie.datasets.synthetic import balls\n"
    text += "class Mine(balls.BouncingBalls): ...\n"
    (tmp_path / "balls_of_mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert find_sequence_class("sequences_balls_of_mine:Mine").__name__ == "Mine"


class WrongArguments(Blinks):
    def __init__(self):
        pass


class RaisesInBatch(Blinks):
    def batch(self, step: int):
        return {"image": [] / 2}


@pytest.mark.parametrize(
    ("kind", "error"), [(WrongArguments, "TypeError"), (RaisesInBatch, "and 'int'")]
)
def test_errors_in_user_classes_have_file_and_line(monkeypatch, kind, error):
    monkeypatch.setitem(SEQUENCE_DATASETS, "mine", f"{__name__}:{kind.__name__}")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])

    def serve_one():
        source = make_sequence_dataset("sequences_mine", SequenceConfig(), WINDOW, 0)
        SequenceFeed(source, torch.device("cpu"))("train")

    with pytest.raises(UserError, match=rf"{error}.*\.py:\d+\)\.\n  Fix: correct it"):
        serve_one()


def test_errors_in_built_in_classes_are_not_user_errors(monkeypatch):
    source = make_sequence_dataset("sequences_balls", SequenceConfig(), WINDOW, 0)
    monkeypatch.setattr(source, "batch", lambda step: [] / 2)
    with pytest.raises(TypeError):
        SequenceFeed(source, torch.device("cpu"))("train")


class WrongLoss:
    loss = "l2"


class NoMethods:
    loss = "gaussian"


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("WrongLoss", "bernoulli, gaussian"),
        ("NoMethods", "has no batch"),
        ("WINDOW", "must be a class"),
    ],
)
def test_classes_that_are_not_datasets_are_errors(monkeypatch, kind, complaint):
    monkeypatch.setitem(SEQUENCE_DATASETS, "mine", f"{__name__}:{kind}")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    with pytest.raises(UserError, match=complaint):
        make_sequence_dataset("sequences_mine", SequenceConfig(), WINDOW, 0)


def serve(**changes):
    """Return a training batch and the evaluation set of a dataset with such arrays."""

    class Mine(Blinks):
        def __init__(self):
            super().__init__(SequenceConfig(), WINDOW, 0)
            self.act_space = {
                "turn": Space(np.int64, (), 0, 4),
                "push": Space(np.float32, (2,)),
            }

        def batch(self, step):
            turn, push = np.zeros(self.shape, int), np.zeros((*self.shape, 2))
            arrays = {**super().batch(step), "turn": turn, "push": push, **changes}
            return {key: value for key, value in arrays.items() if value is not None}

    feed = SequenceFeed(Mine(), torch.device("cpu"))
    return feed("train"), feed("report")


def test_discrete_and_continuous_actions_are_valid(recwarn):
    train, report = serve()
    assert {"image", "turn", "push"} == train.keys() == report.keys() - {EVENT}
    assert not recwarn.list


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"image": None}, "'image' is missing"),
        ({"turn": None}, "'turn' is missing"),
        ({"image": [1, 2]}, "'image' is not an array"),
        ({"image": np.zeros((4, 12, 32, 32, 3), np.float32)}, "expected uint8"),
        ({"image": np.full((4, 12, 32, 32, 3), np.nan)}, "has NaN"),
        ({"image": np.zeros((4, 12, 16, 16, 3), np.uint8)}, "T, 32, 32, 3"),
        ({"image": np.zeros((0, 12, 32, 32, 3), np.uint8)}, "above 0"),
        ({"turn": np.zeros((4, 11), int)}, "'turn' has shape"),
        ({"turn": np.full((4, 12), 4)}, "not from 0 to 3"),
        ({"turn": np.zeros((4, 12))}, "is float64, expected int64"),
        ({"push": np.full((4, 12, 2), np.inf)}, "'push' has NaN or infinite"),
        ({EVENT: np.zeros((4, 11), bool)}, "'log/event' has shape"),
        ({EVENT: np.zeros((4, 12), int)}, "expected bool"),
    ],
)
def test_arrays_that_do_not_match_the_spaces_are_errors(changes, complaint):
    with pytest.raises(UserError, match=complaint):
        serve(**changes)
