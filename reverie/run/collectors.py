"""Collectors act in vectorized environments and return rows for the replay.

`InProcessCollector` steps the environments while the caller waits. With
`OverlappedCollector` the environments step in worker processes while the agent trains.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch.utils import _pytree as pytree

from reverie.agents.explore import ExploreConfig
from reverie.api import (
    Action,
    Agent,
    Carry,
    Metrics,
    Mode,
    Obs,
    PolicyOutput,
    StateDict,
    VecEnv,
)
from reverie.log.episode_stats import EpisodeStats
from reverie.log.timer import Rates, Timer
from reverie.rows import Rows
from reverie.spaces import Spaces


class CanAct(Protocol):
    """The part of `api.Agent` that a collector uses."""

    @property
    def extras(self) -> Spaces: ...
    def initial(self, batch: int) -> Carry: ...
    def policy(self, carry: Carry, obs: Obs, mode: Mode = "train") -> PolicyOutput: ...


class InProcessCollector:
    """Chooses actions and steps the environments.

    `collect` chooses the actions. The step with these actions runs in `wait`, which the
    next `collect` calls, and the caller is blocked until the step ends.

    For the first `prefill` steps, and while the exploration policy is `random`, the
    actions come from `random_agent`. Other exploration policies are those of the agent.
    """

    def __init__(
        self,
        envs: VecEnv,
        agent: CanAct,
        random_agent: Agent,
        prefill: int,
        explore: ExploreConfig,
        timer: Timer,
        rates: Rates,
    ):
        self.envs, self.agent = envs, agent
        self.random_agent, self.prefill = random_agent, prefill
        self.explore = explore
        self.timer, self.rates = timer, rates
        self.episodes = EpisodeStats(len(envs))
        self.steps = 0
        """Agent steps so far, for prefill and exploration."""
        self._obs: Obs = {}
        self._carry: Any = None
        self._action: Action | None = None  # of the step that `wait` will finish

    def reset(self) -> None:
        """Start an episode in every environment."""
        self._obs, self._carry = self.envs.reset(), self.agent.initial(len(self.envs))

    def collect(self) -> Rows:
        """Choose actions for the newest observations; return both as rows."""
        self.wait()
        obs = self._obs
        action, extras = self._act(agent_obs(obs))
        self._action = action = zero_last_actions(action, obs)
        waiting = self.envs.waiting  # before the step that starts now
        self._start_step(action)
        rows = self._rows(obs, {**obs, **action, **extras}, waiting)
        self.steps += len(rows)
        return rows

    def wait(self) -> None:
        """Finish the environment step with the last actions, if it has not finished."""
        if self._action is not None:
            action, self._action = self._action, None
            with self.timer("env"):
                self._obs = self._finish_step(action)

    def summary(self) -> Metrics:
        """Return statistics of the episodes that ended since the last call."""
        return self.episodes.summary()

    def metrics(self) -> Metrics:
        return self.envs.metrics()

    def state_dict(self) -> StateDict:
        self.wait()
        leaves = pytree.tree_leaves(self._carry)
        return {
            "envs": self.envs.state_dict(),
            "carry": [leaf.detach() for leaf in leaves],
            "random_agent": self.random_agent.state_dict(),
            "episodes": self.episodes.state_dict(),
            "steps": self.steps,
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._obs = self.envs.load_state_dict(state["envs"])
        self.random_agent.load_state_dict(state["random_agent"])
        self.episodes.load_state_dict(state["episodes"])
        self.steps = int(state["steps"])
        self._carry = self.agent.initial(len(self.envs))
        leaves, tree = pytree.tree_flatten(self._carry)
        saved = state["carry"]
        # With another number of environments, episodes start with an initial carry.
        if [x.shape for x in saved] == [x.shape for x in leaves]:
            pairs = zip(saved, leaves, strict=True)
            moved = [x.to(like.device, like.dtype) for x, like in pairs]
            self._carry = pytree.tree_unflatten(moved, tree)

    def _start_step(self, action: Action) -> None:
        """Start the environment step. Here, no effect: `wait` does the whole step."""

    def _finish_step(self, action: Action) -> Obs:
        """Return the observations after the step."""
        return self.envs.step(action)

    def _act(self, obs: Obs) -> tuple[Action, dict[str, Any]]:
        """Return actions, and the extras that the replay stores for the agent."""
        count, explores = len(self.envs), self.explore.is_active(self.steps)
        is_random = explores and self.explore.policy == "random"
        mode: Mode = "explore" if explores else "train"
        with self.timer("policy"):
            if is_random or self.steps < self.prefill:
                _, action, _ = self.random_agent.policy((), obs, mode="train")
                extras = {k: s.zeros(count) for k, s in self.agent.extras.items()}
            else:
                self._carry, action, extras = self.agent.policy(
                    self._carry, obs, mode=mode
                )
        self.rates.add("policy", count)
        return action, extras

    def _rows(self, obs: Obs, values: dict[str, Any], waiting: np.ndarray) -> Rows:
        """Return the rows of all environments that are not `waiting`.

        With `env.vector.lockstep`, an environment whose episode has ended waits until
        the episodes of all others have ended. Its rows meanwhile are not stored.
        """
        if not waiting.any():
            return Rows(values, metrics=self.episodes.add(obs))
        streams = np.flatnonzero(~waiting)
        masked = {
            "reward": obs["reward"] * ~waiting,
            "is_last": obs["is_last"] & ~waiting,
        }
        return Rows(
            {key: value[streams] for key, value in values.items()},
            streams,
            self.episodes.add({**obs, **masked}),
        )


class OverlappedCollector(InProcessCollector):
    """Starts the environment step and returns, so that training can run meanwhile."""

    def _start_step(self, action: Action) -> None:
        self.envs.send(action)

    def _finish_step(self, action: Action) -> Obs:
        return self.envs.recv()


def agent_obs(obs: Obs) -> Obs:
    """Return the observations without the keys that are only logged."""
    return {key: value for key, value in obs.items() if not key.startswith("log/")}


def zero_last_actions(action: Action, obs: Obs) -> Action:
    """Return the actions with zeros in the last row of an episode."""
    last = obs["is_last"]
    if not last.any():
        return action
    return {
        key: value * (~last).astype(value.dtype).reshape(-1, *[1] * (value.ndim - 1))
        for key, value in action.items()
    }
