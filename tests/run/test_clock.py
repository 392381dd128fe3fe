import pytest

from reverie.api import UserError
from reverie.run.clock import Clock, RunConfig, TrainRatio


def test_the_train_ratio_does_not_depend_on_the_number_of_environments():
    for stride in (1, 3, 16):
        schedule = TrainRatio(32 / (16 * 64))  # one update every 32 steps
        due = [schedule.updates_due(step) for step in range(1024, 4224, stride)]
        assert due[0] == 1
        # The first call gives one, then (4224 - 1024) / 32 = 100 at most.
        assert sum(due) in (100, 101)


def test_several_updates_per_step_and_none_at_ratio_zero():
    schedule = TrainRatio(2.5)
    assert [schedule.updates_due(step) for step in range(5)] == [1, 2, 3, 2, 3]
    assert [TrainRatio(0).updates_due(step) for step in range(3)] == [0, 0, 0]


def test_steps_before_the_replay_is_ready_do_not_count():
    clock = Clock(RunConfig(), TrainRatio(1.0))
    for _ in range(100):
        clock.advance(1)
        assert clock.updates_due(ready=False) == 0
    assert clock.updates_due(ready=True) == 1
    clock.advance(1)
    assert clock.updates_due(ready=True) == 1


def test_updates_that_were_not_run_come_first_after_resuming():
    clock = Clock(RunConfig(steps=4), TrainRatio(2.0))
    clock.advance(2)
    clock.updates_due(ready=True)
    clock.add_update()  # the first call gives a single one
    clock.advance(2)
    assert clock.updates_due(ready=True) == 4
    clock.add_update()
    resumed = Clock(RunConfig(steps=4), TrainRatio(2.0))
    resumed.load_state_dict(clock.state_dict())
    assert resumed.running
    assert not resumed.should_collect
    for left in (3, 2, 1):
        assert resumed.updates_due(ready=True) == left
        resumed.add_update()
    assert resumed.updates_due(ready=True) == 0
    assert not resumed.running


def test_a_restored_schedule_keeps_fractions_of_updates():
    whole, split = TrainRatio(0.3), TrainRatio(0.3)
    expected = [whole.updates_due(step) for step in range(50)]
    found = [split.updates_due(step) for step in range(17)]
    resumed = TrainRatio(0.3)
    resumed.load_state_dict(split.state_dict())
    found += [resumed.updates_due(step) for step in range(17, 50)]
    assert found == expected


def log_steps(clock: Clock, steps: int, stride: int) -> list[int]:
    """Advance a clock by `stride` steps at a time; return the steps with a log."""
    found = []
    for _ in range(0, steps, stride):
        clock.advance(stride)
        if clock.every("log"):
            found.append(clock.step)
    return found


def test_intervals_in_steps_are_multiples():
    config = RunConfig(clock="steps", log_every=10)
    assert log_steps(Clock(config, TrainRatio(0)), 50, 1) == [10, 20, 30, 40, 50]
    assert log_steps(Clock(config, TrainRatio(0)), 48, 4) == [12, 20, 32, 40]


def test_a_restored_clock_equals_an_uninterrupted_one():
    config = RunConfig(clock="steps", log_every=10)
    whole = log_steps(Clock(config, TrainRatio(0)), 64, 4)
    first = Clock(config, TrainRatio(0))
    found = log_steps(first, 28, 4)
    second = Clock(config, TrainRatio(0))
    second.load_state_dict(first.state_dict())
    assert found + log_steps(second, 36, 4) == whole


@pytest.mark.parametrize(("every", "count"), [(0, 0), (-1, 5)])
def test_zero_means_never_and_negative_means_always(every, count):
    for unit in ("steps", "seconds"):
        config = RunConfig(clock=unit, log_every=every)
        assert len(log_steps(Clock(config, TrainRatio(0)), 5, 1)) == count


def test_the_first_interval_in_seconds_must_pass(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("reverie.run.clock.time.monotonic", lambda: now[0])
    clock = Clock(RunConfig(log_every=10), TrainRatio(0))
    assert not clock.every("log")
    now[0] = 110.5
    assert clock.every("log")
    assert not clock.every("log")


def test_frames_include_repeated_actions():
    clock = Clock(RunConfig(), TrainRatio(0), repeat=4)
    clock.advance(16)
    assert (clock.step, clock.frames) == (16, 64)


@pytest.mark.parametrize("bad", [{"envs": 0}, {"steps": 0}, {"train_ratio": -1.0}])
def test_invalid_counts_are_errors(bad):
    with pytest.raises(UserError, match="Fix"):
        RunConfig(**bad)
