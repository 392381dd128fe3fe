"""Search for settings: many runs of one command, each with other values.

A study proposes points (`study.py`); runs are processes (`children.py`) in folders of
their own, judged by the metrics they leave (`objective.py`). All that is known is on
disk at any time: the same folder goes on, finished trials stay, and those that were in
work resume from their checkpoints.

logdir/
  sweep.yaml               what is searched, and how
  study.journal            every trial, in Optuna's form
  trials/0007-seed0/       the folder of a run
  trials/0007-seed0.log    what it printed
  table.csv, table.txt     the trials from best to worst
  plot.png                 the same as a picture
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import yaml

from reverie.api import Metrics, UserError
from reverie.log.logger import Logger, LoggerConfig, make_logger
from reverie.log.terminal import format_number
from reverie.render.sweep import Panel, draw_sweep
from reverie.render.video import write_image
from reverie.run.folder import hold, place
from reverie.run.signals import Stopper
from reverie.storage.atomic import write_file
from reverie.sweep.objective import (
    Goal,
    Points,
    Take,
    complain,
    outcome,
    points_of,
)
from reverie.sweep.plan import Plan, read_file
from reverie.sweep.processes import Child, Slots
from reverie.sweep.ranges import Between
from reverie.sweep.study import Attempt, Study
from reverie.sweep.trials import Trial, as_csv, best_of, in_words, table

PROGRAM = (sys.executable, "-m", "reverie")
PLAN, JOURNAL = "sweep.yaml", "study.journal"

FREE = ("trials", "jobs", "prune", "sampler", "wandb", "logdir")
"""What may change between two starts."""
JUDGING = ("metric", "take", "last", "eval", "seeds")
"""What may change besides, as long as no trial is judged."""

PAUSE = 0.2
"""Seconds between two looks at the processes ..."""
LOOK = 5.0
"""... and at the metrics of one, to see whether it is worth going on."""

ENOUGH = 4
"""Finished trials that a median needs."""
EARLY = 0.25
"""The part of a run before which nobody is judged."""


def sweep(plan: Plan, program: Sequence[str] = PROGRAM) -> Path:
    """Run all trials, or those that are left; returns the folder of the sweep."""
    with Sweep(plan, program) as search:
        search.introduce()
        while search.busy and not search.stopper.asked:
            search.start_runs()
            search.look()
            time.sleep(PAUSE)
        search.finish()
    return search.path


@dataclass
class Work:
    """A run of a trial, in the stage it is in."""

    attempt: Attempt
    seed: int
    child: Child
    folder: Path
    evaluates: bool = False
    looked: float = 0.0


class Sweep:
    """The parts of a sweep, and the verbs of its loop."""

    def __init__(self, plan: Plan, program: Sequence[str] = PROGRAM):
        self.path = place(plan.config.logdir)
        self.plan = replace(plan, config=replace(plan.config, logdir=str(self.path)))
        self.config = plan.config
        self.stopper = Stopper()
        any_gpu = "device" not in {*plan.settings, *plan.ranges}
        self.slots = Slots(program, plan.config.jobs, any_gpu)
        self.attempts: list[Attempt] = []  # with seeds that were not started yet
        self.works: list[Work] = []
        self._curves: dict[int, Points] = {}
        self._lock: IO[str] | None = None
        self._logger: Logger | None = None

    @property
    def goal(self) -> Goal:
        return "max" if self.config.goal == "max" else "min"

    def __enter__(self) -> Sweep:
        self._refuse_others()
        self._lock = hold(self.path, "sweep folder")
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, UserError):
            for work in self.works:
                work.child.kill()
        self.close()

    def _open(self) -> None:
        old = self.path / PLAN
        self.study = Study(self.path / JOURNAL, self.plan)
        trials = self.study.trials()
        if old.exists() and trials:
            refuse_changes(old, self.plan, trials)
        write_file(old, self.plan.dump().encode())
        (self.path / "trials").mkdir(exist_ok=True)
        self.stopper.__enter__()
        outputs = LoggerConfig(outputs=("wandb",) if self.config.wandb else ())
        settings = yaml.safe_load(self.plan.dump())
        self._logger = make_logger(outputs, self.path, settings=settings)

    def close(self) -> None:
        """Let what still runs save and end."""
        try:
            for work in self.works:
                work.child.stop()
            while any(work.child.poll() is None for work in self.works):
                time.sleep(PAUSE)
        finally:
            for work in self.works:
                work.child.kill()
                self.study.spend(work.attempt, work.child.seconds)
            self.works = []
            self.stopper.__exit__(None, None, None)
            for part in (self._logger, self._lock):
                if part is not None:
                    part.close()
            self._logger = self._lock = None

    def _refuse_others(self) -> None:
        """Leave folders alone that hold something else."""
        if (self.path / "config.yaml").exists():
            raise UserError(
                f"{self.path} is the folder of a run, not of a sweep.\n"
                "  Fix: give another --logdir."
            )

    # The verbs of the loop.

    def introduce(self) -> None:
        """Take up what was interrupted, and say what there is to do."""
        self.attempts = self.study.interrupted()
        done = len(self.study.trials()) - len(self.attempts)
        self._say(f"{self.study.wanted} trials of `reverie {self.config.command}`")
        self._say(f"  {self.goal} {self.config.metric}, {in_ranges(self.plan)}")
        self._say(f"  sweep folder {self.path}")
        if done or self.attempts:
            self._say(f"{done} trials are there, {len(self.attempts)} go on.")

    @property
    def busy(self) -> bool:
        return bool(self.works or self.attempts or self.study.has_more)

    def start_runs(self) -> None:
        """Fill the slots: seeds of trials in work first, then another trial."""
        while self.slots.free:
            if not self.attempts:
                if not self.study.has_more:
                    return
                self.attempts.append(self.study.ask())
            attempt = self.attempts[0]
            begun = {w.seed for w in self.works if w.attempt is attempt}
            seeds = range(self.config.seeds)
            left = [s for s in seeds if s not in begun and s not in attempt.values]
            if len(left) <= 1:
                self.attempts.pop(0)
            if left:
                self._start(attempt, left[0])
            elif len(attempt.values) == self.config.seeds:
                self._conclude(attempt)

    def look(self) -> None:
        """See who has ended, and who should."""
        for work in list(self.works):
            code = work.child.poll()
            if code is not None:
                self.works.remove(work)
                self._ended(work, code)
            elif self.config.prune and work.seed == 0 and not work.evaluates:
                self._judge_early(work)

    def finish(self) -> None:
        """Draw what is known, and print it unless the sweep was asked to stop."""
        if self.stopper.asked is not None:
            self.close()
        trials = self.write()
        plot = picture(self.plan, trials, self.goal)
        write_image(self.path / "plot.png", plot)
        self._log({"plot": plot})
        self.stopper.check()
        failed = [trial for trial in trials if trial.state == "failed"]
        best = best_of(trials, self.goal)
        if best is None and failed:
            raise UserError(
                f"All {len(failed)} trials failed; trial {failed[-1].number}: "
                f"{failed[-1].note}\n  Fix: mend that, and give another --logdir; what "
                f"they printed is in {self.path / 'trials'}."
            )
        print(table(trials, self.plan.ranges, self.goal))
        if best is not None:
            words = shlex.join(self.plan.words(best.point))
            print(f"Best: reverie {self.config.command} {words}")
        print(f"{self.path / 'table.csv'}\n{self.path / 'plot.png'}")

    def write(self) -> list[Trial]:
        """The table of all that is known."""
        trials = self.study.trials()
        ranges = self.plan.ranges
        text = table(trials, ranges, self.goal) + "\n"
        write_file(self.path / "table.txt", text.encode())
        write_file(self.path / "table.csv", as_csv(trials, ranges, self.goal).encode())
        return trials

    # One run.

    def folder(self, number: int, seed: int) -> Path:
        return self.path / "trials" / f"{number:04d}-seed{seed}"

    def _start(self, attempt: Attempt, seed: int, evaluates: bool = False) -> None:
        folder = self.folder(attempt.number, seed)
        if evaluates:
            words = ["eval", str(folder), *shlex.split(self.config.eval or "")]
        else:
            words = [self.config.command, *self.plan.words(attempt.point)]
            if "seed" not in attempt.point:
                words += ["--seed", str(self.plan.seed + seed)]
            if self.config.wandb:
                words += ["--logger.outputs+", "wandb"]
            words += ["--logdir", str(folder)]
        slot = self.slots.free.pop(0)
        log = folder.with_name(folder.name + ".log")
        group = {"WANDB_RUN_GROUP": self.path.name}
        child = self.slots.start(words, log, slot, group)
        self.works.append(Work(attempt, seed, child, folder, evaluates))

    def _ended(self, work: Work, code: int) -> None:
        self.slots.free.append(work.child.slot)
        attempt, folder = work.attempt, work.folder
        if work.child.deadline is not None:  # it was told to
            return
        self.study.spend(attempt, work.child.seconds)
        if code:
            self._fail(attempt, work.child.complaint(code))
            return
        if self.config.eval is not None and not work.evaluates:
            self._start(attempt, work.seed, evaluates=True)
            return
        points = points_of(folder, self.config.metric)
        if not points:
            error = complain(folder, self.config.metric)
            if not self._known():
                raise error
            self._fail(attempt, str(error).split("\n")[0])
            return
        value = self._outcome(points)
        if not math.isfinite(value):
            self._fail(attempt, f"{self.config.metric} was not finite in the end.")
            return
        self.study.note(attempt, work.seed, value)
        if len(attempt.values) == self.config.seeds:
            self._conclude(attempt)

    def _conclude(self, attempt: Attempt) -> None:
        value = self.study.finish(attempt)
        best = best_of(self.write(), self.goal)
        assert best is not None
        assert best.value is not None
        known = f"best {format_number(best.value)} of trial {best.number}"
        self._tell(attempt, f"{format_number(value)}, {known}")
        point = attempt.point.items()
        numbers = {k: float(v) for k, v in point if not isinstance(v, str)}
        self._log({"value": value, "best": best.value, **numbers})

    def _fail(self, attempt: Attempt, why: str) -> None:
        self.study.fail(attempt, why)
        self._drop(attempt)
        self.write()
        self._tell(attempt, f"failed: {why}")

    def _judge_early(self, work: Work) -> None:
        """End the trial of a run that does worse than others did."""
        if time.monotonic() - work.looked < LOOK or work.child.deadline is not None:
            return
        work.looked = time.monotonic()
        points = points_of(work.folder, self.config.metric)
        done = [t.number for t in self.study.trials() if t.state == "done"]
        others = [self._curve(number) for number in done]
        if not self._hopeless(points, others):
            return
        value, step = self._outcome(points), points[-1][0]
        self.study.spend(work.attempt, work.child.seconds)
        self.study.prune(work.attempt, value, step)
        self._drop(work.attempt)
        self.write()
        self._tell(work.attempt, f"ended at step {step:g} with {format_number(value)}")

    def _hopeless(self, points: Points, others: Sequence[Points]) -> bool:
        """Whether a run is worse than the median of others at the step it reached."""
        others = [other for other in others if other]
        if not points or len(others) < ENOUGH:
            return False
        step, end = points[-1][0], float(np.median([o[-1][0] for o in others]))
        if not EARLY * end <= step < end:
            return False
        until = [[p for p in other if p[0] <= step] for other in others]
        then = [self._outcome(part) for part in until if part]
        if len(then) < ENOUGH:
            return False
        sign = 1 if self.goal == "min" else -1
        return sign * self._outcome(points) > sign * float(np.nanmedian(then))

    def _curve(self, number: int) -> Points:
        if number not in self._curves:
            folder = self.folder(number, 0)
            self._curves[number] = points_of(folder, self.config.metric)
        return self._curves[number]

    def _drop(self, attempt: Attempt) -> None:
        """Stop what still runs of a trial, and start no more of it."""
        self.attempts = [other for other in self.attempts if other is not attempt]
        for work in self.works:
            if work.attempt is attempt:
                work.child.stop()

    def _outcome(self, points: Points) -> float:
        take: Take = self.config.take
        return outcome(points, take, self.config.last, self.goal)

    def _known(self) -> bool:
        """Whether any run has the metric, so that its name cannot be wrong."""
        if any(trial.value is not None for trial in self.study.trials()):
            return True
        runs = (self.path / "trials").iterdir()
        return any(points_of(r, self.config.metric) for r in runs if r.is_dir())

    def _log(self, metrics: Metrics) -> None:
        if self._logger is not None:
            judged = [t for t in self.study.trials() if t.value is not None]
            self._logger.add(metrics, prefix="sweep")
            self._logger.write(len(judged))

    def _tell(self, attempt: Attempt, what: str) -> None:
        self._say(f"trial {attempt.number} ({in_words(attempt.point)}): {what}")

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def refuse_changes(saved: Path, plan: Plan, trials: Sequence[Trial]) -> None:
    """Raise unless the trials of a folder and those to come can be compared."""
    old, new = read_file(saved), yaml.safe_load(plan.dump())
    judged = any(trial.state in ("done", "pruned") for trial in trials)
    free = FREE if judged else (*FREE, *JUDGING)
    changed = [k for k in new if k not in free and old.get(k) != new[k]]
    if changed:
        key = changed[0]
        raise UserError(
            f"The sweep in {saved.parent} was begun with {key} "
            f"{old.get(key)!r}, not {new[key]!r}.\n"
            "  Fix: give another --logdir, or go on with `reverie sweep --logdir "
            f"{saved.parent}`."
        )


def in_ranges(plan: Plan) -> str:
    """What is searched, and how, in words."""
    how = {"bayes": "searching", "random": "drawing", "grid": "trying all"}
    return f"{how[plan.config.sampler]} {', '.join(plan.ranges)}"


def picture(plan: Plan, trials: Sequence[Trial], goal: Goal) -> np.ndarray:
    """The plot of a sweep, in the order its trials were begun."""
    shown = [t for t in trials if t.value is not None and math.isfinite(t.value)]
    panels = [Panel("trial", [float(trial.number) for trial in shown])]
    for name, range_ in plan.ranges.items():
        places = [trial.point.get(name, "") for trial in shown]
        real = isinstance(range_, Between)
        spots: list[Any] = [float(p) if real else str(p) for p in places]
        panels.append(Panel(name, spots, range_.log))
    values = [float(t.value) for t in shown if t.value is not None]
    whole = [t.state == "done" for t in shown]
    title = f"{plan.config.metric} by `reverie {plan.config.command}`"
    return draw_sweep(values, whole, panels, goal, title)
