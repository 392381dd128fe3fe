"""Regular expressions in settings: the right names, in bounded time."""

from __future__ import annotations

import re

import pytest

from reverie import patterns
from reverie.api import UserError
from reverie.config import ConfigError, matching_names
from reverie.log.logger import LoggerConfig
from reverie.log.record import Record
from reverie.log.terminal import TerminalSink
from reverie.patterns import matches, select_names

NAMES = ["run.steps", "run.envs", "dreamer.actor.units", "a" * 40]
SLOW = r"(a+)+b"


@pytest.fixture
def in_child(monkeypatch):
    """The patterns that were evaluated in a child process."""
    found, evaluate = [], patterns._find_in_child

    def record(pattern, *arguments):
        found.append(pattern)
        return evaluate(pattern, *arguments)

    monkeypatch.setattr(patterns, "_find_in_child", record)
    return found


def test_a_slow_pattern_is_ended_with_an_error(monkeypatch):
    monkeypatch.setattr(patterns, "MAX_SECONDS", 0.5)
    with pytest.raises(UserError, match=r"takes too long(.|\n)*Fix: "):
        select_names(SLOW, NAMES)  # takes exponential time


@pytest.mark.parametrize(
    "pattern",
    [r"(\w+\.)*units", r"(run|dreamer)?.*\.units", r".*a.*c.*t.*\.units", "(d|e)" * 8],
)
def test_unusual_patterns_are_evaluated_in_a_child_with_the_same_result(
    in_child, pattern
):
    expected = [name for name in NAMES[:3] if re.fullmatch(pattern, name)]
    assert select_names(pattern, NAMES[:3]) == expected
    assert in_child == [pattern]


@pytest.mark.parametrize(
    "pattern",
    [r".*\.units", r"training\..*\.(steps|first_steps)", "run.steps|run.envs"],
)
def test_usual_patterns_need_no_child(in_child, pattern):
    expected = [name for name in NAMES if re.fullmatch(pattern, name)]
    assert select_names(pattern, NAMES) == expected
    select_names(LoggerConfig().filter, NAMES, "search")
    assert not in_child


def test_methods_differ_as_in_re(in_child):
    assert select_names("run", NAMES) == []
    assert select_names("run", NAMES, "match") == NAMES[:2]
    assert select_names("actor", NAMES, "search") == NAMES[2:3]
    assert matches(".*steps", "run.steps")
    assert not matches("steps", "run.steps")
    assert select_names("(n|e)+vs", NAMES, "search") == ["run.envs"]
    assert in_child == ["(n|e)+vs"]


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}", "x" * 2000])
def test_invalid_and_huge_patterns_are_errors_of_the_pattern(pattern):
    with pytest.raises(re.error):
        select_names(pattern, NAMES)


@pytest.mark.parametrize("pattern", ["(?x)(a+) +b", "(?x:(a+) +)b", r"(?i)RUN\.steps"])
def test_patterns_with_flags_are_evaluated_in_a_child(in_child, monkeypatch, pattern):
    monkeypatch.setattr(patterns, "_run_child", lambda *_: [False] * 4)
    select_names(pattern, NAMES)
    assert in_child == [pattern, pattern]  # compiled and evaluated


def test_patterns_with_flags_match_and_have_errors_as_in_re():
    assert select_names(r"(?i)RUN\.STEPS", NAMES) == ["run.steps"]
    with pytest.raises(re.error, match="missing \\)"):
        patterns.check_pattern("(?i)(")


def test_the_time_of_all_patterns_together_is_limited(monkeypatch):
    monkeypatch.setattr(patterns, "_used_seconds", 0.0)
    monkeypatch.setattr(patterns, "MAX_TOTAL_SECONDS", 1.0)
    clock = iter(range(100))
    monkeypatch.setattr(patterns.time, "thread_time", lambda: 0.3 * next(clock))
    assert select_names("run.*", NAMES) == NAMES[:2]
    with pytest.raises(UserError, match=r"together(.|\n)*Fix: "):
        select_names("run.*", NAMES)


def test_a_slow_pattern_in_a_config_is_an_error_with_a_fix(monkeypatch):
    monkeypatch.setattr(patterns, "MAX_SECONDS", 0.5)
    with pytest.raises(UserError, match=r"\(a\+\)\+b(.|\n)*Fix: "):
        matching_names(SLOW, ["a" * 40], "a preset")
    with pytest.raises(ConfigError, match="more than 1000 characters"):
        matching_names("*" * 2000, NAMES, "a preset")


def test_a_slow_filter_of_the_terminal_is_evaluated_once(monkeypatch, capsys):
    monkeypatch.setattr(patterns, "MAX_SECONDS", 0.5)
    sink = TerminalSink(SLOW)
    with pytest.raises(UserError, match="takes too long"):
        sink.write(Record(1, {"a" * 40: 1.0}))
    monkeypatch.setattr(patterns, "_find_in_child", pytest.fail)
    sink.write(Record(2, {"a" * 41: 1.0}))
    assert "step 2" in capsys.readouterr().out
