"""Acting on another device than training (`run.policy_devices`).

An update on a GPU runs in the background, so that the policy can act at the same time.
For this, the policy uses the weights before the running update: they are copied to host
memory between two updates (`before_update`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from reverie.agents.remote import CanActRemotely
from reverie.api import Agent, Carry, Mode, Obs, PolicyOutput, StateDict, UserError
from reverie.nets.tree import tree_map
from reverie.run.config import Config
from reverie.run.device import pick_policy_device, pick_precision
from reverie.run.factory import make_agent
from reverie.spaces import Spaces


class PolicyCopy:
    """Acts like `agent`, with a copy of its policy on another device.

    Without `overlap`, each action waits for a running update and uses the weights after
    it. With `overlap`, an action does not wait: it uses the weights from before the
    first update since the previous action, or, without such an update, the weights of
    the previous action. The first action always uses the current weights. `updates`
    returns the number of updates so far.
    """

    def __init__(
        self,
        agent: Agent,
        copy: Any,
        updates: Callable[[], int],
        overlap: bool = False,
    ):
        assert isinstance(agent, CanActRemotely)
        self.agent, self.copy, self.overlap = agent, copy, overlap
        # `_copied_at` is the number of updates when weights were last copied directly
        # from the agent; -1 if they have to be copied before the next action.
        self._updates, self._copied_at = updates, -1
        self._stored: StateDict | None = None  # weights in host memory
        self._has_new_weights = False  # stored, but not loaded by the copy yet
        self._stored_event: Any = None  # CUDA event: the stored weights are complete

    @property
    def extras(self) -> Spaces:
        return self.agent.extras

    def initial(self, batch: int) -> Carry:
        return self.copy.initial(batch)

    def policy(self, carry: Carry, obs: Obs, mode: Mode = "train") -> PolicyOutput:
        self._load_weights()
        if self.agent.schedule is not None:
            self.copy.schedule.load_state_dict(self.agent.schedule.state_dict())
        output: PolicyOutput = self.copy.policy(carry, obs, mode)
        return output

    def before_update(self) -> None:
        """Store the weights for the actions chosen while the update runs."""
        # Nothing is stored in three cases:
        # - without `overlap`, because an action copies the weights of the agent,
        # - if the copy has not acted since the weights were stored, which it will use,
        # - before its first action, which copies the weights of the agent.
        if not self.overlap or self._has_new_weights or self._copied_at < 0:
            return
        assert isinstance(self.agent, CanActRemotely)
        weights = self.agent.policy_weights()
        if self._stored is None:
            self._stored = tree_map(_host_memory, weights)
        tree_map(lambda to, x: to.copy_(x, non_blocking=True), self._stored, weights)
        if torch.cuda.is_available():
            self._stored_event = torch.cuda.current_stream().record_event()
        self._has_new_weights = True

    def _load_weights(self) -> None:
        """Load the weights for the next action (see the class) into the copy."""
        if self.overlap and self._copied_at >= 0:
            if self._has_new_weights:
                if self._stored_event is not None:
                    self._stored_event.synchronize()
                self.copy.load_policy_weights(self._stored)
                self._has_new_weights = False
        elif self._copied_at != (updates := self._updates()):
            assert isinstance(self.agent, CanActRemotely)
            self.copy.load_policy_weights(self.agent.policy_weights())
            self._copied_at = updates

    def state_dict(self) -> StateDict:
        """Return the state of the random generator; weights are those of the agent."""
        state: StateDict = self.copy.policy_rng().state_dict()
        return state

    def load_state_dict(self, state: StateDict) -> None:
        self.copy.policy_rng().load_state_dict(state)
        self._copied_at, self._has_new_weights = -1, False


def _host_memory(x: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor in host memory, like `x`.

    It is pinned if `x` is on a GPU, so that copies to it run asynchronously.
    """
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)


def make_policy_copy(
    config: Config,
    agent: Agent,
    spaces: Any,
    updates: Callable[[], int],
    overlap: bool,
) -> PolicyCopy | None:
    """Build the copy that acts; None if the agent itself acts.

    With `overlap`, it does not wait for the running update.
    """
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
    copy = make_agent(config, spaces, device, precision)
    return PolicyCopy(agent, copy, updates, overlap)
