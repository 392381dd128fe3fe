"""Learn from what others recorded: `train` without the lines that act and store.

A step is an update here. What is learnt from is the run's material: sequences made up
or read by a source (`Sequences`), or recorded episodes (`recordings.py`). Besides the
usual checkpoints the folder `best` holds the one with the lowest loss on the evaluation
set so far; true events play no part in that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from reverie.api import Agent, Metrics, StateDict, UserError
from reverie.datasets.sequences import (
    SequenceDataset,
    is_sequence_task,
    make_sequence_dataset,
)
from reverie.datasets.sequences.feed import SequenceFeed
from reverie.run import checkpoint, device
from reverie.run.base_run import BaseRun
from reverie.run.checkpoint import Checkpoints
from reverie.run.clock import Clock, TrainRatio
from reverie.run.config import Config, with_flags
from reverie.run.factory import load_initial_weights, make_agent
from reverie.spaces import Spaces
from reverie.storage.run_spaces import write_spaces


def train_on_sequences(config: Config) -> Path:
    """Train until `run.steps` updates, resuming if the folder has a checkpoint.

    Returns the run folder.
    """
    return learn(config, Sequences(config))


def learn(config: Config, material: Material) -> Path:
    """The loop: updates, with looks, logs and saves in between."""
    with Watch(config, material) as run:
        clock, logger = run.clock, run.logger
        run.start()
        while clock.step < config.run.steps and not run.over:
            logger.add(run.update(), prefix="train")
            clock.advance(1)
            logger.progress(clock.step)

            if clock.every("report"):
                run.report()
            if clock.every("log"):
                run.write_log()
            if clock.every("save"):
                run.save(run.checkpoints)
        run.finish()
    return run.path


class Material(Protocol):
    """What such a run learns from, and how that is looked at."""

    @property
    def obs_space(self) -> Spaces: ...

    @property
    def act_space(self) -> Spaces: ...

    @property
    def patience(self) -> int:
        """Reports without a better one that are waited for; 0 for any number."""
        ...

    def open(self, agent: Agent, device: torch.device) -> Any:
        """A feed for the agent, which also has `served`, `close` and a state."""
        ...

    def begin(self, agent: Agent) -> None:
        """What to do before the first update of a new run."""
        ...

    def report(self, agent: Agent, feed: Any) -> Metrics:
        """A look at what was set aside; `loss` decides which checkpoint is best."""
        ...

    def parts(self) -> dict[str, StateDict]:
        """What a checkpoint keeps besides the agent."""
        ...

    def sentence(self, agent: Agent) -> str:
        """What there is to learn from, in words."""
        ...

    def close(self) -> None: ...


class Sequences:
    """Sequences of a source, in windows as the config's agent wants them."""

    patience = 0

    def __init__(self, config: Config):
        self.source = make_source(config)
        self.obs_space, self.act_space = self.source.obs_space, self.source.act_space
        self._served = False  # by a feed, which then closes the source

    def open(self, agent: Agent, device: torch.device) -> SequenceFeed:
        self._served = True
        return SequenceFeed(self.source, device, prefetch=device.type == "cuda")

    def begin(self, agent: Agent) -> None:
        pass

    def report(self, agent: Agent, feed: Any) -> Metrics:
        return agent.report(feed)

    def parts(self) -> dict[str, StateDict]:
        return {}

    def sentence(self, agent: Agent) -> str:
        window = agent.windows["train"]
        frames = window.context + window.length
        return f"{window.batch} windows of {frames} frames at a time"

    def close(self) -> None:
        if not self._served:
            self.source.close()


