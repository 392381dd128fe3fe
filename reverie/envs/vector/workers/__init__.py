"""Vectorized environment in worker processes, with observations in shared memory.

Observations and actions are exchanged through one anonymous block of shared memory; a
socket per worker carries one short message per step in each direction. Observations are
double-buffered: while a worker writes the next row, the previous row stays intact, so
that it can end the episode if the worker dies in the middle of a step.

The main process sends each environment a command (`STEP`, `RESET` or `IDLE`) and tracks
its episodes and failures. A worker that dies or does not answer in time is killed,
together with its child processes, and restarted while the other workers continue.

Workers are started as new Python processes, not forked: they do not inherit threads,
CUDA or torch from the main process, and scripts need no `if __name__ == "__main__"`.
Workers exit when the main process exits, also if it is killed.
"""

from __future__ import annotations

from reverie.envs.vector.workers.vec_env import WorkerVecEnv

__all__ = ["WorkerVecEnv"]
