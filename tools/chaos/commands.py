"""Section `commands`: random command lines and settings."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from chaos.files import trained_run
from chaos.hostile import STRINGS
from chaos.processes import TIMEOUT, Running
from chaos.sections import Section

# Values of settings:
NUMBERS = ("0", "-1", "1", "2", "3", "0.5", "-1.5", "nan", "inf", "-inf", "1e-12")
HUGE = ("1e9", "9223372036854775808", "1e300", "99999999999999999999", "1e999")
WORDS = ("True", "False", "none", "None", "auto", "all", "catch", "rssm", "cuda", "cpu")
PATTERNS = ("(a+)+$", "[", "(?P<x>", "*", ".*", "\\")
# Commands of `reverie`, and of `reverie data`:
NAMES = ("train", "eval", "data", "draw", "config", "sweep", "envs", "check-env", "bc")
SUBCOMMANDS = ("inspect", "stats", "view", "convert", "split", "merge", "replay", "x")
SIGTERM_AFTER = 20.0
"""Seconds after which a command gets SIGTERM, because valid settings may take long."""


def trial(name: str, rng: random.Random, folder: Path) -> list[str]:
    """Run a random command line; it must succeed, or print a message with a fix."""
    inside = folder / "work"
    inside.mkdir()
    running = Running(CLASSES[name](rng, inside), inside)
    deadline = time.monotonic() + SIGTERM_AFTER
    while running.is_running() and time.monotonic() < deadline:
        time.sleep(0.01)
    codes = {0, 2}
    if running.is_running():
        running.send(signal.SIGTERM)
        codes |= {128 + signal.SIGTERM, -signal.SIGTERM}
    return running.wait(TIMEOUT).problems(codes)


def config_arguments(rng: random.Random, folder: Path) -> list[str]:
    """Return `reverie config` with random settings."""
    return ["config", *random_settings(rng, rng.randint(1, 4))]


def train_arguments(rng: random.Random, folder: Path) -> list[str]:
    """Return a short training with random settings."""
    agent = rng.choice(["dreamer", "dreamer", "random", "iris", "bc", "vta"])
    command = rng.choice(["train", "train", "train_eval"])
    arguments = [command, "--configs", "debug", "--agent", agent, "--task", "catch"]
    arguments += random_settings(rng, rng.randint(1, 3), with_task=False)
    return [*arguments, "--run.steps", "8", "--logdir", str(folder / "run")]


def eval_arguments(rng: random.Random, folder: Path) -> list[str]:
    """Return an evaluation of a trained run with random settings."""
    run = folder / "run"
    run.symlink_to(trained_run())
    return ["eval", str(run), "--episodes", "1", *random_settings(rng, 2, False)]


def data_arguments(rng: random.Random, folder: Path) -> list[str]:
    """Return `reverie data` with random paths, most of them not datasets."""
    (folder / "text").write_text("text")
    paths = [str(trained_run()), str(folder), "text", "absent", "", "hdf5:text"]
    count = rng.randint(0, 3)
    arguments = ["data", rng.choice(SUBCOMMANDS), *rng.choices(paths, k=count)]
    return [
        *arguments,
        *(rng.choice(["--task", "--out", "--x"]), "y")[: rng.randrange(3)],
    ]


def random_arguments(rng: random.Random, folder: Path) -> list[str]:
    """Return a command with random words."""
    values = [*STRINGS, *NUMBERS, *HUGE, *WORDS, *PATTERNS, "--", "-h", "--=", "--a=b"]
    values = [
        value.replace("\x00", "") for value in values
    ]  # arguments of a process cannot contain it
    return [rng.choice([*NAMES, "x", ""]), *rng.choices(values, k=rng.randint(0, 6))]


def random_settings(
    rng: random.Random, count: int, with_task: bool = True
) -> list[str]:
    """Return flags with names of settings, some misspelled, and random values."""
    from reverie.config import settings_of
    from reverie.run.config import Config

    skipped = ("logdir", "run.steps", *(() if with_task else ("task", "agent")))
    names = [name for name in settings_of(Config) if name not in skipped]
    arguments = []
    for _ in range(count):
        name = rng.choice(names)
        pool = rng.choice([NUMBERS, NUMBERS, HUGE, WORDS, PATTERNS, STRINGS])
        value = rng.choice(pool).replace("\x00", "")
        variant = rng.randrange(12)
        if variant == 0:
            name = name.replace("_", "-")
        elif variant == 1:
            place = rng.randrange(len(name))
            name = name[:place] + name[place + 1 :]
        elif variant == 2:
            name += "+"
        arguments += [f"--{name}={value}"] if variant == 3 else [f"--{name}", value]
    return arguments


CLASSES: dict[str, Callable[[random.Random, Path], list[str]]] = {
    "settings of `config`": config_arguments,
    "settings of `train`": train_arguments,
    "settings of `eval`": eval_arguments,
    "paths of `data`": data_arguments,
    "random words": random_arguments,
}

SECTIONS = [
    Section(
        "commands",
        "random command lines and settings",
        lambda: tuple(CLASSES),
        trial,
    )
]
