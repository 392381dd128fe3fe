"""How fast an agent is that only watches: a source instead of environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reverie.api import Agent
from reverie.bench.update import Bench
from reverie.run.factory import make_agent
from reverie.run.sequences import Sequences


class WatchBench(Bench):
    """One config brought up on this machine: a source, an agent, and a feed."""

    def _open(self) -> None:
        self._prepare()
        material = Sequences(self.config)
        self._closing.append(material.close)
        self.agent: Agent = make_agent(
            self.config, material, self.device, self.precision
        )
        feed = material.open(self.agent, self.device)
        self._closing.append(feed.close)
        self.feed = feed

    def fill(self, steps: int) -> None:
        """Sequences come by themselves."""

    def calls(self) -> dict[str, Callable[[], Any]]:
        return {"update": lambda: self.agent.train(self.feed)}

    def around(self) -> dict[str, Any]:
        """How long a batch takes by itself, and how many sequences that makes."""
        batch = self.agent.windows["train"].batch
        times = self.time(lambda: self.feed("train"))[0].ms
        return {"batch_ms": times, "sequences_per_s": [1000 * batch / t for t in times]}
