"""Acting on another device than training (`run.policy_devices`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from reverie.agents.remote import CanActRemotely
from reverie.api import Agent, Carry, Mode, Obs, PolicyOutput, StateDict, UserError
from reverie.run.config import Config
from reverie.run.device import pick_policy_device, pick_precision
from reverie.run.factory import make_agent
from reverie.spaces import Spaces


class PolicyCopy:
    """Acts like `agent`, with a copy of its policy on another device.

    The weights are copied before the first action after an update. `updates` returns
    the number of updates so far.
    """

    def __init__(self, agent: Agent, copy: Any, updates: Callable[[], int]):
        assert isinstance(agent, CanActRemotely)
        self.agent, self.copy = agent, copy
        self._updates, self._copied = updates, -1  # updates at the last copy

    @property
    def extras(self) -> Spaces:
        return self.agent.extras

    def initial(self, batch: int) -> Carry:
        return self.copy.initial(batch)

    def policy(self, carry: Carry, obs: Obs, mode: Mode = "train") -> PolicyOutput:
        if self._copied != (updates := self._updates()):
            self.copy.load_policy_weights(self.agent.policy_weights())
            self._copied = updates
        if self.agent.schedule is not None:
            self.copy.schedule.load_state_dict(self.agent.schedule.state_dict())
        output: PolicyOutput = self.copy.policy(carry, obs, mode)
        return output

    def state_dict(self) -> StateDict:
        """Return the state of the random generator; weights are those of the agent."""
        state: StateDict = self.copy.policy_rng().state_dict()
        return state

    def load_state_dict(self, state: StateDict) -> None:
        self.copy.policy_rng().load_state_dict(state)
        self._copied = -1


def make_policy_copy(
    config: Config, agent: Agent, spaces: Any, updates: Callable[[], int]
) -> PolicyCopy | None:
    """Build the copy that acts; None if the agent itself acts."""
    device = pick_policy_device(config.run.policy_devices)
    if device is None:
        return None
    if not isinstance(agent, CanActRemotely):
        raise UserError(
            f"The agent {config.agent!r} cannot act on another device: it does not "
            "have all methods of `reverie.agents.remote.CanActRemotely`.\n"
            "  Fix: remove --run.policy_devices (see reverie/agents/remote.py)"
        )
    if config.compile == "graph" and device.type != "cuda":
        config = replace(config, compile="auto")
    precision = pick_precision(config.precision, device)
    return PolicyCopy(agent, make_agent(config, spaces, device, precision), updates)
