"""Names of groups and arrays in HDF5 and NPZ files, and the meaning of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KeyMap:
    """Layout of HDF5 and NPZ files; the defaults are robomimic's."""

    episodes: str = "data"
    """Group whose subgroups are episodes; `.` for the root. A file without such
    subgroups is read as one episode."""
    obs: str = "obs"
    """Group of observations in an episode."""
    next_obs: str = "next_obs"
    """Group of observations after each action, if there is one."""
    keys: tuple[str, ...] = ()
    """Observations as NAME=PATH pairs, such as image=observations/images/top; empty for
    every array in the group `obs`."""
    action: str = "actions"
    """Array of actions."""
    reward: str = "rewards"
    """Array of rewards; rewards are zero if it does not exist."""
    terminal: str = "dones"
    """Array of terminal flags; no step is terminal if it does not exist."""
    episode_ends: tuple[str, ...] = ()
    """Arrays that mark the last step of each episode, for files in which all episodes
    are concatenated (`terminals timeouts`)."""
    alignment: Literal["after_obs", "before_obs"] = "after_obs"
    """`after_obs`: action t was taken after observation t. `before_obs`: action t led
    to observation t."""
    last_obs: Literal["repeat", "drop"] = "repeat"
    """Without `next_obs`, the observation after the last action is missing: `repeat`
    the last observation, or `drop` the last action, if it has neither a reward nor a
    terminal flag."""
    terminate_on: Literal["dones", "success", "never"] = "dones"
    """Which steps are terminal: `dones` all steps marked in `terminal`, `success` only
    marked steps with a positive reward, `never` none. Use `success` for demonstrations
    whose last step is always marked as done."""

    def __post_init__(self) -> None:
        if bad := [pair for pair in self.keys if not all(pair.partition("="))]:
            raise ValueError(
                f"keys must be pairs like image=obs/camera, not {bad[0]!r}"
            )
