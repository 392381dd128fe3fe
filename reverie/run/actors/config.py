"""`ActorsConfig`, the settings of remote actors."""

from __future__ import annotations

from dataclasses import dataclass

from reverie.api import UserError
from reverie.config import check_minimum

MAX_ACTORS = 4096
"""Maximum number of actors."""


@dataclass(frozen=True)
class ActorsConfig:
    """Remote actors, on this and other machines (needs the extra `ray`)."""

    count: int = 0
    """Number of actors; with 0, the learner steps `run.envs` environments instead."""
    envs: int = 4
    """Number of environments of each actor, which step together."""
    address: str = ""
    """Ray cluster: `auto` for the one that `ray start` started on this machine, or
    `HOST:PORT`. Empty starts actors on this machine only."""
    cpus: float = 1.0
    """CPU cores that Ray reserves for each actor. An actor without free cores waits
    until the cluster has some. With 0, actors do not wait for free cores."""
    lockstep: bool = False
    """Collect in rounds: all actors collect a chunk with the same weights, then the
    learner trains on all of them. Slower, but a run with the same seed repeats the same
    steps, also after it was resumed."""
    restarts: int = 10
    """Times in a row that an actor may end without sending data before the run stops.
    """
    timeout: float = 300.0
    """Seconds without an answer after which an actor is restarted, and seconds without
    data of any actor after which the run stops."""

    def __post_init__(self) -> None:
        if self.address.startswith("ray://"):
            raise UserError(
                "Ray Client (ray://) is not supported: all data would go through one "
                "proxy.\n  Fix: run the learner on a machine of the cluster, for "
                "example its head node, with --actors.address auto"
            )
        check_minimum(self, "actors.", count=0, envs=1, cpus=0, restarts=0)
        if self.timeout <= 0:
            raise UserError(
                "actors.timeout must be above zero.\n  Fix: --actors.timeout 300"
            )
        if self.count > MAX_ACTORS:
            raise UserError(
                f"actors.count must be at most {MAX_ACTORS:,}, not {self.count:,}.\n"
                "  Fix: --actors.count 8"
            )

    @property
    def num_envs(self) -> int:
        """Number of environments of all actors."""
        return self.count * self.envs
