"""`reverie eval`: evaluate a trained agent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reverie.api import UserError
from reverie.cli.arguments import parse_arguments


@dataclass(frozen=True)
class EvalOptions:
    episodes: int = 100
    """Episodes to play, or sequences to segment."""
    videos: int = 0
    """Episodes to record as videos, and as many failed ones."""
    failures: int = 10
    """Failed episodes to save as recordings."""


def evaluate(words: list[str]) -> int:
    """Evaluate a trained agent in its task or on held-out recordings."""
    from reverie.datasets.sequences import is_sequence_task
    from reverie.evaluation import boundaries, episodes, recordings
    from reverie.run.checkpoint import find_checkpoint
    from reverie.run.folder import read_config, run_folder_of

    arguments = parse_arguments(words, max_positional=2)
    if not arguments.positional:
        raise UserError(
            "`reverie eval` needs the folder of a run.\n  Fix: reverie eval LOGDIR"
        )
    options = arguments.take_options(EvalOptions)
    for name, least in (("episodes", 1), ("videos", 0), ("failures", 0)):
        if getattr(options, name) < least:
            raise UserError(f"--{name} must be at least {least}.\n  Fix: --{name} 5")
    arguments.refuse_blocks("An evaluation uses the settings saved with the run.")
    flags, count = arguments.flags, options.episodes
    logdir = Path(arguments.positional[0])
    config = read_config(run_folder_of(find_checkpoint(logdir)))
    in_env = "task" in dict(flags) or not (
        config.offline.data or is_sequence_task(config.task)
    )
    if not in_env and (options.videos or options.failures != EvalOptions.failures):
        raise UserError(
            f"{logdir} is evaluated on recordings, not in an environment, so there are "
            "no episodes to record.\n"
            "  Fix: remove --videos and --failures, or add --task TASK."
        )
    if len(arguments.positional) > 1:
        if not is_sequence_task(config.task):
            raise UserError(
                f"{logdir} cannot be compared with another run: only segment "
                "boundaries of runs on sequences are compared.\n"
                f"  Fix: reverie eval {logdir}"
            )
        other = Path(arguments.positional[1])
        result = boundaries.compare_boundaries(logdir, other, count, flags)
        print(boundaries.agreement_in_words(result))
    elif config.offline.data and "task" not in dict(flags):
        print(recordings.in_words(recordings.judge_run(logdir, flags)))
    elif is_sequence_task(config.task):
        result = boundaries.measure_boundaries(logdir, count, flags)
        print(boundaries.in_words(result))
    else:
        result = episodes.evaluate(
            logdir, count, flags, videos=options.videos, failures=options.failures
        )
        print(episodes.in_words(result))
    return 0
