"""What the README and the docs print is true: commands parse, snippets run, links hold.

A command that would train for long only has its settings resolved, which fails for
every flag, block or task that no longer exists; quick ones are run.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.arguments import parse_arguments, to_config
from reverie.cli.bench import parse_bench_arguments, parse_bench_envs_arguments
from reverie.cli.data import data_commands, parse_data_arguments
from reverie.cli.draw import FIGURES, DrawOptions
from reverie.cli.evaluate import EvalOptions
from reverie.cli.main import COMMANDS, main
from reverie.cli.sweep import parse_sweep_arguments
from reverie.cli.train import BASE_BLOCKS, command_config
from reverie.run.config import Config

ROOT = Path(__file__).resolve().parent.parent
README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]

QUICK = ("check-env", "config", "envs")
"""Commands that are run as they stand."""

FORMS = ("LOGDIR", "TASK", "COMMAND")
"""Words that stand for what a reader fills in."""

FOREIGN = ("--gpus",)
"""Flags of other programs."""


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M)
    return [text for language, text in fences if language in languages]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)


def spans(page: Path) -> list[str]:
    """What stands between backticks in running text."""
    return [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose(page))]


def shell_lines(page: Path) -> list[str]:
    """Every command, from blocks and from running text."""
    shell = "\n".join(blocks(page, "sh", "bash", "console")).replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ") for line in shell.splitlines()]
    return [*lines, *spans(page)]


def printed(start: str) -> list[tuple[str, str]]:
    """Every printed line that starts so, with its page."""
    found = {(p.name, x) for p in PAGES for x in shell_lines(p) if x.startswith(start)}
    return sorted(found)


def example_env() -> str:
    """What `docs/add-an-environment.md` asks to save as `my_env.py`."""
    return blocks(DOCS / "add-an-environment.md", "python")[0]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder with the documented environment in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_env.py").write_text(example_env())
    saved_plans()
    return tmp_path


def saved_plans() -> list[str]:
    """The files that `docs/sweep.md` shows, here, under the names they have there."""
    names = []
    for text in blocks(DOCS / "sweep.md", "yaml"):
        names.append(text.splitlines()[0].removeprefix("# "))
        Path(names[-1]).write_text(text)
    return names


def test_there_is_something_to_check():
    lines = [line for _, line in printed("reverie ")]
    assert len(lines) > 10
    assert {line.split()[1] for line in lines} >= {"train", "eval", "config"}
    assert len(printed("--")) > 10
    assert blocks(README, "python")


def understand(words: list[str]) -> None:
    """Raise, or fail, unless the command line would be accepted."""
    name, rest = words[0], words[1:]
    assert name in COMMANDS, f"there is no command {name!r}"
    if "--help" in rest:
        assert main(words) == 0
    elif name in BASE_BLOCKS:
        command_config(name, rest)
    elif name == "envs" or (name in QUICK and rest and not set(FORMS) & set(rest)):
        assert main(words) == 0
    elif name in ("eval", "check-env"):
        arguments = parse_arguments(rest, max_positional=2 if name == "eval" else 1)
        assert arguments.positional or not rest
        arguments.take_options(EvalOptions)
        to_config(arguments)
    elif name == "sweep":
        if rest and "FILE" not in rest:
            parse_sweep_arguments(
                rest if rest[0][:2] != "--" else [saved_plans()[0], *rest]
            )
    elif name == "bench" and rest[:1] == ["envs"]:
        parse_bench_envs_arguments(rest[1:])
    elif name == "bench":
        parse_bench_arguments(rest)[1]([], {})
    elif name == "data":
        assert rest[0] in data_commands()
        assert not rest[1:] or parse_data_arguments(rest[0], rest[1:])
    elif name == "draw":
        assert rest[0] in FIGURES
        arguments = parse_arguments(rest[1:], max_positional=1)
        arguments.take_options(DrawOptions)
        to_config(arguments)
    elif name == "config":
        assert rest[0] == "--explain"
    else:
        arguments = parse_arguments(rest)
        to_config(arguments)
        assert {flag for flag, _ in arguments.flags} <= {"logdir"}


@pytest.mark.parametrize(("page", "line"), printed("reverie "))
def test_every_printed_command_is_understood(page, line, here):
    understand(shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize(
    "words",
    [
        "tarin --task catch",
        "train --run.train_rato 3",
        "train --configs sizexl",
        "eval LOGDIR --run.steeps 3",
        "check-env my_env:make_envy",
    ],
)
def test_a_command_that_does_not_exist_is_not_understood(words, here):
    with pytest.raises((UserError, AssertionError)):
        understand(words.split())


@pytest.mark.parametrize(("page", "line"), printed("--"))
def test_every_flag_named_in_passing_exists(page, line, here):
    words = shlex.split(line)
    if words[0] in FOREIGN:
        return
    if len(words) == 1:
        name = words[0].removeprefix("--").replace("-", "_")
        assert name in (*configs.setting_names(Config), "configs", "config"), line
        return
    for last in words[-1].split("/") if "resample" in line else words[-1:]:
        to_config(parse_arguments([*words[:-1], last]))


@pytest.mark.parametrize(("page", "line"), printed("make "))
def test_every_make_target_exists(page, line):
    targets = re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.M)
    words = [word for word in shlex.split(line, comments=True)[1:] if "=" not in word]
    assert words
    assert set(words) <= set(targets)


@pytest.mark.parametrize(("page", "line"), printed("pip install"))
def test_every_extra_exists(page, line):
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    named = re.findall(r"(?:reverie|\.)\[([\w,]+)\]", line.replace("NAME", "dev"))
    assert {name for names in named for name in names.split(",")} <= set(extras)


@pytest.mark.parametrize("page", [p.name for p in PAGES if blocks(p, "python")])
def test_every_snippet_runs(page, here, monkeypatch, capsys):
    path = next(p for p in PAGES if p.name == page)
    monkeypatch.setattr("sys.argv", ["python"])
    for code in blocks(path, "python"):
        short = re.sub(r"(run__steps=)[\d_]+", r"\g<1>60", code)
        exec(compile(short, page, "exec", dont_inherit=True), {"__name__": "snippet"})
    if page == "README.md":
        assert (here / "logdir" / "python" / "ckpt").is_dir()


def test_the_documented_environment_trains_as_printed(here, capsys):
    line = next(x for _, x in printed("reverie train") if "--env.length" in x)
    words = shlex.split(line)[1:]
    short = "--run.steps 40 --run.log_every 0 --run.report_every 0 --logdir run"
    assert main([*words, *short.split(), "--agent", "random"]) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        target, _, anchor = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        path = page.parent / target if target else page
        assert path.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
            slugs = [
                re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles
            ]
            assert anchor in slugs, link


def test_the_drawn_rooms_exist():
    """The trees of the README name folders and files that are there."""
    house = next(text for text in blocks(README, "text") if "api.py" in text)
    names = re.findall(r"^  ([\w.]+/?)  ", house, re.M)
    assert len(names) > 8
    for name in names:
        assert (ROOT / "reverie" / name).exists(), name
