"""The clock of agents that alternate between collecting and training."""

from __future__ import annotations

import pytest

from reverie.agents.iris.config import ComponentTrainingConfig, EpochScheduleConfig
from reverie.agents.iris.schedule import EpochSchedule
from reverie.run.clock import Clock, RunConfig, TrainRatio


def make(steps=1000, **every) -> Clock:
    config = EpochScheduleConfig(epochs=4, collect_epochs=3, first_steps=20, steps=5)
    schedule = EpochSchedule(config, {"a": ComponentTrainingConfig(steps=12)})
    return Clock(RunConfig(steps=steps, **{"clock": "epochs", **every}), schedule)


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


def test_intervals_in_epochs():
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


def test_an_epoch_is_evaluated_and_saved_when_it_is_trained():
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
    assert seen["save"] == [12, 24, 36, 48]


@pytest.mark.parametrize(
    ("every", "saved"),
    [
        ({"clock": "epochs", "save_every": 0}, [2, 4]),
        ({"clock": "epochs", "save_every": 3}, [2, 3, 4]),
        ({"clock": "epochs", "save_every": 1}, [1, 2, 3, 4]),
        ({"clock": "seconds", "save_every": 1e9}, [2, 4]),
    ],
)
def test_epochs_to_keep_are_saved_when_they_end(every, saved):
    clock = make(keep_epochs=2, **every)
    found = []
    while clock.running:
        turn(clock)
        if clock.every("save"):
            found.append(clock.completed_epochs)
    assert found == saved


def test_an_epoch_that_was_kept_is_not_saved_again_after_resuming():
    clock = make(keep_epochs=2, save_every=0)
    while not clock.every("save"):
        turn(clock)
    again = make(keep_epochs=2, save_every=0)
    again.load_state_dict(clock.state_dict())
    assert not again.every("save")
    while again.completed_epochs < 4:
        assert not again.every("save")
        turn(again)
    assert again.every("save")


def test_steps_end_a_run_that_is_too_short_for_its_epochs():
    assert make(steps=30).ends_after_epochs
    assert not make(steps=29).ends_after_epochs
    assert not Clock(RunConfig(steps=3), TrainRatio(1.0)).ends_after_epochs


def test_the_last_epoch_is_that_of_the_last_action_or_update():
    clock = make()
    assert (clock.epoch_schedule.last_epoch, clock.completed_epochs) == (0, 0)
    seen = []
    while clock.running:
        turn(clock)
        seen.append((clock.epoch_schedule.last_epoch, clock.completed_epochs))
    assert list(dict.fromkeys(seen)) == [
        (1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 3), (4, 4),
    ]  # fmt: skip


def test_a_resumed_clock_in_epochs():
    clock = make(save_every=2)
    while clock.completed_epochs < 2:
        turn(clock)
    assert clock.every("save")
    again = make(save_every=2)
    again.load_state_dict(clock.state_dict())
    assert not again.every("save")
    assert again.completed_epochs == 2
    assert again.should_collect


def test_a_constant_train_ratio_always_collects():
    clock = Clock(RunConfig(steps=3), TrainRatio(1.0))
    assert clock.should_collect
    assert clock.running
    clock.advance(3)
    assert not clock.running
