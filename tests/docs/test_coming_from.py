"""The pages for users of other implementations: messages, words, and runs in small."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import pytest

import reverie.run.train  # noqa: F401  # otherwise `main` may print "importing PyTorch"
from reverie.api import UserError
from reverie.cli.main import COMMANDS, main
from reverie.cli.originals import explain_original
from reverie.cli.train import command_config
from reverie.config import settings_of
from reverie.envs import SUITES
from reverie.run.config import Config

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(DOCS.glob("coming-from-*.md"))


def rows(page: Path) -> list[list[str]]:
    """Return the cells of all tables."""
    lines = [x for x in page.read_text().splitlines() if x.startswith("| ")]
    return [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines]


def spans(cell: str) -> list[str]:
    return [text.replace("\\|", "|") for text in re.findall(r"`([^`]+)`", cell)]


def examples() -> list[tuple[str, str]]:
    """Return the commands in `text` blocks and the messages printed below them."""
    texts = "\n".join(page.read_text() for page in PAGES)
    return re.findall(r"^```text\n\$ reverie (.*?)\n(.*?)^```", texts, re.M | re.S)


@pytest.mark.parametrize(("command", "message"), examples())
def test_printed_message_is_exact(command, message, capsys):
    assert main(shlex.split(command)) == 2
    assert capsys.readouterr().err == message


def test_every_page_has_an_example_and_tables():
    assert len(PAGES) == len(examples()) == 4
    assert all(len(rows(page)) > 10 for page in PAGES)


def words_of_originals() -> list[str]:
    """Return the flags and settings in the first column of the tables."""
    all_rows = [row for page in PAGES if "iris" not in page.name for row in rows(page)]
    first = [span for row in all_rows for span in spans(row[0])]
    flags = {each for each in first if each.startswith("--") and "..." not in each}
    of_settings = [row for row in all_rows if "`reverie " not in row[-1]]
    names = [span for row in of_settings for span in spans(row[0])]
    keys = {f"--{each} 1" for each in names if re.fullmatch(r"[a-z]+_[a-z_]+", each)}
    return sorted(each.replace(".*", ".size") for each in flags | keys)


PRESETS_TO_TRY = ("atari100k", "vta_balls", "atari100k vta", "crafter")


@pytest.mark.extended
@pytest.mark.parametrize("line", words_of_originals())
def test_word_of_an_original_is_answered_or_valid(line):
    for value in ("", " True", " bouncing_balls", " bce", " vta", " random"):
        for preset in PRESETS_TO_TRY:
            text = line.removesuffix(" 1") + value if value else line
            words = ["train", "--configs", *preset.split(), *text.split()]
            if explain_original(words, UserError("invalid"), COMMANDS) is not None:
                return
    names = [word[2:] for word in line.split() if word.startswith("--")]
    assert set(names) <= {*settings_of(Config), "configs"}, line


SMALL_PRESET = ("--configs", "debug")
"""Sets a size, so that none has to be chosen for this machine."""


@functools.cache
def commands_to_run() -> list[str]:
    """Return one training command for every suite, agent and command on the pages."""
    found: dict[tuple[str, ...], str] = {}
    for page in PAGES:
        for row in rows(page):
            for span in spans(row[-1]):
                words = shlex.split(span)
                if words[:1] != ["reverie"] or words[1] not in ("train", "train_eval"):
                    continue
                if {"LOGDIR", "balls.json"} & set(words) or "from_checkpoint" in span:
                    continue
                config = command_config(words[1], [*words[2:], *SMALL_PRESET])
                suite = SUITES.get(config.task.partition("_")[0])
                name = suite.name if suite else config.task
                if suite is None or suite.is_installed:
                    key = (words[1], name, config.agent, config.dreamer.world)
                    found.setdefault(key, span)
    return list(found.values())


def small(words: list[str]) -> list[str]:
    """Return a command with very small networks, for a few steps on the CPU."""
    if "--configs" in words:
        after = words.index("--configs") + 1
        while after < len(words) and not words[after].startswith("--"):
            after += 1
        words = [*words[:after], "debug", *words[after:]]
    else:
        words = [*words, "--configs", "debug"]
    config = command_config(words[0], words[1:])
    words += [
        "--run.steps",
        "12",
        "--run.save_every",
        "0",
        "--device",
        "cpu",
        "--logdir",
        "run",
    ]
    words += [
        "--run.log_every",
        "0",
        "--run.report_every",
        "0",
        "--precision",
        "float32",
    ]
    if not config.task.startswith("sequences_"):
        words += ["--run.envs", "2", "--env.length", "10", "--env.vector.workers", "0"]
    if words[0] == "train_eval":
        words += ["--run.eval_every", "0"]
    return words


@pytest.mark.extended_except("*--configs debug*", "*--configs vta_balls*")
@pytest.mark.parametrize("line", commands_to_run())
def test_command_runs_in_small(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    words = shlex.split(line)[1:]
    if "data/maze" in words:
        data = "data maze --out data/maze --train 3 --test 2 --length 40"
        assert main(data.split()) == 0
    assert main(small(words)) == 0, capsys.readouterr().err
    assert (tmp_path / "run" / "ckpt").is_dir()


def test_commands_to_run_cover_the_agents():
    text = "\n".join(commands_to_run())
    assert all(f"--configs {name}" in text for name in ("iris_atari", "vta_maze"))
    assert "train_eval --configs atari100k vta" in text
