"""The sweep: runs the trials of a study and reports the best hyperparameters.

The study proposes hyperparameters (`study.py`). Each run of a trial is a process with
its own run folder (`run/processes.py`), and its objective is read from the files in
that folder (`objective.py`). All state is on disk, so a sweep that was interrupted
continues in its folder: finished trials are kept, and running ones resume from their
checkpoints.

logdir/
  sweep.yaml               the specification
  study.journal            results of all trials, an Optuna journal
  trials/0007-seed0/       run folder
  trials/0007-seed0.log    output of the run
  table.csv, table.txt     the trials from best to worst
  plot.png                 objective over trials and over each hyperparameter
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from reverie.api import Metrics, UserError
from reverie.config import read_config_file
from reverie.log.logger import LoggerConfig, make_logger
from reverie.log.messages import print_message
from reverie.log.terminal import format_number
from reverie.render.sweep import SweepAxis, draw_sweep
from reverie.render.video import write_image
from reverie.run.folder import lock_folder, resolve_logdir
from reverie.run.processes import PROGRAM, ProcessSlots, RunProcess, stop_processes
from reverie.run.resources import Resources
from reverie.run.signals import Stopper
from reverie.run.spec_file import code_in_spec
from reverie.run.trust import check_trusted, is_everything_allowed, register
from reverie.storage.atomic import make_folder, write_file
from reverie.sweep.objective import (
    Goal,
    MetricSeries,
    metric_not_found,
    read_metric,
    summarize,
)
from reverie.sweep.search_space import NumericRange
from reverie.sweep.spec import SweepSpec
from reverie.sweep.study import RunningTrial, Study
from reverie.sweep.trials import (
    Trial,
    best_trial,
    format_csv,
    format_params,
    format_table,
)

SPEC_FILE, JOURNAL = "sweep.yaml", "study.journal"

CHANGEABLE_OPTIONS = ("trials", "jobs", "prune", "sampler", "wandb", "logdir")
"""Options that may differ when a sweep is continued."""
OBJECTIVE_OPTIONS = ("metric", "summary", "mean_over", "eval", "seeds")
"""Options that may also differ as long as no trial has a result."""

POLL_SECONDS = 0.2
"""Time between two checks of the processes."""
PRUNE_SECONDS = 5.0
"""Time between two checks of whether to prune a run."""
PRUNE_MIN_TRIALS = 4
"""Number of finished trials before the first trial is pruned."""
PRUNE_MIN_PROGRESS = 0.25
"""Fraction of a run that must be complete before it can be pruned."""


def sweep(spec: SweepSpec, program: Sequence[str] = PROGRAM) -> Path:
    """Run all trials that are not finished; return the folder of the sweep."""
    with Sweep(spec, program) as search:
        search.resume_trials()
        while search.is_unfinished and not search.stopper.is_set():
            search.start_runs()
            search.check_runs()
            time.sleep(POLL_SECONDS)
        search.finish()
    return search.path


@dataclass
class TrialRun:
    """A process that trains or evaluates one seed of a trial."""

    trial: RunningTrial
    seed: int
    """Index of the seed within the trial."""
    process: RunProcess
    folder: Path
    is_eval: bool = False
    last_prune_check: float = 0.0
    """Time of the last check of whether to prune it."""


class Sweep(Resources):
    """The state of a sweep and the steps of its loop."""

    def __init__(self, spec: SweepSpec, program: Sequence[str] = PROGRAM):
        super().__init__()
        self.path = resolve_logdir(spec.config.logdir)
        self.spec = replace(spec, config=replace(spec.config, logdir=str(self.path)))
        self.config = spec.config
        self.goal: Goal = "max" if spec.config.goal == "max" else "min"
        self.stopper = Stopper()
        gpus = 0 if "device" in {*spec.settings, *spec.ranges} else 1
        self.slots = ProcessSlots(program, spec.config.jobs, gpus)
        self.pending: list[RunningTrial] = []  # trials with seeds not started yet
        self.runs: list[TrialRun] = []
        self._series: dict[int, MetricSeries] = {}  # of finished trials, for pruning

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # `close` lets the runs save a checkpoint; after an unexpected error, they are
        # killed instead
        if error is not None and not isinstance(error, UserError | OSError):
            for run in self.runs:
                run.process.kill()
        self.close()

    def _open(self) -> None:
        if (self.path / "config.yaml").exists():
            raise UserError(
                f"{self.path} is the folder of a run, not of a sweep.\n"
                "  Fix: choose another --logdir."
            )
        self._cleanup.enter_context(lock_folder(self.path, "sweep folder"))
        saved = self.path / SPEC_FILE
        self.study = Study(self.path / JOURNAL, self.spec)
        trials = self.study.trials()
        if saved.exists() and trials:
            refuse_changed_spec(saved, self.spec, trials)
        settings = yaml.safe_load(self.spec.to_yaml())
        names = {name for _, name in code_in_spec(settings)}
        # Modules in the specification were checked when it was read. Check the modules
        # that occur only in earlier trials in the folder. A pair is a setting and the
        # module that it names.
        pairs = [pair for t in trials for pair in code_in_spec(t.params)]
        check_trusted(self.path, [pair for pair in pairs if pair[1] not in names])
        register(self.path, names)  # adds the folder to the list of the user's runs
        write_file(saved, self.spec.to_yaml().encode())
        make_folder(self.path / "trials")
        self._cleanup.enter_context(self.stopper)
        outputs = LoggerConfig(outputs=("wandb",) if self.config.wandb else ())
        self.logger = make_logger(outputs, self.path, settings=settings)
        self._cleanup.callback(self.logger.close)
        self._cleanup.callback(self._stop_runs)

    def _stop_runs(self) -> None:
        """Stop all processes, which save a checkpoint first."""
        try:
            stop_processes([run.process for run in self.runs], POLL_SECONDS)
        finally:
            for run in self.runs:
                self.study.add_seconds(run.trial, run.process.seconds)
            self.runs = []

    def resume_trials(self) -> None:
        """Queue the trials that were interrupted, and print a summary of the sweep."""
        self.pending = self.study.interrupted_trials()
        finished = len(self.study.trials()) - len(self.pending)
        print_message(
            f"{self.study.num_trials} trials of `reverie {self.config.command}`\n"
            f"  {self.goal} {self.config.metric}\n"
            f"  {self.config.sampler} search over {', '.join(self.spec.ranges)}\n"
            f"  sweep folder {self.path}"
        )
        if finished or self.pending:
            print_message(f"  {finished} trials finished, {len(self.pending)} resumed")

    @property
    def is_unfinished(self) -> bool:
        """True if runs are active, or trials have not started or finished."""
        return bool(self.runs or self.pending or self.study.has_more)

    def start_runs(self) -> None:
        """Fill the free slots with the next seeds of pending trials or new trials."""
        while self.slots.free:
            if not self.pending:
                if not self.study.has_more:
                    return
                self.pending.append(self.study.start_trial())
            trial = self.pending[0]
            started = {run.seed for run in self.runs if run.trial is trial}
            started |= set(trial.values)
            seeds = [s for s in range(self.config.seeds) if s not in started]
            if len(seeds) <= 1:  # its last run is started now
                self.pending.pop(0)
            if seeds:
                self._start(trial, seeds[0])
            elif len(trial.values) == self.config.seeds:
                # all its runs had ended before the sweep was interrupted
                self._complete(trial)

    def check_runs(self) -> None:
        """Process the results of runs that have ended, and prune others."""
        for run in list(self.runs):
            code = run.process.poll()
            if code is not None:
                self.runs.remove(run)
                self._on_exit(run, code)
            elif self.config.prune and run.seed == 0 and not run.is_eval:
                self._prune_if_worse(run)

    def finish(self) -> None:
        """Write the plot, and print the table unless the sweep was asked to stop."""
        if self.stopper.is_set():
            self._stop_runs()
        trials = self.write_tables()
        plot = plot_trials(self.spec, trials, self.goal)
        write_image(self.path / "plot.png", plot)
        self._log({"plot": plot})
        self.stopper.raise_if_stopped()
        failed = [trial for trial in trials if trial.state == "failed"]
        best = best_trial(trials, self.goal)
        if best is None and failed:
            raise UserError(
                f"All {len(failed)} trials failed; trial {failed[-1].number}: "
                f"{failed[-1].error}\n  Fix: correct this error and choose another "
                f"--logdir; the output of the trials is in {self.path / 'trials'}."
            )
        print(format_table(trials, self.spec.ranges, self.goal))
        if best is not None:
            arguments = shlex.join(self.spec.arguments(best.params))
            print(f"Best: reverie {self.config.command} {arguments}")
        print(f"{self.path / 'table.csv'}\n{self.path / 'plot.png'}")

    def write_tables(self) -> list[Trial]:
        """Write the results so far; return all trials."""
        trials = self.study.trials()
        text = format_table(trials, self.spec.ranges, self.goal) + "\n"
        rows = format_csv(trials, self.spec.ranges, self.goal)
        write_file(self.path / "table.txt", text.encode())
        write_file(self.path / "table.csv", rows.encode())
        return trials

    def run_folder(self, number: int, seed: int) -> Path:
        return self.path / "trials" / f"{number:04d}-seed{seed}"

    def _start(self, trial: RunningTrial, seed: int, is_eval: bool = False) -> None:
        """Start the training or the evaluation of one seed of a trial."""
        folder = self.run_folder(trial.number, seed)
        if is_eval:
            arguments = ["eval", str(folder), *shlex.split(self.config.eval or "")]
        else:
            arguments = [self.config.command, *self.spec.arguments(trial.params)]
            if "seed" not in trial.params:
                arguments += ["--seed", str(self.spec.seed + seed)]
            if self.config.wandb:
                arguments += ["--logger.outputs+", "wandb"]
            arguments += ["--logdir", str(folder)]
        if is_everything_allowed():
            arguments.append("--trust")
        slot = self.slots.free.pop(0)
        log, group = folder.with_name(folder.name + ".log"), self.path.name
        process = self.slots.start(arguments, log, slot, {"WANDB_RUN_GROUP": group})
        self.runs.append(TrialRun(trial, seed, process, folder, is_eval))

    def _on_exit(self, run: TrialRun, code: int) -> None:
        """Record the result of a run that has ended, or start its evaluation."""
        self.slots.free.append(run.process.slot)
        trial, folder, metric = run.trial, run.folder, self.config.metric
        if run.process.stop_requested:
            return
        self.study.add_seconds(trial, run.process.seconds)
        if code:
            self._fail(trial, run.process.error_message(code))
        elif self.config.eval is not None and not run.is_eval:
            self._start(trial, run.seed, is_eval=True)
        elif not (series := read_metric(folder, metric)):
            error = metric_not_found(folder, metric)
            if not self._metric_exists():
                raise error
            self._fail(trial, str(error).split("\n")[0])
        elif not math.isfinite(value := self._summarize(series)):
            self._fail(trial, f"{metric} is not finite.")
        else:
            self.study.record_value(trial, run.seed, value)
            if len(trial.values) == self.config.seeds:
                self._complete(trial)

    def _complete(self, trial: RunningTrial) -> None:
        """Store the objective of a trial whose runs have all finished, and print it."""
        value = self.study.complete(trial)
        best = best_trial(self.write_tables(), self.goal)
        assert best is not None
        assert best.value is not None
        best_so_far = f"best {format_number(best.value)} of trial {best.number}"
        _print_trial(trial, f"{format_number(value)}, {best_so_far}")
        params = trial.params.items()
        numbers = {k: float(v) for k, v in params if not isinstance(v, str)}
        self._log({"value": value, "best": best.value, **numbers})

    def _fail(self, trial: RunningTrial, error: str) -> None:
        """Record that a trial failed, and stop its other runs."""
        self.study.fail(trial, error)
        self._stop_trial(trial)
        self.write_tables()
        _print_trial(trial, f"failed: {error}")

    def _prune_if_worse(self, run: TrialRun) -> None:
        """Stop a trial that is worse than the median of the finished trials.

        Only the first seed of each trial is compared.
        """
        now, process = time.monotonic(), run.process
        if now - run.last_prune_check < PRUNE_SECONDS or process.stop_requested:
            return
        run.last_prune_check = now
        series = read_metric(run.folder, self.config.metric)
        done = [t.number for t in self.study.trials() if t.state == "done"]
        for number in done:
            if number not in self._series:
                folder = self.run_folder(number, 0)
                self._series[number] = read_metric(folder, self.config.metric)
        others = [self._series[number] for number in done]
        if not self._is_worse_than_median(series, others):
            return
        value, step = self._summarize(series), series[-1][0]
        self.study.add_seconds(run.trial, process.seconds)
        self.study.prune(run.trial, value, step)
        self._stop_trial(run.trial)
        self.write_tables()
        _print_trial(run.trial, f"pruned at step {step:g} with {format_number(value)}")

    def _is_worse_than_median(
        self, series: MetricSeries, others: Sequence[MetricSeries]
    ) -> bool:
        """True if a run is worse than the median of others at the run's last step.

        False if too few others have reached this step, if the run has just started, or
        if it has reached the last step of at least half of the others.
        """
        others = [other for other in others if other]
        if not series or len(others) < PRUNE_MIN_TRIALS:
            return False
        step, end = series[-1][0], float(np.median([o[-1][0] for o in others]))
        if not PRUNE_MIN_PROGRESS * end <= step < end:
            return False
        up_to_step = [[pair for pair in other if pair[0] <= step] for other in others]
        values = [self._summarize(part) for part in up_to_step if part]
        if len(values) < PRUNE_MIN_TRIALS:
            return False
        sign = 1 if self.goal == "min" else -1
        return sign * self._summarize(series) > sign * float(np.nanmedian(values))

    def _stop_trial(self, trial: RunningTrial) -> None:
        """Stop the runs of a trial, and do not start its other runs."""
        self.pending = [other for other in self.pending if other is not trial]
        for run in self.runs:
            if run.trial is trial:
                run.process.stop()

    def _summarize(self, series: MetricSeries) -> float:
        config = self.config
        return summarize(series, config.summary, config.mean_over, self.goal)

    def _metric_exists(self) -> bool:
        """True if any run has the metric, so its name is not misspelled."""
        if any(trial.value is not None for trial in self.study.trials()):
            return True
        folders = [path for path in (self.path / "trials").iterdir() if path.is_dir()]
        return any(read_metric(folder, self.config.metric) for folder in folders)

    def _log(self, metrics: Metrics) -> None:
        """Log metrics of the sweep; the step is the number of trials with a value."""
        with_value = [t for t in self.study.trials() if t.value is not None]
        self.logger.add(metrics, prefix="sweep")
        self.logger.write(len(with_value))


def refuse_changed_spec(saved: Path, spec: SweepSpec, trials: Sequence[Trial]) -> None:
    """Raise an error if new trials could not be compared with those in the folder."""
    old, new = read_config_file(saved), yaml.safe_load(spec.to_yaml())
    has_results = any(trial.state in ("done", "pruned") for trial in trials)
    changeable = {*CHANGEABLE_OPTIONS, *(() if has_results else OBJECTIVE_OPTIONS)}
    changed = [k for k in new if k not in changeable and old.get(k) != new[k]]
    if changed:
        key = changed[0]
        raise UserError(
            f"The sweep in {saved.parent} was started with {key} {old.get(key)!r}, not "
            f"{new[key]!r}.\n  Fix: choose another --logdir, or continue it with "
            f"`reverie sweep --logdir {saved.parent}`."
        )


def plot_trials(spec: SweepSpec, trials: Sequence[Trial], goal: Goal) -> np.ndarray:
    """Plot the objective over the trials and over each hyperparameter."""
    shown = [t for t in trials if t.value is not None and math.isfinite(t.value)]
    panels = [SweepAxis("trial", [float(trial.number) for trial in shown])]
    for name, range_ in spec.ranges.items():
        numeric = isinstance(range_, NumericRange)
        params = [trial.params.get(name, "") for trial in shown]
        x: list[Any] = [float(p) if numeric else str(p) for p in params]
        panels.append(SweepAxis(name, x, range_.log))
    values = [float(t.value) for t in shown if t.value is not None]
    finished = [t.state == "done" for t in shown]
    title = f"{spec.config.metric} of `reverie {spec.config.command}`"
    return draw_sweep(values, finished, panels, goal, title)


def _print_trial(trial: RunningTrial, text: str) -> None:
    print_message(f"trial {trial.number} ({format_params(trial.params)}): {text}")
