"""A pool whose environments live in worker processes.

Rows and actions travel through one anonymous piece of shared memory that every worker
maps; a socket per worker carries one short message each way per step. Observations are
double-buffered: while a worker writes the next row, the previous one stays whole, so a
worker that dies halfway can still have its episode closed with it.

The parent tells each environment what to do (`step`, `reset`, nothing) and is the only
one who remembers. A worker that dies, or does not answer in time, is killed with
everything it started, and begun anew while the others go on. Workers are started as
plain Python processes, not forked: nothing of the learner (threads, CUDA, torch) gets
into them, and a script needs no `if __name__ == "__main__"` for them. They die with the
parent, whatever kills it, and the memory has no name that could be left behind.
"""

from __future__ import annotations

from reverie.envs.vector.workers.child import work
from reverie.envs.vector.workers.vec_env import WorkerVecEnv

__all__ = ["WorkerVecEnv", "work"]
