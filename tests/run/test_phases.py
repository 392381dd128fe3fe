"""The clock of agents that alternate between collecting and training."""

from __future__ import annotations

from reverie.agents.iris.config import ComponentTrainingConfig, EpochScheduleConfig
from reverie.agents.iris.schedule import EpochSchedule
from reverie.run.clock import Clock, RunConfig, TrainRatio


def make(steps=1000, **every) -> Clock:
    config = EpochScheduleConfig(epochs=4, collect_epochs=3, first_steps=20, steps=5)
    schedule = EpochSchedule(config, {"a": ComponentTrainingConfig(steps=12)})
    return Clock(RunConfig(steps=steps, clock="phases", **every), schedule)


def turn(clock: Clock) -> int:
    if clock.should_collect:
        clock.schedule.add_env_steps(1)
        clock.advance(1)
    due = clock.updates_due(ready=True)
    for _ in range(due):
        clock.add_update()
    return due


def test_the_clock_runs_until_the_last_epoch_is_trained():
    clock = make()
    updates = 0
    while clock.running:
        updates += turn(clock)
    assert (clock.step, updates) == (30, 4 * 12)


def test_updates_of_the_last_steps_are_run():
    clock = make(steps=20)
    updates = 0
    while clock.running:
        updates += turn(clock)
    assert (clock.step, updates) == (20, 12)


def test_intervals_in_phases():
    clock = make(log_every=1, save_every=2, report_every=0)
    logged, saved = [], []
    while clock.running:
        turn(clock)
        if clock.every("log"):
            logged.append(clock.schedule.epoch)
        if clock.every("save"):
            saved.append(clock.schedule.epoch)
        assert not clock.every("report")
    assert len(logged) == 4
    assert len(saved) == 2


def test_an_epoch_is_saved_when_collected_and_evaluated_when_trained():
    clock = make(save_every=1, eval_every=1, log_every=2)
    seen = {"save": [], "eval": [], "log": []}
    updates = 0
    while clock.running:
        updates += turn(clock)
        for name, times in seen.items():
            if clock.every(name):
                times.append(updates)
    assert seen["eval"] == [12, 24, 36, 48]
    assert seen["log"] == [24, 48]
    first = min(10, 12)  # updates of the first iteration
    # the last epoch collects nothing, so it is saved where the previous one ended
    assert seen["save"] == [first, 12 + first, 24 + first, 36]


def test_a_resumed_clock_in_phases():
    clock = make(save_every=2)
    while clock.schedule.phase < 2:
        turn(clock)
    assert clock.every("save")
    again = make(save_every=2)
    again.load_state_dict(clock.state_dict())
    assert not again.every("save")
    assert again.schedule.phase == 2
    assert not again.should_collect


def test_a_constant_train_ratio_always_collects():
    clock = Clock(RunConfig(steps=3), TrainRatio(1.0))
    assert clock.should_collect
    assert clock.running
    clock.advance(3)
    assert not clock.running
