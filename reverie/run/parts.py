"""Builds the parts of a run that collect and store data.

They are the environments, the collector that acts in them, the replay buffer, and the
feed that samples batches from it. If the replay is sharded (`replay.ranks`), every rank
of a data-parallel run has a `Shard` of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from reverie.api import Agent, UserError, VecEnv
from reverie.distributed.collective import rank, split_batch, world_size
from reverie.envs.seeding import derive_seed
from reverie.log.timer import Rates, Timer
from reverie.replay import device_copy
from reverie.replay.buffer import Replay
from reverie.replay.config import Storage
from reverie.replay.feed import ReplayFeed
from reverie.rows import Window
from reverie.run.checkpoint import Checkpoints, Damaged, read_part
from reverie.run.collectors import CanAct, InProcessCollector, OverlappedCollector
from reverie.run.config import Config
from reverie.run.factory import MakeEnv, make_envs, with_env_workers
from reverie.run.memory import explain_out_of_memory
from reverie.run.size import smaller_size_flag
from reverie.storage.limits import InvalidFile


class Shard(NamedTuple):
    """The shard of environments, replay and batches that belongs to one rank."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_single(self) -> bool:
        """True if there is one shard: all environments and the whole replay."""
        return self.world_size == 1

    def envs(self, total: int) -> tuple[int, int]:
        """Return the number of environments of this rank and the index of the first."""
        envs = split_batch(total, self.world_size)[self.rank]
        return envs.size, envs.start

    def windows(self, windows: dict[str, Window]) -> dict[str, Window]:
        """Return the windows with the batch size of this rank; only rank 0 reports."""
        if self.is_single:
            return windows
        own = {}
        for name, window in windows.items():
            batch = split_batch(window.batch, self.world_size)[self.rank].size
            if name != "report":
                own[name] = replace(window, batch=batch)
            elif self.rank == 0:
                own[name] = window
        return own

    def seed(self, seed: int) -> int:
        """Return the seed for sampling and acting on this rank."""
        return derive_seed(seed, self.rank) if self.rank else seed


def find_shard(config: Config) -> Shard:
    """Return the shard of this process; `Shard()` (everything) if there is only one."""
    ranks = world_size()
    if config.replay.ranks != "sharded" or ranks == 1:
        return Shard()
    if config.run.envs < ranks:
        raise UserError(
            f"With a sharded replay, every rank needs an environment, but run.envs is "
            f"{config.run.envs} for {ranks} ranks.\n  Fix: --run.envs {ranks}"
        )
    if config.actors.count:
        raise UserError(
            "Actors send their steps to rank 0, so the replay cannot be sharded.\n"
            "  Fix: --replay.ranks shared, or --actors.count 0"
        )
    if config.run.policy_devices:
        raise UserError(
            "With a sharded replay, every rank acts on the device that it trains on.\n"
            "  Fix: remove --run.policy_devices"
        )
    if config.run.episodes:
        raise UserError(
            "Recorded episodes cannot be added to a sharded replay.\n"
            "  Fix: --replay.ranks shared, or remove --run.episodes"
        )
    return Shard(rank(), ranks)


def check_shard_count(config: Config, checkpoints: Checkpoints) -> None:
    """Raise if the replay of a run is sharded over another number of ranks.

    Called before anything is written to the run folder, so that the saved settings
    still fit the checkpoints.
    """
    if config.replay.ranks != "sharded":
        return
    for path in reversed(checkpoints.paths()):
        try:
            saved_ranks = read_part(path, "loop").get("shards", 1)
        except (OSError, UserError, Damaged, LookupError, InvalidFile):
            continue  # a damaged checkpoint, which is moved when the run is restored
        if saved_ranks != world_size():
            raise UserError(
                "The number of ranks that share the replay buffer of this run is "
                f"{saved_ranks}, but this command has {world_size()}.\n"
                "  Fix: --devices "
                f"{saved_ranks}, or start {saved_ranks} processes with torchrun or "
                "srun."
            )
        return


def open_envs(
    config: Config, count: int, first: int, make_env: MakeEnv | None, overlap: bool
) -> VecEnv:
    """Make `count` environments, the first with index `first`.

    With `overlap`, they run in worker processes, where they can step while the agent
    trains. Those of `make_env` run in workers only if `env.vector.workers` is set.
    """
    config = with_env_workers(config) if overlap and make_env is None else config
    return make_envs(config, count, first, make_env)


def open_replay(
    config: Config,
    spaces: Any,
    agent: Agent,
    directory: Path,
    steps_taken: int,
    *,
    streams: int,
    storage: Storage,
    fraction: float = 1.0,
    shard: Shard | None = None,
) -> Replay:
    """Make a replay buffer for observations, actions and the agent's extras.

    Its capacity is this fraction of `replay.capacity`, divided among the ranks, but not
    more than the run will collect. `spaces` has `obs_space` and `act_space`, `streams`
    is the number of environments, `steps_taken` the step of the newest checkpoint.
    """
    shard = shard or Shard()
    # observations with the prefix `log/` are only logged, and not stored
    row_spaces = {**spaces.obs_space, **spaces.act_space}
    stored = {k: space for k, space in row_spaces.items() if k[:4] != "log/"}
    capacity = int(config.replay.capacity * fraction) // shard.world_size
    if not config.run.episodes:
        run_steps = max(config.run.steps, steps_taken)
        capacity = min(capacity, run_steps + streams)
    with explain_out_of_memory(config, "building the replay buffer", "replay.capacity"):
        return Replay(
            stored,
            agent.extras,
            replace(config.replay, storage=storage),
            capacity=max(1, capacity),
            num_envs=streams,
            windows=shard.windows(agent.windows),
            directory=directory,
            seed=shard.seed(config.seed),
            exact_extras=config.deterministic,
            smaller_extras=smaller_size_flag(config),
            memory_fraction=1 / shard.world_size,
        )


def open_feed(replay: Replay, device: torch.device, deterministic: bool) -> ReplayFeed:
    """Make the feed of a replay buffer, with batches on a device."""
    return ReplayFeed(
        replay,
        replay.windows,
        device,
        prefetch=device.type == "cuda" and not deterministic,
        on_device=device_copy.fits_on_device(replay, device),
    )


def make_collector(
    config: Config,
    envs: VecEnv,
    agent: CanAct,
    random_agent: Agent,
    overlap: bool,
    timer: Timer,
    rates: Rates,
) -> InProcessCollector:
    """Make the collector of environments on this machine."""
    collector = OverlappedCollector if overlap else InProcessCollector
    return collector(
        envs, agent, random_agent, config.run.prefill, config.explore, timer, rates
    )
