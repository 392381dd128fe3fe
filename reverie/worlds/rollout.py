"""Imagined rollouts: the loop over policy and prior that all world models use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from reverie.api import Policy, Rollout, State

NestedTuple = TypeVar("NestedTuple", bound=tuple[Any, ...])


def rollout(
    state: State,
    policy: Policy,
    horizon: int,
    step: Callable[[State, dict[str, Tensor]], State],
) -> Rollout:
    """Alternate `policy` and `step` for `horizon` steps, starting with `state`.

    `step` maps a state and the actions chosen in it to the next state.
    """
    states, actions = [state], [policy(state)]
    for _ in range(horizon):
        states.append(step(states[-1], actions[-1]))
        actions.append(policy(states[-1]))
    return Rollout(stack_time(states), stack_actions(actions))


def stack_time(steps: Sequence[NestedTuple]) -> NestedTuple:
    """Stack (nested) NamedTuples of tensors `(B, ...)` to one of `(B, T, ...)`."""
    fields = (
        stack_time(field) if isinstance(field[0], tuple) else torch.stack(field, 1)
        for field in zip(*steps, strict=True)
    )
    return type(steps[0])(*fields)


def stack_actions(actions: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack action dicts with tensors `(B, ...)` to one with `(B, T, ...)`."""
    return {key: torch.stack([act[key] for act in actions], 1) for key in actions[0]}
