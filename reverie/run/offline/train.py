"""The offline training loop: updates on a dataset, with evaluation, logs and saves.

A step is an update here. In addition to the usual checkpoints, the folder `best` has
the one with the lowest loss on the evaluation data.
"""

from __future__ import annotations

from pathlib import Path

from reverie.log.status import StatusLine
from reverie.run.config import Config
from reverie.run.imported import find_imported
from reverie.run.memory import explain_out_of_memory
from reverie.run.offline.datasets import (
    OfflineDataset,
    OfflineEpisodes,
    OfflineSequences,
    trains_on_sequences,
)
from reverie.run.offline.run import OfflineRun
from reverie.run.offline.setup import (
    check_action_range,
    check_initial_weights,
    epochs_to_updates,
    with_base_run,
)


def train_offline(
    config: Config,
    dataset: OfflineDataset,
    saved_config: Config | None = None,
    profile: int = 0,
) -> Path:
    """Train until `run.steps` updates, resuming if the folder has a checkpoint.

    In `config`, epochs are converted to updates. `saved_config` is the original one,
    which is written to the run folder. With `profile`, a trace of this number of
    updates is written. Returns the run folder.
    """
    run = OfflineRun(config, dataset, saved_config, profile)
    with explain_out_of_memory(config, "training"), run:
        clock, logger = run.clock, run.logger
        run.start()
        run.print_summary()
        while not run.is_complete and not run.stopper.is_set():
            if (metrics := run.update()) is None:  # the run was asked to stop
                break
            logger.add(metrics, prefix="train")
            clock.advance(1)
            logger.progress(clock.step)

            if clock.every("report"):
                run.evaluate()
            if clock.every("log"):
                run.write_log()
            if clock.every("save"):
                run.save(run.checkpoints)
        run.finish()
    return run.path


def offline(config: Config, profile: int = 0) -> Path:
    """Train on the recorded episodes of `offline.data`; return the run folder."""
    if trains_on_sequences(config):
        return train_on_sequences(config, profile)
    with StatusLine("reading the recorded episodes"):
        config = with_base_run(config)
        base_run = config.agent_config.base_run  # whose world model or encoder is used
        imported = find_imported(base_run, type(config)) if base_run else None
        dataset = OfflineEpisodes(config.offline, config.seed, imported or base_run)
        check_action_range(config, dataset)
        check_initial_weights(config, dataset)
        in_updates = epochs_to_updates(config, dataset.env_steps)
    return train_offline(in_updates, dataset, config, profile)


def train_on_sequences(config: Config, profile: int = 0) -> Path:
    """Train on a sequence dataset, or on sequences of the episodes of `offline.data`.

    Returns the run folder.
    """
    config = epochs_to_updates(config, 0)  # raises if `offline.epochs` is set
    with StatusLine("preparing the sequences"):
        dataset = OfflineSequences(config)
    return train_offline(config, dataset, profile=profile)
