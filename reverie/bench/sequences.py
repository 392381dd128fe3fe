"""Benchmark of agents that train on sequence datasets instead of environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reverie.api import Agent
from reverie.bench.update import UpdateBenchmark
from reverie.run.factory import make_agent
from reverie.run.sequences import Sequences


class SequenceBenchmark(UpdateBenchmark):
    """Measures one config with its sequence dataset and agent."""

    def _open(self) -> None:
        self._prepare()
        dataset = Sequences(self.config)
        self._closing.append(dataset.close)
        self.agent: Agent = make_agent(
            self.config, dataset, self.device, self.precision
        )
        feed = dataset.open(self.agent, self.device)
        self._closing.append(feed.close)
        self.feed = feed

    def fill(self, steps: int) -> None:
        """Do nothing: there is no replay buffer."""

    def calls(self) -> dict[str, Callable[[], Any]]:
        return {"update": lambda: self.agent.train(self.feed)}

    def measure_collection(self) -> dict[str, Any]:
        """Time to load a batch, and sequences per second."""
        batch = self.agent.windows["train"].batch
        times = self.time(lambda: self.feed("train"))[0].ms
        return {"batch_ms": times, "sequences_per_s": [1000 * batch / t for t in times]}
