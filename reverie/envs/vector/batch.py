"""Rows of several environments as one batch of arrays, and what pools do with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from reverie.api import Metrics, Obs, StateDict, UserError
from reverie.spaces import Spaces

Rows = Mapping[str, np.ndarray]


def common_spaces(spaces: list[tuple[Spaces, Spaces]]) -> tuple[Spaces, Spaces]:
    """The spaces all environments of a pool share."""
    first = spaces[0]
    for index, other in enumerate(spaces):
        if other != first:
            raise UserError(
                f"Environment {index} has other spaces than environment 0.\n"
                "  Fix: let every environment of a run show and take the same."
            )
    return first


def write_row(rows: Rows, index: int, obs: Obs) -> None:
    for key, array in rows.items():
        array[index] = obs[key]


def row_of(rows: Rows, index: int) -> Obs:
    return {key: array[index] for key, array in rows.items()}


def truncated_row(rows: Rows, index: int) -> Obs:
    """The row that closes a broken episode: the last one again, as its end."""
    end: dict[str, Any] = {"reward": 0.0, "is_first": False, "is_last": True}
    return {**row_of(rows, index), **end, "is_terminal": False}


def waits(is_last: np.ndarray, lockstep: bool) -> np.ndarray:
    """Which environments wait for others to end their episode."""
    holds = lockstep and not is_last.all()
    return np.array(is_last, bool) if holds else np.zeros(len(is_last), bool)


def vec_env_state(
    slots: list[StateDict],
    obs: Obs,
    spaces: Spaces,
    waiting: np.ndarray | None = None,
) -> StateDict:
    # The observations as a list, as their names may contain any character.
    rows = [obs[key].copy() for key in sorted(spaces)]
    state: StateDict = {"envs": slots, "obs": rows}
    if waiting is not None and waiting.any():
        state["waiting"] = waiting.copy()
    return state


def saved_waiting(state: StateDict, obs: Obs) -> np.ndarray:
    """Which environments waited; one that had to begin anew does not."""
    waiting = np.asarray(state.get("waiting", np.zeros(len(obs["is_last"]), bool)))
    return np.asarray(waiting & obs["is_last"])


def saved_rows(state: StateDict, spaces: Spaces, count: int) -> Obs:
    if len(state["envs"]) != count:
        raise UserError(
            f"The checkpoint holds {len(state['envs'])} environments, this run has "
            f"{count}.\n  Fix: set --run.envs {len(state['envs'])}."
        )
    return dict(zip(sorted(spaces), map(np.asarray, state["obs"]), strict=True))


def restart_metrics(events: Counter[str]) -> Metrics:
    """Restarts so far, in all and by cause."""
    causes = ("errors", "crashes", "timeouts")
    metrics = {f"env/{cause}": events[cause] for cause in causes}
    return {"env/restarts": sum(metrics.values()), **metrics}
