"""The status line of runs that print nothing else."""

from __future__ import annotations

import time

import pytest

from reverie.log import messages, status
from reverie.log.messages import print_message
from reverie.log.status import StatusLine


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    monkeypatch.setattr(status, "FIRST_SECONDS", 0.1)
    monkeypatch.setattr(status, "NEXT_SECONDS", 0.3)
    monkeypatch.setattr(status, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(status, "MIN_SECONDS", 0.2)


def test_a_silent_activity_is_printed_soon_and_then_regularly(capsys):
    with StatusLine("building the environments") as line:
        line.details = lambda: "step 5"
        time.sleep(1.0)
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "building the environments, step 5"
    assert printed[1] == "building the environments, step 5, for 0s so far"
    assert 3 <= len(printed) <= 4


def test_nothing_is_printed_while_other_output_appears(capsys):
    with StatusLine("collecting"):
        for _ in range(20):
            messages.record_output()
            time.sleep(0.02)
    assert capsys.readouterr().err == ""


def test_a_notice_is_printed_at_once(capsys):
    notices = iter(["wait for the report"])
    line = StatusLine("report")
    line.notice = lambda activity: next(notices, "")
    with line:
        time.sleep(0.08)
    assert capsys.readouterr().err == "wait for the report\n"


def test_a_message_counts_as_output(capsys):
    print_message("hello")
    assert messages.seconds_since_output() < 1
    assert capsys.readouterr().err == "hello\n"


def test_a_message_is_not_printed_if_standard_error_was_replaced(monkeypatch):
    monkeypatch.setattr("sys.stderr", 5)
    print_message("hello")
