"""When Δ-IRIS should_collect, and which part it trains when."""

from __future__ import annotations

import pytest

from reverie.agents.iris.schedule import TURN, Epochs, EpochsConfig, Share
from reverie.api import Schedule, UserError
from reverie.run.config import resolve


def make(shares=None, **settings) -> Epochs:
    usual = {"epochs": 4, "collect_epochs": 3, "first_steps": 20, "steps": 5}
    return Epochs(
        EpochsConfig(**{**usual, **settings}),
        shares or {"a": Share(2, 6, 0), "b": Share(3, 0, 1)},
    )


def run(schedule: Epochs, envs: int = 1) -> list:
    """What happens, turn by turn: numbers of steps taken, names of parts trained."""
    history, taken = [], 0
    while not schedule.finished:
        if schedule.should_collect:
            schedule.add_env_steps(envs)
            taken += envs
        for _ in range(schedule.updates_due(taken)):
            if taken:
                history.append(taken)
                taken = 0
            history.append(schedule.part)
            schedule.add_update()
    return history


def test_it_is_a_rhythm():
    assert isinstance(make(), Schedule)


def test_an_epoch_collects_and_then_trains_each_part_in_turn():
    assert run(make()) == [
        *(20, *"aaaaaa"),  # b begins after the first epoch
        *(5, *"aabbb"),
        *(5, *"aabbb"),
        *"aabbb",  # the last epoch only trains
    ]


def test_what_is_collected_too_much_counts_for_the_next_epoch():
    history = run(make(first_steps=20), envs=8)
    taken = [n for n in history if isinstance(n, int)]
    assert taken == [24, 8]  # 20, 25 and 30 are reached after 24, 32 and 32 steps
    assert history.count("a") == 6 + 2 + 2 + 2


def test_the_first_epoch_is_random_only_if_it_has_steps_of_its_own():
    schedule = make()
    assert schedule.is_random
    schedule.add_env_steps(20)
    while not schedule.should_collect:
        schedule.add_update()
    assert schedule.epoch == 2
    assert not schedule.is_random
    assert not make(first_steps=0).is_random


def test_epochs_without_training_pass_by():
    """As in Atari: five epochs of collecting before anything is trained."""
    schedule = make({"a": Share(2, 9, 5)}, epochs=7, collect_epochs=7)
    assert run(schedule) == [20 + 5 * 5, "a", "a", 5, "a", "a"]
    assert schedule.phase == 7


def test_a_turn_is_short_and_ends_with_its_epoch():
    schedule = make({"a": Share(TURN + 2, 0, 0), "b": Share(3, 0, 0)})
    schedule.add_env_steps(20)
    assert not schedule.should_collect
    for due in (TURN, 2 + 3):
        assert schedule.updates_due(20) == due
        for _ in range(due):
            schedule.add_update()
    assert schedule.should_collect
    assert schedule.updates_due(20) == 0


def test_nothing_is_due_while_collecting():
    schedule = make()
    assert schedule.updates_due(0) == 0
    assert schedule.part is None
    schedule.add_env_steps(19)
    assert schedule.should_collect
    schedule.add_env_steps(1)
    assert not schedule.should_collect
    assert schedule.phase == 1


@pytest.mark.parametrize("at", [0, 3, 7, 20, 26, 33])
def test_it_resumes_where_it_was_even_within_a_part(at):
    def turn(schedule):
        if schedule.should_collect:
            schedule.add_env_steps(1)
            return None
        name = schedule.part
        schedule.add_update()
        return name

    whole, split = make(), make()
    expected = [turn(whole) for _ in range(45)]
    found = [turn(split) for _ in range(at)]
    resumed = make()
    resumed.load_state_dict(split.state_dict())
    assert (resumed.phase, resumed.left) == (split.phase, split.left)
    found += [turn(resumed) for _ in range(at, 45)]
    assert found == expected


def test_more_epochs_owe_nothing_for_those_that_only_trained():
    old = make({"a": Share(1, 0, 0)}, epochs=9, collect_epochs=2)
    assert [n for n in run(old) if isinstance(n, int)] == [20, 5]
    new = make({"a": Share(1, 0, 0)}, epochs=12, collect_epochs=12)
    new.load_state_dict(old.state_dict())
    assert run(new) == [5, "a", 5, "a", 5, "a"]


def test_a_checkpoint_without_a_goal_goes_on_as_it_did():
    def turns(schedule, count):
        for _ in range(count):
            if schedule.should_collect:
                schedule.add_env_steps(1)
            elif not schedule.finished:
                schedule.add_update()

    whole, old = make(), make()
    turns(old, 33)
    state = old.state_dict()
    resumed = make()
    resumed.load_state_dict({k: state[k] for k in state.keys() - {"goal", "counted"}})
    turns(whole, 45)
    turns(resumed, 45 - 33)
    assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("block", "steps", "updates"),
    [
        ("iris_crafter", 100_000 + 990 * 10_000, [5000 + 999 * 500, 2500 + 999 * 500]),
        ("iris_atari", 2000 + 490 * 200, [595 * 200, 550 * 120]),
    ],
)
def test_the_presets_add_up_to_the_original_s_totals(block, steps, updates):
    config = resolve([block]).iris
    parts = ("tokenizer", "world_model", "actor_critic")
    shares = {name: getattr(config.learn, name).share for name in parts}
    schedule = Epochs(config.schedule, shares)
    assert schedule.config.first_steps == steps - schedule.config.steps * (
        config.schedule.collect_epochs - 1
    )
    every = range(1, config.schedule.epochs + 1)
    for name, total in zip(parts, updates, strict=False):
        assert sum(shares[name].in_epoch(epoch) for epoch in every) == total


def test_an_empty_schedule_is_refused():
    EpochsConfig(epochs=1, collect_epochs=1, first_steps=0, steps=1)
    with pytest.raises(UserError, match=r"at least 1\.\n  Fix: --iris.schedule.steps"):
        EpochsConfig(steps=0)
