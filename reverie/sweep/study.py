"""The study: an Optuna study that proposes hyperparameters and stores the results.

Results are appended to a journal file. If a sweep is killed, its last line may be
incomplete and is removed. Trials that were running are continued with their number and
their hyperparameters.
"""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.log.jsonl import remove_incomplete_line
from reverie.plugins import import_optional
from reverie.storage.atomic import refuse_link
from reverie.sweep.spec import DEFAULT_TRIALS, SweepSpec
from reverie.sweep.trials import Trial, TrialState

STUDY_NAME = "sweep"
STATES: dict[str, TrialState] = {  # by the name of the state in Optuna
    "WAITING": "waiting",
    "RUNNING": "running",
    "COMPLETE": "done",
    "PRUNED": "pruned",
    "FAIL": "failed",
}


@dataclass
class RunningTrial:
    """A trial that has started and has no result yet."""

    number: int
    params: dict[str, Any]
    optuna_trial: Any
    values: dict[int, float] = field(default_factory=dict)
    """Objective of the finished runs, by index of the seed."""


class Study:
    """Proposes hyperparameters and keeps the results of trials on disk."""

    def __init__(self, path: Path, spec: SweepSpec):
        self.optuna = optuna = import_optional("optuna", "sweep", "A sweep")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.spec = spec
        refuse_link(path)
        # A sweep that was killed may have left the lock file of the journal.
        path.with_name(path.name + ".lock").unlink(missing_ok=True)
        backend = optuna.storages.journal.JournalFileBackend(str(path))
        try:
            remove_incomplete_line(path)
            self._study = optuna.create_study(
                study_name=STUDY_NAME,
                storage=optuna.storages.JournalStorage(backend),
                direction="minimize" if spec.config.goal == "min" else "maximize",
                load_if_exists=True,
                pruner=optuna.pruners.NopPruner(),
            )
            self._study.sampler = self._make_sampler(len(self._started()))
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            NotImplementedError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise UserError(
                f"The journal {path} is damaged ({reason}).\n"
                "  Fix: start a new sweep with another --logdir."
            ) from None
        if spec.config.sampler == "grid":
            self._enqueue_grid()

    @property
    def num_trials(self) -> int:
        """Number of trials of the whole sweep."""
        config = self.spec.config
        if config.sampler != "grid":
            return config.trials or DEFAULT_TRIALS
        points = int(math.prod(len(values) for values in self._grid().values()))
        return min(config.trials or points, points)

    @property
    def has_more(self) -> bool:
        """True if there are trials that have not started."""
        return len(self._started()) < self.num_trials

    def interrupted_trials(self) -> list[RunningTrial]:
        """Return the trials that were running when the sweep was interrupted."""
        running = [t for t in self._started() if t.state.name == "RUNNING"]
        make = self.optuna.trial.Trial
        return [self._running_trial(make(self._study, t._trial_id)) for t in running]

    def start_trial(self) -> RunningTrial:
        return self._running_trial(self._study.ask())

    def record_value(self, trial: RunningTrial, seed: int, value: float) -> None:
        """Store the objective of a finished run."""
        trial.values[seed] = value
        trial.optuna_trial.set_user_attr(f"seed{seed}", value)

    def add_seconds(self, trial: RunningTrial, seconds: float) -> None:
        """Add to the time spent on a trial."""
        before = trial.optuna_trial.user_attrs.get("seconds", 0.0)
        trial.optuna_trial.set_user_attr("seconds", before + seconds)

    def complete(self, trial: RunningTrial) -> float:
        """Finish a trial; return its objective, the mean over seeds."""
        values = list(trial.values.values())
        if len(values) > 1:
            trial.optuna_trial.set_user_attr("std", float(np.std(values)))
        value = float(np.mean(values))
        self._study.tell(trial.optuna_trial, value)
        return value

    def fail(self, trial: RunningTrial, error: str) -> None:
        trial.optuna_trial.set_user_attr("error", error)
        self._study.tell(trial.optuna_trial, state=self.optuna.trial.TrialState.FAIL)

    def prune(self, trial: RunningTrial, value: float, step: float) -> None:
        """Record that a trial was stopped early, and its value at that step."""
        trial.optuna_trial.report(value, int(step))
        self._study.tell(trial.optuna_trial, state=self.optuna.trial.TrialState.PRUNED)

    def trials(self) -> list[Trial]:
        """Return all trials that have started."""
        return [self._to_trial(frozen) for frozen in self._started()]

    def _started(self) -> list[Any]:
        """Return the trials of Optuna that have started."""
        trials = self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.state.name != "WAITING"]

    def _to_trial(self, frozen: Any) -> Trial:
        """Convert a `FrozenTrial` of Optuna."""
        attrs = frozen.user_attrs
        names = [name for name in self.spec.ranges if name in frozen.params]
        return Trial(
            frozen.number,
            STATES[frozen.state.name],
            {name: frozen.params[name] for name in names},
            frozen.value,
            attrs.get("std"),
            attrs.get("seconds", 0.0),
            attrs.get("error", ""),
        )

    def _running_trial(self, optuna_trial: Any) -> RunningTrial:
        """Return a trial with its hyperparameters and the values of finished seeds.

        For a trial that was interrupted, Optuna returns the stored hyperparameters.
        """
        with warnings.catch_warnings():  # about steps that do not divide the range
            warnings.simplefilter("ignore")
            params = {
                name: range_.suggest(optuna_trial, name)
                for name, range_ in self.spec.ranges.items()
            }
        attrs = optuna_trial.user_attrs
        seeds = [i for i in range(self.spec.config.seeds) if f"seed{i}" in attrs]
        values = {i: attrs[f"seed{i}"] for i in seeds}
        return RunningTrial(optuna_trial.number, params, optuna_trial, values)

    def _make_sampler(self, started: int) -> Any:
        """Return the sampler; its seed depends on the number of trials started before.

        Otherwise, a resumed sweep would propose the same hyperparameters again. The
        factor 7919 makes sweeps with other seeds differ, too: with a factor of 1, seed
        0 after one trial would be the same as seed 1 before any trial.
        """
        samplers, seed = self.optuna.samplers, self.spec.seed + 7919 * started
        if self.spec.config.sampler == "bayes":
            with warnings.catch_warnings():  # experimental in older versions of Optuna
                warnings.simplefilter("ignore")
                # `constant_liar` avoids equal proposals for runs at the same time
                return samplers.TPESampler(seed=seed, constant_liar=True)
        return samplers.RandomSampler(seed=seed)

    def _grid(self) -> dict[str, list[Any]]:
        """Return the values of each hyperparameter in a grid search."""
        return {name: r.grid(name) for name, r in self.spec.ranges.items()}

    def _enqueue_grid(self) -> None:
        """Enqueue the points of the grid that are not in the study yet."""
        trials = self._study.get_trials(deepcopy=False)
        enqueued = {trial.user_attrs.get("grid") for trial in trials}
        grid = self._grid()
        points = itertools.islice(itertools.product(*grid.values()), self.num_trials)
        for index, values in enumerate(points):
            if index not in enqueued:
                params = dict(zip(grid, values, strict=True))
                self._study.enqueue_trial(params, user_attrs={"grid": index})