class Watch(BaseRun):
    """The parts of such a run, built from its config, saved and restored together."""

    def __init__(self, config: Config, material: Material | None = None):
        super().__init__(config)
        self.material = material or Sequences(config)
        self.best = Checkpoints(self.path / "best", 1)
        self.lowest = math.inf  # loss on the evaluation set
        self.waited = 0  # reports since then
        self._held = math.inf  # the loss of what `best` holds
        self._saved = -1  # the update after which the run was last saved

    def __enter__(self) -> Watch:
        self.open()
        return self

    def _open(self) -> None:
        config, material = self.config, self.material
        if config.run.clock == "phases":
            raise UserError(
                "Without an environment there are no phases of acting, so that nothing "
                "would ever be logged or saved.\n  Fix: --run.clock steps, and "
                "`run.*_every` in updates."
            )
        super()._open()
        self._closing.append(material.close)
        self.agent = make_agent(config, material, self.device, self.precision)
        self.feed = material.open(self.agent, self.device)
        self._closing.append(self.feed.close)
        write_spaces(self.path, material.obs_space, material.act_space)
        self.clock = Clock(config.run, TrainRatio(0))
        self._open_log(config.run.steps)

    # The verbs of the loop.

    def start(self) -> None:
        """Begin at the newest checkpoint, or anew."""
        found = self.newest_checkpoint()
        self.checkpoints.prune()
        if found:
            self._restore(found)
            self.print_message(f"Resumed {found.name} at update {self.clock.step}.")
        else:
            self.logger.truncate_after(-1)
            if self.config.run.from_checkpoint:
                self.print_message(load_initial_weights(self.agent, self.config))
            self.material.begin(self.agent)
        self.print_message(
            f"{self.config.agent} on {self.config.task}, {self.device} in "
            f"{self.precision}\n  run folder {self.path}\n"
            f"  {self.config.run.steps:,} updates, "
            f"{self.material.sentence(self.agent)}"
        )

    @property
    def over(self) -> bool:
        """Whether to end early: somebody asked, or nothing has improved for long."""
        patience = self.material.patience
        tired = bool(patience) and self.waited >= patience
        return tired or self.stopper.is_set()

    def report(self) -> Metrics:
        """Look at the evaluation set; keep what explains it best so far."""
        with self.timer("report"):
            metrics = self.material.report(self.agent, self.feed)
        self.logger.add(metrics, prefix="report")
        loss = float(metrics["loss"])
        self.waited += 1
        if loss < self.lowest:
            self.lowest, self.waited = loss, 0
            if loss <= self._held:
                self._held = loss
                self.save(self.best)
        return metrics

    def save(self, where: Checkpoints) -> None:
        loop: StateDict = {
            "clock": self.clock.state_dict(),
            "logger": self.logger.state_dict(),
            "feed": self.feed.state_dict(),
            "lowest": self.lowest,
            "waited": self.waited,
        }
        parts = {"agent": self.agent_state(), "loop": loop, **self.material.parts()}
        where.save(self.clock.step, parts)
        where.prune()
        if where is self.checkpoints:
            self._saved = self.clock.step

    def finish(self) -> None:
        """Save, take a last look, and say so if the run was asked to stop."""
        if self._saved != self.clock.step:
            self.save(self.checkpoints)
        if not self.stopper.is_set():
            self.report()
        self.write_log()
        self.stopper.check()

    def _restore(self, path: Path) -> None:
        self.agent.load_state_dict(checkpoint.read_part(path, "agent"))
        loop = checkpoint.read_part(path, "loop")
        self.clock.load_state_dict(loop["clock"])
        self.logger.load_state_dict(loop["logger"])
        self.feed.load_state_dict(loop["feed"])
        self.lowest = float(loop["lowest"])
        if best := self.best.newest():  # may be of a later report than the checkpoint
            self._held = float(checkpoint.read_part(best, "loop")["lowest"])
        self.waited = int(loop.get("waited", 0))


def trains_on_sequences(config: Config) -> bool:
    """True if the task is a sequence dataset rather than an environment."""
    found = is_sequence_task(config.task)
    if not found and config.of_agent.sequence_window is not None:
        raise UserError(
            f"The agent {config.agent!r} learns from sequences, and in {config.task} "
            "somebody has to act.\n  Fix: --task sequences_balls, sequences_maze or "
            "sequences_episodes, or --agent dreamer"
        )
    return found


def make_source(config: Config) -> SequenceDataset:
    """The sequences of a config's task, in windows as its agent wants them."""
    window = config.of_agent.sequence_window
    if window is None:
        raise UserError(
            f"{config.task} is there to be watched, and {config.agent!r} would act.\n"
            "  Fix: --agent vta"
        )
    return make_sequence_dataset(config.task, config.sequences, window, config.seed)


def load_watcher(
    logdir: Path,
    fresh: int = 0,
    flags: Sequence[tuple[str, Any]] = (),
    **changes: Any,
) -> tuple[Config, Agent, SequenceFeed]:
    """The newest checkpoint of a run (or `best` of it), ready to look with.

    `fresh` is added to the seed of the sequences, so that even those for evaluation are
    others; `flags` change settings of the run, and `changes` those of its source.
    """
    from reverie.run.folder import read_config, run_folder_of

    path = checkpoint.find_checkpoint(logdir)
    saved = read_config(run_folder_of(path))
    if not is_sequence_task(saved.task):
        raise UserError(
            f"{logdir} learnt {saved.task} by acting, so it has no sequences to show."
            "\n  Fix: give the --logdir of a run of a task like sequences_balls."
        )
    config = with_flags(saved, flags)
    if not is_sequence_task(config.task):
        raise UserError(
            f"Task {config.task} is an environment, but {logdir} trains on sequences.\n"
            f"  Fix: leave out --task, or give another source, like {saved.task}."
        )
    source_config = dataclasses.replace(config.sequences, **changes)
    config = dataclasses.replace(
        config, sequences=source_config, seed=config.seed + fresh
    )
    where = device.pick_device(config.device)
    precision = device.pick_precision(config.precision, where)
    source = make_source(config)
    agent = make_agent(config, source, where, precision)
    agent.load_weights(checkpoint.read_part(path, "agent"))
    return config, agent, SequenceFeed(source, where)
