"""`reverie eval`: evaluate a trained agent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reverie.api import UserError
from reverie.cli.arguments import parse_arguments
from reverie.config import check_minimum


@dataclass(frozen=True)
class EvalOptions:
    episodes: int = 100
    """Number of episodes, or of sequences for agents that find segment boundaries."""
    videos: int = 0
    """Write videos of the first N episodes, and of the first N failed episodes."""
    failures: int = 10
    """Maximum number of failed episodes to save as a dataset, in `eval/failures`."""

    def __post_init__(self) -> None:
        check_minimum(self, episodes=1, videos=0, failures=0)


def evaluate(words: list[str]) -> int:
    """Evaluate a trained agent in its task or on held-out recordings."""
    from reverie.evaluation import boundaries, recordings
    from reverie.evaluation import episodes as env_episodes
    from reverie.run.load import open_run

    arguments = parse_arguments(words, max_positional=2)
    if not arguments.positional:
        raise UserError(
            "`reverie eval` needs the folder of a run.\n  Fix: reverie eval LOGDIR"
        )
    options = arguments.take_options(EvalOptions)
    flags, episodes = arguments.flags, options.episodes
    logdir = Path(arguments.positional[0])
    blocks, files = arguments.blocks, arguments.files
    if logdir.expanduser().is_file():
        config = open_run(logdir, flags, blocks=blocks, files=files).config
    else:
        arguments.refuse_blocks("An evaluation uses the settings saved with the run.")
        config = open_run(logdir).config
    on_sequences = config.agent_config.sequence_window is not None
    on_recordings = bool(config.offline.data) and "task" not in dict(flags)
    in_env = not (on_sequences or on_recordings)
    if not in_env and (options.videos or options.failures != EvalOptions.failures):
        raise UserError(
            f"{logdir} is evaluated on recorded data, not in an environment, so there "
            "are no episodes to record.\n"
            "  Fix: remove --videos and --failures, or add --task TASK."
        )
    if len(arguments.positional) > 1:
        if not on_sequences:
            raise UserError(
                f"{logdir} cannot be compared with another run: only segment "
                "boundaries of runs on sequences are compared.\n"
                f"  Fix: reverie eval {logdir}"
            )
        other = Path(arguments.positional[1])
        agreement = boundaries.compare_boundaries(logdir, other, episodes, flags)
        print(boundaries.describe_agreement(agreement))
    elif on_sequences:
        result = boundaries.eval_boundaries(logdir, episodes, flags)
        print(boundaries.describe(result))
    elif on_recordings:
        print(recordings.describe(recordings.eval_recordings(logdir, flags)))
    else:
        result = env_episodes.evaluate(
            logdir,
            episodes,
            flags,
            videos=options.videos,
            failures=options.failures,
            blocks=blocks,
            files=files,
        )
        print(env_episodes.describe(result))
    return 0
