"""Protocols for agents that act in other processes (`reverie/run/actors/`)."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from reverie.api import StateDict
from reverie.capabilities import Stateful


@runtime_checkable
class CanActRemotely(Protocol):
    """An agent whose policy can act in other processes, with copies of its weights."""

    def policy_weights(self) -> StateDict:
        """Return the weights and running statistics that `policy` uses."""

    def load_policy_weights(self, state: StateDict) -> None:
        """Load the weights that `policy_weights` of another process returned."""

    def policy_rng(self) -> Stateful:
        """Return the random generator that `policy` uses while data is collected."""


@runtime_checkable
class LimitsEnvSteps(Protocol):
    """A schedule that limits the steps to collect before the next update.

    An agent with its own schedule needs it to act remotely, because remote actors
    collect steps ahead of the training loop.
    """

    @property
    def env_steps_left(self) -> float: ...  # infinite if there is no limit
