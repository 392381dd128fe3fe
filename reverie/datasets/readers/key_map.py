"""Names of groups and arrays in HDF5 and NPZ files, and the meaning of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NO_ARRAY = "none"
"""Value of an optional name that selects no array."""


@dataclass(frozen=True)
class KeyMap:
    """Layout of HDF5 and NPZ files; the defaults are robomimic's."""

    episodes: str = "data"
    """Group whose subgroups are episodes; `.` for the root. A file without such
    subgroups is read as one episode."""
    obs: str = "obs"
    """Group of observations in an episode."""
    next_obs: str = "next_obs"
    """Group of observations after each action, if there is one; `none` ignores the
    default group."""
    keys: tuple[str, ...] = ()
    """Observations as NAME=PATH pairs, such as image=observations/images/top; empty for
    every array in the group `obs`."""
    action: str = "actions"
    """Array of actions."""
    reward: str = "rewards"
    """Array of rewards. Rewards are zero with `none`, or if the default array does not
    exist; another name must exist."""
    terminal: str = "dones"
    """Array of terminal flags. No step is terminal with `none`, or if the default array
    does not exist; another name must exist."""
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

    def optional_names(self) -> dict[str, str]:
        """Return the optional names that are not defaults, by the field.

        Such an array must exist in the dataset. `none` and the empty string select no
        array.
        """
        names = {
            "next_obs": self.next_obs,
            "reward": self.reward,
            "terminal": self.terminal,
        }
        return {
            field: name
            for field, name in names.items()
            if name not in ("", NO_ARRAY, getattr(KeyMap, field))
        }

    def __post_init__(self) -> None:
        if bad := [pair for pair in self.keys if not all(pair.partition("="))]:
            raise ValueError(
                f"keys must be pairs like image=obs/camera, not {bad[0]!r}"
            )
