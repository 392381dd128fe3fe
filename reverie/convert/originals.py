"""The file an original saved, as a state of ours: which reader suits which agent."""

from __future__ import annotations

from pathlib import Path

from reverie.api import StateDict, UserError
from reverie.convert import dreamerv3
from reverie.convert.delta_iris import weights as iris
from reverie.convert.vta import weights as vta

READERS = {
    "dreamer": dreamerv3.read_state,
    "iris": iris.read_state,
    "vta": vta.read_state,
}


def read_original(
    agent: str, path: Path, like: StateDict, components: str = ".*"
) -> StateDict:
    """The state of an agent of ours with the numbers of a file in it.

    `like` is its state as it is. Components that the pattern does not name stay so.
    """
    if agent not in READERS:
        raise UserError(
            f"{path} is a file, and no files of others are known for the agent "
            f"{agent!r}.\n  Fix: give a run folder of ours."
        )
    return READERS[agent](path, like, components)
