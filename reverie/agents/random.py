"""Agent with uniformly random actions: a baseline, and the smallest agent."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reverie.agents.options import BuildOptions
from reverie.api import Carry, Feed, Metrics, Mode, Obs, PolicyOutput, StateDict
from reverie.capabilities import AgentConfig, Stateful, UnusedSetting
from reverie.rows import Window
from reverie.spaces import Spaces


@dataclass(frozen=True)
class RandomConfig(AgentConfig):
    """The random agent has no settings."""

    explore_policies: ClassVar[tuple[str, ...]] = ()

    @property
    def unused(self) -> tuple[UnusedSetting, ...]:
        names = ("run.train_ratio", "run.prefill", "run.from_checkpoint")
        reason = "the random agent is not trained"
        return tuple(UnusedSetting(name, reason) for name in names)

    def is_policy_trained(self, state: StateDict, updates: int) -> bool:
        return True  # there is nothing to train


class NeverTrain:
    """Schedule of an agent that is never trained."""

    should_collect = True
    finished = False
    env_steps_left = math.inf  # of the protocol `LimitsEnvSteps`

    def updates_due(self, step: int) -> int:
        return 0

    def add_env_steps(self, steps: int) -> None:
        pass

    def add_update(self) -> None:
        pass

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        pass


class RandomAgent:
    """Samples actions uniformly; from N(0, 1) where the action space is unbounded."""

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        config: RandomConfig,
        options: BuildOptions,
    ):
        self.act_space = act_space
        self.windows = {"report": Window(1, 1, online=False)}
        self.extras: Spaces = {}
        self.schedule = NeverTrain()
        self.rng = np.random.Generator(np.random.PCG64(options.seed))

    def initial(self, batch: int) -> Carry:
        return ()

    def policy(self, carry: Carry, obs: Obs, mode: Mode = "train") -> PolicyOutput:
        batch = len(obs["is_first"])
        action = {k: s.sample(self.rng, batch) for k, s in self.act_space.items()}
        return carry, action, {}

    def train(self, feed: Feed) -> Metrics:
        return {}

    def report(self, feed: Feed) -> Metrics:
        return {}

    def nonfinite(self) -> list[str]:
        return []

    def load_weights(self, state: StateDict, components: str = ".*") -> list[str]:
        return []

    def policy_weights(self) -> StateDict:
        return {}

    def load_policy_weights(self, state: StateDict) -> None:
        pass

    def policy_rng(self) -> Stateful:
        return self  # the state of this agent is that of its generator

    def state_dict(self) -> StateDict:
        # as text, because checkpoints cannot store its 128-bit integers
        return {"rng": json.dumps(self.rng.bit_generator.state)}

    def load_state_dict(self, state: StateDict) -> None:
        self.rng.bit_generator.state = json.loads(state["rng"])
