"""Finds the command that started a run, in the entries of its `about.json`.

A module of its own, because `reverie report` does not import PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def find_first_command(starts: Sequence[Any]) -> Any:
    """Return the command that started a run, given the entries of `about.json`.

    The last entry has it as `first_command`, because older entries may have been
    removed or belong to other settings. In files without it, it is the command of the
    first entry. None if there is no command.
    """
    entries = [entry for entry in starts if isinstance(entry, dict)]
    if not entries:
        return None
    return entries[-1].get("first_command") or entries[0].get("command")
