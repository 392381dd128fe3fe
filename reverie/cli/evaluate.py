"""`reverie eval`: what a run has learnt, in numbers."""

from __future__ import annotations

from pathlib import Path

from reverie.api import UserError
from reverie.cli.settings import Settings, read_settings


def evaluate(arguments: list[str]) -> int:
    from reverie.datasets.sequences import is_source
    from reverie.evaluation import boundaries as measure
    from reverie.evaluation import episodes as loop
    from reverie.evaluation import recordings as judge
    from reverie.run.checkpoint import locate
    from reverie.run.folder import home_of, read_config

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
    acts = "task" in dict(settings.flags) or not (
        config.offline.data or is_source(config.task)
    )
    if not acts and (videos or failures != loop.FAILURES):
        raise UserError(
            f"{logdir} is measured without acting, so there is nothing to film or keep."
            "\n  Fix: leave out --videos and --failures, or give --task TASK."
        )
    if len(settings.places) > 1:
        if not is_source(config.task):
            raise UserError(
                f"{logdir} is evaluated by itself: only boundaries of runs that watch "
                f"are compared.\n  Fix: reverie eval {logdir}"
            )
        other = Path(settings.places[1])
        found = measure.compare_boundaries(logdir, other, episodes, settings.flags)
        print(measure.agreement_in_words(found))
    elif config.offline.data and "task" not in dict(settings.flags):
        print(judge.in_words(judge.judge_run(logdir, settings.flags)))
    elif is_source(config.task):
        found = measure.measure_boundaries(logdir, episodes, settings.flags)
        print(measure.in_words(found))
    else:
        found = loop.evaluate(
            logdir, episodes, settings.flags, videos=videos, failures=failures
        )
        print(loop.in_words(found))
    return 0


def _count(settings: Settings, name: str, default: int) -> int:
    """A flag of the command's own that counts something."""
    value = str(settings.take(name, default))
    if not value.isdecimal():
        raise UserError(f"--{name} takes a whole number.\n  Fix: --{name} 5")
    return int(value)
