"""The epochs of Δ-IRIS: when it collects data, and which component it trains."""

from __future__ import annotations

import pytest

from reverie.agents.iris.config import (
    COMPONENTS,
    ComponentTrainingConfig,
    EpochScheduleConfig,
)
from reverie.agents.iris.schedule import MAX_UPDATES_DUE, EpochSchedule
from reverie.api import Schedule, UserError
from reverie.run.config import resolve


def in_epochs(steps, first_steps, start_after) -> ComponentTrainingConfig:
    return ComponentTrainingConfig(
        steps=steps, first_steps=first_steps, start_after=start_after
    )


def make(updates=None, **settings) -> EpochSchedule:
    defaults = {"epochs": 4, "collect_epochs": 3, "first_steps": 20, "steps": 5}
    return EpochSchedule(
        EpochScheduleConfig(**{**defaults, **settings}),
        updates or {"a": in_epochs(2, 6, 0), "b": in_epochs(3, 0, 1)},
    )


def run(schedule: EpochSchedule, envs: int = 1) -> list:
    """Return a history of environment step counts and names of updated components."""
    history, steps = [], 0
    while not schedule.finished:
        if schedule.should_collect:
            schedule.add_env_steps(envs)
            steps += envs
        for _ in range(schedule.updates_due(steps)):
            if steps:
                history.append(steps)
                steps = 0
            history.append(schedule.component)
            schedule.add_update()
    return history


def test_it_meets_the_protocol():
    assert isinstance(make(), Schedule)


def test_an_epoch_collects_and_then_trains_each_component():
    assert run(make()) == [
        *(20, *"aaaaaa"),  # b starts after the first epoch
        *(5, *"aabbb"),
        *(5, *"aabbb"),
        *"aabbb",  # the last epoch only trains
    ]


def test_excess_steps_count_for_the_next_epoch():
    history = run(make(first_steps=20), envs=8)
    steps = [n for n in history if isinstance(n, int)]
    assert steps == [24, 8]  # 20, 25 and 30 are reached after 24, 32 and 32 steps
    assert history.count("a") == 6 + 2 + 2 + 2


def test_the_first_epoch_is_random_if_it_has_its_own_number_of_steps():
    schedule = make()
    assert schedule.uses_random_actions
    schedule.add_env_steps(20)
    while not schedule.should_collect:
        schedule.add_update()
    assert schedule.epoch == 2
    assert not schedule.uses_random_actions
    assert not make(first_steps=0).uses_random_actions


def test_epochs_without_updates():
    """As for Atari: five epochs only collect."""
    schedule = make({"a": in_epochs(2, 9, 5)}, epochs=7, collect_epochs=7)
    assert run(schedule) == [20 + 5 * 5, "a", "a", 5, "a", "a"]
    assert schedule.collected_epochs == 7


def test_few_updates_are_due_at_a_time_and_none_of_the_next_epoch():
    schedule = make(
        {"a": in_epochs(MAX_UPDATES_DUE + 2, 0, 0), "b": in_epochs(3, 0, 0)}
    )
    schedule.add_env_steps(20)
    assert not schedule.should_collect
    for due in (MAX_UPDATES_DUE, 2 + 3):
        assert schedule.updates_due(20) == due
        for _ in range(due):
            schedule.add_update()
    assert schedule.should_collect
    assert schedule.updates_due(20) == 0


def test_nothing_is_due_while_collecting():
    schedule = make()
    assert schedule.updates_due(0) == 0
    assert schedule.component is None
    schedule.add_env_steps(19)
    assert schedule.should_collect
    schedule.add_env_steps(1)
    assert not schedule.should_collect
    assert schedule.collected_epochs == 1


@pytest.mark.parametrize("at", [0, 3, 7, 20, 26, 33])
def test_a_restored_schedule_continues_identically(at):
    def step(schedule):
        if schedule.should_collect:
            schedule.add_env_steps(1)
            return None
        name = schedule.component
        schedule.add_update()
        return name

    full, interrupted = make(), make()
    expected = [step(full) for _ in range(45)]
    history = [step(interrupted) for _ in range(at)]
    resumed = make()
    resumed.load_state_dict(interrupted.state_dict())
    assert resumed.collected_epochs == interrupted.collected_epochs
    assert resumed.updates_left == interrupted.updates_left
    history += [step(resumed) for _ in range(at, 45)]
    assert history == expected


def test_added_epochs_do_not_collect_for_epochs_that_only_trained():
    old = make({"a": in_epochs(1, 0, 0)}, epochs=9, collect_epochs=2)
    assert [n for n in run(old) if isinstance(n, int)] == [20, 5]
    new = make({"a": in_epochs(1, 0, 0)}, epochs=12, collect_epochs=12)
    new.load_state_dict(old.state_dict())
    assert run(new) == [5, "a", 5, "a", 5, "a"]


@pytest.mark.parametrize(
    ("preset", "steps", "updates"),
    [
        ("iris_crafter", 100_000 + 990 * 10_000, [5000 + 999 * 500, 2500 + 999 * 500]),
        ("iris_atari", 2000 + 490 * 200, [595 * 200, 550 * 120]),
        ("iris_crafter_short", 101_680, [4800, 9000, 3550]),
        ("iris_atari_short", 100_000, [13_080, 8000, 11_400]),
    ],
)
def test_presets_have_the_totals_of_the_original_or_of_the_docs(preset, steps, updates):
    config = resolve([preset]).iris
    planned = {name: getattr(config.training, name) for name in COMPONENTS}
    schedule = EpochSchedule(config.schedule, planned)
    assert schedule.config.first_steps == steps - schedule.config.steps * (
        config.schedule.collect_epochs - 1
    )
    epochs = range(1, config.schedule.epochs + 1)
    for name, total in zip(COMPONENTS, updates, strict=False):
        assert sum(planned[name].updates_in(epoch) for epoch in epochs) == total


def test_a_schedule_without_steps_is_an_error():
    EpochScheduleConfig(epochs=1, collect_epochs=1, first_steps=0, steps=1)
    with pytest.raises(
        UserError, match=r"at least 1, not 0\.\n  Fix: --iris.schedule.steps"
    ):
        EpochScheduleConfig(steps=0)
