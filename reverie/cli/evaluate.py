"""`reverie eval`: evaluate a trained agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from reverie.api import UserError
from reverie.cli.arguments import Arguments, parse_arguments
from reverie.config import check_minimum
from reverie.log.messages import print_message

if TYPE_CHECKING:
    from reverie.evaluation.result import EvalResult


@dataclass(frozen=True)
class EvalOptions:
    episodes: int | None = None
    """Number of episodes, or of sequences for agents that find segment boundaries
    (default: 100; for recordings, all held-out episodes)."""
    videos: int = 0
    """Write videos of the first N episodes, and of the first N failed episodes."""
    failures: int = 10
    """Maximum number of failed episodes to save as a dataset, in `eval/failures`."""
    keep_episodes: bool = False
    """Save all episodes as a dataset in `eval/episodes`, for `reverie data`, `reverie
    offline` and `reverie bc`."""
    follow: bool = False
    """Evaluate every new checkpoint while the run is trained by another process, and
    log the results in `eval`. Ends with the last checkpoint of the run."""

    def __post_init__(self) -> None:
        check_minimum(self, videos=0, failures=0)
        if self.episodes is not None:
            check_minimum(self, episodes=1)

    @property
    def asks_to_record(self) -> bool:
        """True if the user set an option that records episodes of an environment."""
        sets_failures = self.failures != EvalOptions.failures
        return bool(self.videos) or sets_failures or self.keep_episodes


def evaluate(argv: list[str]) -> int:
    """Evaluate a trained agent in its task or on held-out recordings."""
    from reverie.evaluation.follow import follow, wait_for_checkpoint
    from reverie.run.load import is_foreign_checkpoint
    from reverie.run.package import run_path

    arguments = parse_arguments(argv, max_positional=2)
    if not arguments.positional:
        raise UserError(
            "`reverie eval` needs the folder of a run, or a checkpoint of another "
            "implementation.\n  Fix: reverie eval LOGDIR"
        )
    options = arguments.take_options(EvalOptions)
    logdir, *others = map(run_path, arguments.positional)
    if name := dict(arguments.flags).get("checkpoint"):
        path = Path(str(name))
        path = path if path.exists() else logdir / "ckpt" / path.name
        raise UserError(
            "`reverie eval` has no option --checkpoint; give the checkpoint instead of "
            "the run folder.\n"
            f"  Fix: reverie eval {path}"
        )
    if not is_foreign_checkpoint(logdir, arguments.flags):
        arguments.refuse_presets("An evaluation uses the settings saved with the run.")
    if others and options.follow:
        raise UserError(
            f"--follow evaluates a single run.\n  Fix: reverie eval {logdir} --follow"
        )
    if options.follow:
        print_message(f"Evaluating each new checkpoint of {logdir}; Ctrl-C stops.")
        wait_for_checkpoint(logdir)
    evaluate_once, describe = _choose_evaluation(
        logdir, options, arguments, compares=bool(others)
    )
    if others:
        _compare(logdir, others[0], options, arguments)
    elif options.follow:
        has_result = False
        for result in follow(logdir, evaluate_once):
            has_result = True
            print(f"{result.checkpoint}: {describe(result)}", flush=True)
        if not has_result:
            print_message("The run has no new checkpoint with a trained policy.")
    else:
        print(describe(evaluate_once(logdir)))
    return 0


def _choose_evaluation(
    logdir: Path, options: EvalOptions, arguments: Arguments, compares: bool
) -> tuple[Callable[[Path], EvalResult], Callable[[EvalResult], str]]:
    """Return the evaluation function for this run, and one that formats its result.

    `compares` is True if the run is compared with another one.
    """
    from reverie.evaluation import boundaries, recordings
    from reverie.evaluation import episodes as env_episodes
    from reverie.run.load import is_foreign_checkpoint, open_run
    from reverie.run.used_settings import (
        check_flags_used,
        unused_in_environment,
        with_used_flags,
    )

    flags, presets, files = arguments.flags, arguments.presets, arguments.files
    if is_foreign_checkpoint(logdir, flags):  # has no saved settings
        config = open_run(logdir, flags, presets=presets, files=files).config
    else:
        config = open_run(logdir, replaces_task="task" in dict(flags)).config
    on_sequence_dataset = config.agent_config.sequence_window is not None
    on_recordings = bool(config.offline.data) and "task" not in dict(flags)
    in_environment = not (on_sequence_dataset or on_recordings)
    unused = unused_in_environment(config) if in_environment else ()
    if is_foreign_checkpoint(logdir, flags):
        check_flags_used(config, "eval", flags, unused)
    else:
        names = [field.name for field in fields(EvalOptions)]
        # only for its errors; the evaluation applies the flags later
        with_used_flags(config, "eval", flags, unused, names)
    if (on_sequence_dataset or on_recordings) and options.asks_to_record:
        raise UserError(
            f"{logdir} is evaluated on recorded data, not in an environment, so there "
            "are no episodes to record.\n  Fix: remove --videos, --failures and "
            "--keep-episodes, or add --task TASK."
        )
    if compares and not on_sequence_dataset:
        raise UserError(
            "Two runs are compared by their segment boundaries, but the agent of "
            f"{logdir} has none.\n  Fix: reverie eval {logdir}"
        )
    count = options.episodes or 100
    if on_sequence_dataset:
        return (
            lambda path: boundaries.eval_boundaries(path, count, flags, presets, files),
            boundaries.describe,
        )
    if on_recordings:
        limit = [("offline.eval.episodes", options.episodes)]
        settings = [*flags, *(limit if options.episodes else [])]
        return (
            lambda path: recordings.eval_recordings(path, settings),
            recordings.describe,
        )
    return (
        lambda path: env_episodes.evaluate(
            path,
            count,
            flags,
            videos=options.videos,
            failures=options.failures,
            keep_episodes=options.keep_episodes,
            presets=presets,
            files=files,
        ),
        env_episodes.describe,
    )


def _compare(
    logdir: Path, other: Path, options: EvalOptions, arguments: Arguments
) -> None:
    """Print the agreement of the segment boundaries of two runs."""
    from reverie.evaluation import boundaries

    count = options.episodes or 100
    agreement = boundaries.compare_boundaries(
        logdir, other, count, arguments.flags, arguments.presets, arguments.files
    )
    print(boundaries.describe_agreement(agreement))
