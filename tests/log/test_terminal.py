"""The terminal sink."""

from __future__ import annotations

import io

import pytest

from reverie.api import UserError
from reverie.cli.streams import flush_output
from reverie.log import terminal
from reverie.log.record import Record, Score
from reverie.log.terminal import (
    Epochs,
    TerminalSink,
    format_number,
    format_seconds,
    in_columns,
)


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test advances."""
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def test_the_filter_selects_metrics():
    stream = io.StringIO()
    scalars = {"train/loss/dyn": 1.25, "train/adv": 3.0, "episode/score": 7.0}
    TerminalSink("score|train/loss/", stream=stream).write(Record(5, scalars=scalars))
    out = stream.getvalue()
    assert "train/loss/dyn" in out
    assert "1.250" in out
    assert "adv" not in out


def test_the_progress_line_has_step_rate_time_left_loss_and_score(clock):
    stream = io.StringIO()
    sink = TerminalSink("nothing", total=10_000, stream=stream)
    sink.write(Record(1000))
    clock[0] += 10
    scores = (Score(1990, "episode/score", -1.0), Score(1999, "episode/score", 0.75))
    losses = {"train/loss/dyn": 1.0, "train/loss/rep": 0.5}
    sink.write(Record(2000, scalars=losses, scores=scores))
    last = stream.getvalue().splitlines()[-1]
    assert last == (
        "step 2,000 of 10,000 (20%) · 100 steps/s · 1m 20s left · loss 1.500 · "
        "score 0.7500"
    )
    assert "\r" not in stream.getvalue()


def test_the_progress_of_epochs_has_the_time_left_after_two_epochs(clock):
    stream, now = io.StringIO(), [Epochs(0, 0, 5)]
    sink = TerminalSink("nothing", 1000, stream, epochs=lambda: now[0])

    def write(step: int, epochs: Epochs) -> str:
        now[0] = epochs
        sink.write(Record(step))
        return stream.getvalue().splitlines()[-1]

    assert write(0, Epochs(0, 0, 5)) == "epoch 1 of 5 (0%) · step 0"
    clock[0] += 1000  # the first epoch is longer than the others
    assert "left" not in write(0, Epochs(1, 1, 5))
    clock[0] += 20
    assert write(0, Epochs(2, 2, 5)) == "epoch 2 of 5 (40%) · step 0 · 1m 0s left"
    clock[0] += 5
    assert write(0, Epochs(3, 2, 5)) == "epoch 3 of 5 (40%) · step 0 · 55s left"
    clock[0] += 1000
    assert write(0, Epochs(3, 2, 5)) == "epoch 3 of 5 (40%) · step 0"
    assert write(0, Epochs(5, 5, 5)) == "epoch 5 of 5 (100%) · step 0"
    sink.truncate_after(-1)
    assert write(100, Epochs(2, 1, None)) == "epoch 2 · step 100 of 1,000 (10%)"


def test_only_a_terminal_has_an_updated_progress_line(clock):
    pipe, screen = io.StringIO(), FakeTerminal()
    for stream in (pipe, screen):
        sink = TerminalSink("x", total=100, stream=stream)
        sink.progress(1)
        sink.progress(2)  # too soon
        clock[0] += 1
        sink.progress(3)
        sink.close()
    assert pipe.getvalue() == ""
    assert screen.getvalue().count("\r") == 3
    assert "step 3 of 100" in screen.getvalue()
    assert "step 2 of" not in screen.getvalue()


def test_the_rate_is_averaged_over_the_last_minute(clock):
    stream = io.StringIO()
    sink = TerminalSink("nothing", stream=stream)
    for step in (0, 10, 20, 1020, 2020):
        sink.write(Record(step))
        clock[0] += 100
    assert "step 2,020 · 10 steps/s" in stream.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234567, "1,234,567"),
        (-3.0, "-3"),
        (0.12345, "0.1235"),
        (0.00123, "0.0012"),
        (1.5, "1.500"),
        (123.456, "123.5"),
        (12345.6, "12,346"),
        (1.2e-5, "1.2e-05"),
        (3.4e12, "3.4e+12"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers_are_short(value, text):
    assert format_number(value) == text


def test_durations_have_two_units():
    assert format_seconds(4.4) == "4s"
    assert format_seconds(75) == "1m 15s"
    assert format_seconds(93784) == "1d 2h"


def test_columns_fit_the_width():
    pairs = {f"train/loss/{i}": str(i) for i in range(11)} | {"text": "two\nlines"}
    lines = in_columns(pairs, 80)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert all(f"train/loss/{i} " in text for i in range(11))
    assert lines[-3:] == ["  text", "    two", "    lines"]
    assert in_columns({}, 80) == []


def test_an_invalid_filter_raises():
    with pytest.raises(UserError, match=r"logger.filter is not a regular expression"):
        TerminalSink("score|(")


@pytest.mark.parametrize("closes", [True, False])
def test_a_standard_output_that_is_closed_or_none_is_no_error(monkeypatch, closes):
    """An environment in the process may have closed or replaced it."""
    sink, stream = TerminalSink("score"), io.StringIO()
    stream.close()
    monkeypatch.setattr("sys.stdout", stream if closes else None)
    sink.write(Record(5, scalars={"score": 1.0}))
    sink.progress(6)
    sink.close()
    assert flush_output() is None
