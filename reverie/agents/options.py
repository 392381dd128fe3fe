"""Options with which every agent is built, in addition to its spaces and config."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reverie.agents.explore import ExploreConfig
from reverie.api import Agent, UserError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class BuildOptions:
    """Device, precision and seed of an agent; the same for all agents of a run."""

    device: torch.device
    precision: str = "float32"
    """Format of the networks: one of `DTYPES`."""
    seed: int = 0
    compile: str = "none"
    """`none`, fused kernels (`step`), or kernels captured as CUDA graphs (`graph`)."""
    overlap: bool = False
    """The policy may act with weights that are one update old instead of waiting for an
    update. No effect on agents that do not act in training."""
    base: Agent | None = None
    """Agent of the base run (`AgentConfig.base_run`), whose world model is used."""
    explore: ExploreConfig = ExploreConfig()  # noqa: RUF009 (frozen)
    """Exploration policy."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `precision`."""
        if self.precision not in DTYPES:
            raise UserError(
                f"There is no precision {self.precision!r}.\n"
                f"  Fix: --precision {' or '.join(DTYPES)}"
            )
        return DTYPES[self.precision]
