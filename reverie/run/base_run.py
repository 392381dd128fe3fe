"""What every run that trains stands on, whatever its agent learns from.

A folder that nobody else may write to, a device, checkpoints, clocks, a log, and the
update itself. What is opened is closed in turn, also if opening the rest fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from reverie.api import Agent, Metrics, StateDict, UserError
from reverie.log.logger import Logger, make_logger
from reverie.log.timer import Rates, Timer
from reverie.log.usage import Usage
from reverie.run import checkpoint, device
from reverie.run.checkpoint import Checkpoints
from reverie.run.clock import Clock
from reverie.run.config import Config
from reverie.run.folder import RunFolder, place
from reverie.run.health import Health
from reverie.run.signals import Stopper


class BaseRun:
    """See the top of this file; who stands on it opens `agent`, `feed` and `clock`."""

    device: torch.device
    precision: str
    agent: Agent
    feed: Any
    clock: Clock
    logger: Logger

    def __init__(self, config: Config):
        self.config = config
        self.path = place(config.logdir)
        self.stopper = Stopper()
        self.health = Health(config.run.max_nonfinite)
        self.checkpoints = Checkpoints(
            self.path / "ckpt", config.run.keep_last, config.run.keep_every
        )
        self.has_changes = False
        """True if all parts agree and something changed since the last save."""
        self._closing: list[Callable[[], None]] = []

    def open(self) -> None:
        """Build all parts, or none."""
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        while self._closing:
            self._closing.pop()()

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody may be able to hear
            print(text, file=sys.stderr, flush=True)

    # Building.

    def _open(self) -> None:
        """Take the folder and the device."""
        config, folder = self.config, RunFolder(self.path)
        self._closing.append(folder.close)  # even if it refuses the settings
        folder.open(config)
        self.stopper.__enter__()
        self._closing.append(lambda: self.stopper.__exit__(None, None, None))
        device.seed_everything(config.seed)
        self.device = device.pick_device(config.device)
        if config.deterministic:
            device.be_deterministic()
        else:
            device.be_quick(self.device)
        self.precision = device.pick_precision(config.precision, self.device)

    def _open_log(self, frames: int) -> None:
        """A log of a run that will take so many frames, and clocks that start now."""
        self.timer, self.rates = Timer(self.config.logger.timer), Rates()
        self.usage = Usage()
        settings = dataclasses.asdict(self.config)
        self.logger = make_logger(self.config.logger, self.path, frames, settings)
        self._closing.append(self.logger.close)

    # The verbs that all loops share.

    def update(self) -> Metrics:
        """One training step of the agent."""
        served = self.feed.served
        with self.changing():
            with self.timer("train"):
                metrics = self.agent.train(self.feed)
            self.rates.add("train", self.feed.served - served)
            self.clock.add_update()
            self.health.check(self.agent, metrics)
        return metrics

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Change several parts; after an error in here the run is not saved."""
        self.has_changes = False
        yield
        self.has_changes = True

    def write_log(self) -> None:
        """Write what was logged since the last time, with the state of the machine."""
        logger = self.logger
        logger.add({"updates": self.clock.updates}, prefix="train/opt")
        for source in (self.rates, self.timer, self.usage):
            logger.add(source.metrics())
        logger.write(self.clock.frames)

    # Keeping.

    def newest(self) -> Path | None:
        """The checkpoint to go on from; none for a run that has not saved yet."""
        found = self.checkpoints.newest()
        if found is None and self.checkpoints.shelf.is_dir():
            raise UserError(
                f"Every checkpoint of {self.path} is damaged; nothing else was touched."
                "\n  Fix: give another --logdir, or remove "
                f"{self.checkpoints.shelf} to begin anew in this one."
            )
        return found

    def agent_state(self) -> StateDict:
        """What a checkpoint keeps of the agent, if that is worth keeping."""
        state = self.agent.state_dict()
        bad = checkpoint.nonfinite(state)
        if bad:
            raise UserError(
                f"The agent's {bad} is not finite, so it was not saved; the last "
                "checkpoint is good.\n  Fix: begin another run from it, with a lower "
                "learning rate or --precision float32: --logdir NEW "
                f"--run.from_checkpoint {self.path}"
            )
        return state
