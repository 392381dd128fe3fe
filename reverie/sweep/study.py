"""The memory of a sweep: which points were tried, and how they did. Kept by Optuna.

The journal is a file that only grows; a sweep that is killed leaves at worst half a
line at its end, which is cut off. A trial that was in work then is taken up again under
its own number, with its own values.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.log.jsonl import drop_torn_line
from reverie.sweep.plan import USUAL_TRIALS, Plan
from reverie.sweep.trials import State, Trial

NAME = "sweep"
STATES: dict[str, State] = {
    "WAITING": "waiting",
    "RUNNING": "running",
    "COMPLETE": "done",
    "PRUNED": "pruned",
    "FAIL": "failed",
}


@dataclass
class Attempt:
    """A trial in work."""

    number: int
    point: dict[str, Any]
    handle: Any
    values: dict[int, float] = field(default_factory=dict)
    """Of the runs that have ended, by which of the seeds they had."""


class Study:
    """Points to try and what came of them, on disk."""

    def __init__(self, path: Path, plan: Plan):
        self.optuna = optuna = need_optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.plan = plan
        drop_torn_line(path)
        path.with_name(path.name + ".lock").unlink(missing_ok=True)  # of a killed one
        backend = optuna.storages.journal.JournalFileBackend(str(path))
        try:
            self._study = optuna.create_study(
                study_name=NAME,
                storage=optuna.storages.JournalStorage(backend),
                direction="minimize" if plan.config.goal == "min" else "maximize",
                load_if_exists=True,
                pruner=optuna.pruners.NopPruner(),
            )
            self._study.sampler = self._sampler(len(self._started()))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} is damaged: {error}.\n"
                "  Fix: give another --logdir; the runs themselves are whole."
            ) from None
        if plan.config.sampler == "grid":
            self._lay_out()

    @property
    def wanted(self) -> int:
        """How many trials there will be."""
        config = self.plan.config
        if config.sampler != "grid":
            return config.trials or USUAL_TRIALS
        points = int(np.prod([len(values) for values in self._axes().values()]))
        return min(config.trials or points, points)

    @property
    def has_more(self) -> bool:
        return len(self._started()) < self.wanted

    def interrupted(self) -> list[Attempt]:
        """Trials that were in work when the sweep ended."""
        running = [t for t in self._started() if t.state.name == "RUNNING"]
        kind = self.optuna.trial.Trial
        return [self._attempt(kind(self._study, t._trial_id)) for t in running]

    def ask(self) -> Attempt:
        return self._attempt(self._study.ask())

    def note(self, attempt: Attempt, seed: int, value: float) -> None:
        """A run has ended."""
        attempt.values[seed] = value
        attempt.handle.set_user_attr(f"seed{seed}", value)

    def spend(self, attempt: Attempt, seconds: float) -> None:
        before = attempt.handle.user_attrs.get("seconds", 0.0)
        attempt.handle.set_user_attr("seconds", before + seconds)

    def finish(self, attempt: Attempt) -> float:
        """All runs have ended; their mean is what the trial is worth."""
        values = list(attempt.values.values())
        if len(values) > 1:
            attempt.handle.set_user_attr("spread", float(np.std(values)))
        value = float(np.mean(values))
        self._study.tell(attempt.handle, value)
        return value

    def fail(self, attempt: Attempt, why: str) -> None:
        attempt.handle.set_user_attr("note", why)
        self._study.tell(attempt.handle, state=self.optuna.trial.TrialState.FAIL)

    def prune(self, attempt: Attempt, value: float, step: float) -> None:
        attempt.handle.report(value, int(step))
        self._study.tell(attempt.handle, state=self.optuna.trial.TrialState.PRUNED)

    def trials(self) -> list[Trial]:
        """All that were begun."""
        return [self._trial(found) for found in self._started()]

    def _started(self) -> list[Any]:
        trials = self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.state.name != "WAITING"]

    def _trial(self, found: Any) -> Trial:
        attrs = found.user_attrs
        return Trial(
            found.number,
            STATES[found.state.name],
            {
                name: found.params[name]
                for name in self.plan.ranges
                if name in found.params
            },
            found.value,
            attrs.get("spread"),
            attrs.get("seconds", 0.0),
            attrs.get("note", ""),
        )

    def _attempt(self, handle: Any) -> Attempt:
        with warnings.catch_warnings():  # of steps that do not end at the high end
            warnings.simplefilter("ignore")
            ranges = self.plan.ranges.items()
            point = {name: range.suggest(handle, name) for name, range in ranges}
        known = handle.user_attrs
        seeds = [k for k in range(self.plan.config.seeds) if f"seed{k}" in known]
        values = {k: known[f"seed{k}"] for k in seeds}
        return Attempt(handle.number, point, handle, values)

    def _sampler(self, started: int) -> Any:
        """Who proposes points; after a pause, others than it has proposed before."""
        samplers, seed = self.optuna.samplers, self.plan.seed + 7919 * started
        if self.plan.config.sampler == "bayes":
            with warnings.catch_warnings():  # it is experimental in older versions
                warnings.simplefilter("ignore")
                return samplers.TPESampler(seed=seed, constant_liar=True)
        return samplers.RandomSampler(seed=seed)

    def _axes(self) -> dict[str, list[Any]]:
        return {name: range.grid(name) for name, range in self.plan.ranges.items()}

    def _lay_out(self) -> None:
        """Put the points of the grid in line, unless they stand there."""
        trials = self._study.get_trials(deepcopy=False)
        there = {trial.user_attrs.get("grid") for trial in trials}
        axes = self._axes()
        points = itertools.islice(itertools.product(*axes.values()), self.wanted)
        for index, values in enumerate(points):
            if index not in there:
                point: Mapping[str, Any] = dict(zip(axes, values, strict=True))
                self._study.enqueue_trial(dict(point), user_attrs={"grid": index})


def need_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError(
            "A sweep needs the optuna package, which is not installed.\n"
            "  Fix: pip install 'reverie[sweep]'"
        ) from None
    return optuna
