"""An environment that fails once in one rank of a test."""

from __future__ import annotations

import os
from typing import Any

from gymnasium.envs.classic_control import CartPoleEnv

FAILING_RANK = "1"

failed: list[bool] = []  # not empty after the failure


class FailingEnv(CartPoleEnv):
    def step(self, action: Any) -> Any:
        if os.environ.get("RANK") == FAILING_RANK and not failed:
            failed.append(True)
            raise ValueError("fails on purpose")
        return super().step(action)
