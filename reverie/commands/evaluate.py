"""`reverie eval`: what a run has learnt, in numbers."""

from __future__ import annotations

from pathlib import Path

from reverie.api import UserError
from reverie.commands.settings import Settings, read_settings


def evaluate(arguments: list[str]) -> int:
    from reverie.data.sources import is_source
    from reverie.run import evaluate as loop
    from reverie.run import judge
    from reverie.run.checkpoint import locate
    from reverie.run.folder import home_of, read_config
    from reverie.run.measure import (
        compare_boundaries,
        in_words,
        measure_boundaries,
        which,
    )

    settings = read_settings(arguments, places=2)
    if not settings.places:
        raise UserError("Which run?\n  Fix: reverie eval LOGDIR")
    episodes = _count(settings, "episodes", 100)
    if episodes < 1:
        raise UserError("--episodes takes at least one.\n  Fix: --episodes 100")
    videos = _count(settings, "videos", 0)
    failures = _count(settings, "failures", loop.FAILURES)
    if settings.names or settings.files:
        raise UserError(
            "An evaluation uses the settings saved with the run.\n"
            "  Fix: leave out --configs and --config; single settings may change."
        )
    logdir = Path(settings.places[0])
    config = read_config(home_of(locate(logdir)))
    if len(settings.places) > 1:
        if not is_source(config.task):
            raise UserError(
                f"{logdir} is evaluated by itself: only boundaries of runs that watch "
                f"are compared.\n  Fix: reverie eval {logdir}"
            )
        other = Path(settings.places[1])
        found = compare_boundaries(logdir, other, episodes, settings.flags)
        print(
            f"Boundaries agree to {found['agreement']:.3f} (Cohen's kappa: 1 is "
            f"always, 0 as by chance) in {which(found)}; they begin at "
            "{:.3f} and {:.3f} of all frames.".format(*found["rates"])
        )
        return 0
    if config.offline.data and "task" not in dict(settings.flags):
        print(judge.in_words(judge.judge_run(logdir, settings.flags)))
        return 0
    if is_source(config.task):
        print(in_words(measure_boundaries(logdir, episodes, settings.flags)))
        return 0
    result = loop.evaluate(
        logdir, episodes, settings.flags, videos=videos, failures=failures
    )
    if "success" in result:
        low, high = 100 * result["success_low"], 100 * result["success_high"]
        print(
            f"{result['task']}: success {100 * result['success']:.1f} % "
            f"(95 % between {low:.1f} and {high:.1f})"
        )
    print(
        f"{result['task']}: score {result['score']:.4g} ± {result['score_std']:.4g} "
        f"(min {result['score_min']:.4g}, max {result['score_max']:.4g}), "
        f"length {result['length']:.4g}, over {result['count']:.0f} episodes"
    )
    if "files" in result:
        print("\n".join(["Films, and episodes that failed:", *result["files"]]))
    return 0


def _count(settings: Settings, name: str, default: int) -> int:
    """A flag of the command's own that counts something."""
    value = str(settings.take(name, default))
    if not value.isdecimal():
        raise UserError(f"--{name} takes a whole number.\n  Fix: --{name} 5")
    return int(value)
