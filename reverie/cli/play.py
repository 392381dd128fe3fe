"""`reverie play` and `reverie view`: pages in the browser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from reverie.api import UserError
from reverie.cli.arguments import parse_arguments
from reverie.config import check_minimum
from reverie.plugins import PLAY_PACKAGES, install_command, missing_packages

if TYPE_CHECKING:
    from reverie.play.runs import RunIndex
    from reverie.play.server import Sessions

MODE_FLAGS = {
    "u": "human-env",
    "a": "agent-model",
    "w": "human-model",
    "e": "recorded",
}
"""Short flags of the modes, as in Δ-IRIS."""


@dataclass(frozen=True)
class ServerOptions:
    port: int = 0
    """Port of the server; 0 for the first free one from 8642."""
    host: str = "127.0.0.1"
    """Address to listen on. The default can be reached only from this machine or
    through an SSH tunnel."""
    no_open: bool = False
    """Print the address without opening a browser."""

    def __post_init__(self) -> None:
        check_minimum(self, port=0)
        if self.port > 65535:
            raise UserError(f"--port cannot be {self.port}.\n  Fix: --port 8642")


@dataclass(frozen=True)
class PlayOptions(ServerOptions):
    header: bool = False
    """Show episode, step, action, reward, return and speed above the images."""
    seed: int = 0
    """Random seed of episodes and imagined rollouts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, seed=0)


@dataclass(frozen=True)
class ViewOptions(ServerOptions):
    export: str = ""
    """Write a static page to this folder instead of starting a server."""


PLAY_HELP = """\
Modes (they can be changed in the page)
  without a flag  the agent acts in the environment, next to an open-loop prediction
  -u              you act in the environment
  -a              the agent acts in its world model
  -w              you act in the world model
  -e              recorded episodes: replay buffer, evaluations, recordings
  -s              the page asks at the end of each episode whether to save it
"""


def play(argv: list[str]) -> int:
    """Play with a trained agent and its world model in the browser."""
    _check_installed()
    from reverie.play.load import load_run
    from reverie.play.server import Sessions
    from reverie.play.session import Session
    from reverie.run.package import run_path

    mode, ask_to_save, argv = take_short_flags(argv)
    arguments = parse_arguments(argv, max_positional=1)
    if not arguments.positional:
        raise UserError(
            "`reverie play` needs the folder of a run.\n  Fix: reverie play LOGDIR"
        )
    options = arguments.take_options(PlayOptions)
    logdir = run_path(arguments.positional[0])
    # a file is a checkpoint of another implementation, which contains no settings
    if not logdir.expanduser().is_file():
        arguments.refuse_presets("A session uses the settings saved with the run.")
    loaded = load_run(logdir, arguments.flags, arguments.presets, arguments.files)
    reasons = loaded.unavailable_reasons()
    if mode and reasons[mode]:
        raise UserError(
            f"This mode is not available: {reasons[mode]}.\n"
            f"  Fix: reverie play {logdir}, and choose a mode in the page."
        )
    mode = mode or next((name for name, reason in reasons.items() if not reason), "")
    if not mode:
        problems = "; ".join(sorted(set(reasons.values())))
        raise UserError(
            f"{logdir} cannot be played: {problems}.\n"
            "  Fix: install the simulator of the task, or continue the training."
        )
    session = Session(loaded, mode, options.seed, ask_to_save, options.header)

    def make_sessions() -> Sessions:  # called in the event loop of the server
        sessions = Sessions()
        sessions.add("", session)
        return sessions

    _serve(make_sessions, options)
    return 0


def view(argv: list[str]) -> int:
    """Show all runs below a folder in the browser: status, curves, videos, configs."""
    _check_installed()
    from reverie.play.load import load_run
    from reverie.play.runs import RunIndex
    from reverie.play.server import Sessions
    from reverie.play.session import Session

    arguments = parse_arguments(argv, max_positional=1)
    if not arguments.positional:
        raise UserError(
            "`reverie view` needs a folder with runs.\n  Fix: reverie view logdir"
        )
    options = arguments.take_options(ViewOptions)
    names = [field.name for field in fields(ViewOptions)]
    arguments.refuse_other_flags("reverie view", names)
    runs = RunIndex(Path(arguments.positional[0]).expanduser())
    if options.export:
        from reverie.play.export import export

        print(export(runs, Path(options.export).expanduser()))
        return 0

    def open_run(name: str) -> Session:
        loaded = load_run(runs.folder_of(name))
        reasons = loaded.unavailable_reasons()
        mode = next((key for key, reason in reasons.items() if not reason), "recorded")
        return Session(loaded, mode)

    _serve(lambda: Sessions(open_run), options, runs)
    return 0


def _serve(
    make_sessions: Callable[[], Sessions],
    options: ServerOptions,
    runs: RunIndex | None = None,
) -> None:
    """Start the web server, and print its address."""
    from reverie.play.server import serve

    def print_address(address: str) -> None:
        print(f"Open {address}\nStop with Ctrl-C.", flush=True)

    open_page = not options.no_open
    serve(make_sessions, options.host, options.port, open_page, runs, print_address)


def take_short_flags(argv: list[str]) -> tuple[str, bool, list[str]]:
    """Return the mode, whether to ask to save episodes (`-s`), and the rest."""
    modes, ask_to_save, others = [], False, []
    for word in argv:
        letters = set(word[1:])
        # several letters can be combined: `-us`
        if word[:1] == "-" and word[1:2] != "-" and letters <= {*MODE_FLAGS, "s"}:
            ask_to_save = ask_to_save or "s" in letters
            modes += [MODE_FLAGS[letter] for letter in word[1:] if letter != "s"]
        elif word[:1] == "-" and word[1:2].isalpha():
            raise UserError(
                f"`reverie play` has no flag {word}.\n"
                "  Fix: choose from -u, -a, -w, -e and -s (`reverie play --help`)."
            )
        else:
            others.append(word)
    if len(set(modes)) > 1:
        raise UserError(
            "A session starts in one mode.\n  Fix: give one of -u, -a, -w and -e."
        )
    return modes[0] if modes else "", ask_to_save, others


def _check_installed() -> None:
    """Raise an error if the packages of the web server are not installed."""
    if missing := missing_packages(PLAY_PACKAGES):
        raise UserError(
            f"The web page needs {', '.join(missing)}, which is not installed.\n"
            f"  Fix: {install_command('play')}"
        )
