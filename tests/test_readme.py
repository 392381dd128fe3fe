"""Check README and docs: commands are valid, code runs, links and file names exist.

Commands that train for long are only parsed and their settings resolved, which fails
for every flag, preset or task that does not exist. Commands that are quick are run.
"""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote

import pytest

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.arguments import parse_arguments, to_config
from reverie.cli.bench import parse_bench_arguments, parse_bench_envs_arguments
from reverie.cli.campaign import load_campaign
from reverie.cli.data import data_commands, parse_data_arguments
from reverie.cli.draw import FIGURES, BoundaryOptions, OpenLoopOptions
from reverie.cli.evaluate import EvalOptions
from reverie.cli.export import ExportOptions
from reverie.cli.main import COMMANDS, main
from reverie.cli.play import PlayOptions, ViewOptions, take_short_flags
from reverie.cli.plot import PlotOptions
from reverie.cli.report import ReportOptions
from reverie.cli.share import PushOptions
from reverie.cli.sweep import parse_sweep_arguments
from reverie.cli.train import BASE_PRESETS, TrainOptions, parse_training_command
from reverie.run.config import find_schema

ROOT = Path(__file__).resolve().parent.parent
README, DOCS, BENCHMARKS = ROOT / "README.md", ROOT / "docs", ROOT / "benchmarks"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.glob("*.md")),
    BENCHMARKS / "README.md",
]
LINKED_PAGES = [*PAGES, BENCHMARKS / "log.md"]

QUICK_COMMANDS = ("check-env", "config", "envs")
"""Commands that are run as they are printed."""

PLACEHOLDERS = ("LOGDIR", "TASK", "COMMAND", "PREFIX", "RUN")
"""Words that a reader replaces."""

FLAGS_OF_OTHER_PROGRAMS = ("--gpus", "--only")
FLAGS_OF_SERVERS = ("--export", "--host", "--no-open")
FLAGS_OF_COMMANDS = (
    *("--baseline", "--budget", "--by", "--window", "--x"),  # of `report`
    *("--bins", "--dry-run", "--private", "--video", "--y"),  # of `plot` and `push`
    *FLAGS_OF_SERVERS,
    *(
        "--mps",
        "--per-gpu",
        "--retries",
        "--seeds",
        "--slurm",
        "--tasks",
    ),  # of `campaign`
    *("--mps", "--status", "--workers"),
    *("--format", "--out", "--sample", "--with-world"),  # of `export`
    *("--idx", "--max-kb", "--num-samples"),  # of `draw`
    *("--map.terminate_on", "--noise", "--play"),  # of `data`
    "--model",
    "--recorded_settings",
    "--states",
    "--trials",  # of `sweep`
    "--trust",
)

EXAMPLE_FILES = ("reverie/envs/suites/line.py",)
"""Files that a page asks the reader to add to the package."""

SETTINGS_OF_EXAMPLES = ("env.line.cells", "dreamer.loss_scales.deter_l2")
"""Settings that exist after the edits that a page describes."""

SAVED_FILES = {
    "my_env.py": ("add-an-environment.md", "python"),
    "my_agent.py": ("add-an-agent.md", "python"),
    "my_world.py": ("add-a-world.md", "python"),
    "my_loss.py": ("change-a-loss.md", "python"),
    "my_loss.yaml": ("change-a-loss.md", "yaml"),
    "balls.json": ("coming-from-vta.md", "json"),
}
"""Files that a page asks the reader to save: the first code block of a language."""

PLUGINS = [
    {"agent": "my_agent:DQN"},
    {"dreamer.world": "my_world:GRUWorld"},
    {"dreamer.world": "my_loss:InverseRSSM"},
    {"agent": "examples.random_shooting:RandomShooting"},
]
"""Agents and worlds of the docs, whose settings are printed, too."""


def code_blocks(page: Path, *languages: str) -> list[str]:
    """Return the fenced code blocks of a page in these languages."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M)
    return [text for language, text in fences if language in languages]


def inline_code(page: Path) -> list[str]:
    """Return the text between backticks outside of code blocks.

    On pages for users of other programs, the first column of tables has their words.
    """
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    if page.name.startswith("coming-from-"):
        text = re.sub(r"^\| .*? \| ", "", text, flags=re.M)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def commands(page: Path) -> list[str]:
    """Return every line of a shell block, and all inline code."""
    shell = "\n".join(code_blocks(page, "sh", "bash", "console")).replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ") for line in shell.splitlines()]
    return [*lines, *inline_code(page)]


def printed(start: str) -> list[tuple[str, str]]:
    """Return page and text of all commands and inline code with this beginning."""
    pairs = {
        (page.relative_to(ROOT).as_posix(), line.replace("\\|", "|"))
        for page in PAGES
        for line in commands(page)
        if line.startswith(start)
    }
    return sorted(pairs)


def save_sweep_files(page: str = "sweep.md") -> list[str]:
    """Save the YAML files of a page in the current folder, by their first line."""
    names = []
    for text in code_blocks(DOCS / page, "yaml"):
        names.append(text.splitlines()[0].removeprefix("# "))
        Path(names[-1]).write_text(text)
    return names


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """A folder that contains the files that the docs ask a reader to save."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT))  # for `examples`
    for name, (page, language) in SAVED_FILES.items():
        (tmp_path / name).write_text(code_blocks(DOCS / page, language)[0])
    save_sweep_files()
    save_sweep_files("campaign.md")
    yield tmp_path
    for name in SAVED_FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def setting_names() -> set[str]:
    """Return all setting names, including those of the plug-ins in the docs."""
    names = {"configs", "config"}
    for plugin in [{}, *PLUGINS]:
        names |= set(configs.settings_of(find_schema([plugin])))
    return names


def check_command(words: list[str]) -> None:
    """Raise unless the command line would be accepted."""
    name, arguments = words[0], words[1:]
    assert name in COMMANDS, f"there is no command {name!r}"
    is_filled_in = bool(arguments) and not set(PLACEHOLDERS) & set(arguments)
    if "--help" in arguments:
        assert main(words) == 0
    elif name in BASE_PRESETS and "LOGDIR" in arguments:  # resumes a run of any agent
        parsed = parse_arguments(arguments)
        parsed.take_options(TrainOptions)
        to_config(parsed)
    elif name in BASE_PRESETS:
        parse_training_command(name, arguments)
    elif name == "envs" or (name in QUICK_COMMANDS and is_filled_in):
        assert main(words) == 0
    elif name in ("eval", "check-env"):
        maximum = 2 if name == "eval" else 1
        parsed = parse_arguments(arguments, max_positional=maximum)
        assert parsed.positional or not arguments
        parsed.take_options(EvalOptions)
        to_config(parsed)
    elif name in ("play", "view"):
        parsed = parse_arguments(take_short_flags(arguments)[2], max_positional=1)
        assert parsed.positional or not arguments
        parsed.take_options(PlayOptions if name == "play" else ViewOptions)
        to_config(parsed)
    elif name == "export":
        parsed = parse_arguments(arguments, max_positional=1)
        assert parsed.positional or not arguments
        parsed.take_options(ExportOptions)
        to_config(parsed)
    elif name in ("report", "plot", "push", "pack"):
        parsed = parse_arguments(arguments, max_positional=len(arguments))
        options = {"report": ReportOptions, "plot": PlotOptions, "push": PushOptions}
        if name in options:
            parsed.take_options(options[name])
        assert parsed.positional or not arguments
        assert not parsed.flags
    elif name == "sweep":
        if arguments and "FILE" not in arguments:
            continues = arguments[0].startswith("--")
            file = [save_sweep_files()[0]] if continues else []
            parse_sweep_arguments([*file, *arguments])
    elif name == "campaign":
        if arguments and not {"FILE", "FOLDER"} & {*arguments}:
            check_campaign(arguments)
    elif name == "bench" and arguments[:1] == ["envs"]:
        parse_bench_envs_arguments(arguments[1:])
    elif name == "bench":
        parse_bench_arguments(arguments)[1]([], {})
    elif name == "data":
        assert arguments[0] in data_commands()
        assert not arguments[1:] or parse_data_arguments(arguments[0], arguments[1:])
    elif name == "draw":
        assert arguments[0] in FIGURES
        parsed = parse_arguments(arguments[1:], max_positional=1)
        options = OpenLoopOptions if arguments[0] == "openloop" else BoundaryOptions
        parsed.take_options(options)
        to_config(parsed)
    elif name == "config":
        assert not arguments or arguments[0] == "--explain"
    else:
        parsed = parse_arguments(arguments)
        to_config(parsed)
        assert {flag for flag, _ in parsed.flags} <= {"logdir"}


def check_campaign(arguments: list[str]) -> None:
    """Raise unless all runs of a campaign would be accepted."""
    count = next((i for i, word in enumerate(arguments) if word[:2] == "--"), 1)
    positional, flags = arguments[:count], arguments[count:]
    if not positional:
        return load_campaign(None, flags)
    files = [Path(positional[0]), ROOT / positional[0]]
    saved = [path for path in files if path.suffix == ".yaml"]
    if not saved:  # the folder of a campaign
        return load_campaign(None, ["--tasks", "catch", *flags])
    return load_campaign(next(path for path in saved if path.exists()), flags)


def test_pages_contain_commands_flags_and_code():
    lines = [line for _, line in printed("reverie ")]
    assert len(lines) > 10
    assert {line.split()[1] for line in lines} >= {"train", "eval", "config"}
    assert len(printed("--")) > 10
    assert code_blocks(README, "python")


@pytest.mark.parametrize(("page", "line"), printed("reverie "))
def test_command_is_accepted(page, line, user_folder):
    check_command(shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize(
    "words",
    [
        "tarin --task catch",
        "train --run.train_rato 3",
        "train --configs sizexl",
        "eval LOGDIR --run.steeps 3",
        "check-env my_env:make_envy",
        "train --agent my_agent:DQN --dqn.epsilonn 1",
    ],
)
def test_wrong_command_is_not_accepted(words, user_folder):
    with pytest.raises((UserError, AssertionError)):
        check_command(words.split())


@pytest.mark.parametrize(("page", "line"), printed("--"))
def test_flag_in_text_exists(page, line, user_folder):
    words = shlex.split(line)
    if words[0] in (*FLAGS_OF_OTHER_PROGRAMS, *FLAGS_OF_COMMANDS):
        return
    if len(words) == 1:
        name = words[0].removeprefix("--").replace("-", "_")
        if name.endswith(".*"):
            prefix = name.removesuffix("*")
            assert any(each.startswith(prefix) for each in setting_names()), line
        else:
            assert name in setting_names(), line
        return
    for last in words[-1].split("/") if "resample" in line else words[-1:]:
        to_config(parse_arguments([*words[:-1], last]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_named_in_text_exist(page, user_folder):
    """Dotted names such as `run.steps`, `dreamer.rssm` or `offline.read.*`."""
    names = setting_names()
    groups = {name.partition(".")[0] for name in names if "." in name}
    for span in inline_code(page):
        match = re.fullmatch(r"([a-z_]+)\.[a-z0-9_.]+(\.\*)?", span)
        if match and match[1] in groups:
            name = span.removesuffix("*").removesuffix(".")
            is_group = any(each.startswith(f"{name}.") for each in names)
            assert name in names or is_group or span in SETTINGS_OF_EXAMPLES, span


@pytest.mark.parametrize(("page", "line"), printed("make "))
def test_make_target_exists(page, line):
    targets = re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.M)
    words = [word for word in shlex.split(line, comments=True)[1:] if "=" not in word]
    assert words
    assert set(words) <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_extras_exist_and_are_installed_from_the_clone(page):
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    text = page.read_text()
    assert "reverie[" not in text  # the package is not in an index
    named = re.findall(r"pip install[^`\n]*'\.\[([\w,]+)\]'", text)
    assert {x for names in named for x in names.split(",")} <= {*extras, "NAME"}


def test_pip_commands_of_the_docs_are_found():
    text = (DOCS / "environments.md").read_text()
    assert len(re.findall(r"pip install -e '\.\[[\w,]+\]'", text)) > 15


@pytest.mark.parametrize(("page", "line"), printed("python benchmarks/"))
def test_benchmark_program_and_its_options_exist(page, line):
    words = shlex.split(line)
    text = (ROOT / words[1]).read_text()
    for module in re.findall(r"^from (\w+) import", text, re.MULTILINE):
        shared = BENCHMARKS / f"{module}.py"  # benchmarks share some options
        text += shared.read_text() if shared.exists() else ""
    for word in words[2:]:
        option = word.partition("=")[0]
        is_setting = "." in option  # passed on to the runs
        assert not option.startswith("--") or is_setting or f'"{option}"' in text


@pytest.mark.parametrize(
    "page", [page.name for page in PAGES if code_blocks(page, "python")]
)
def test_python_code_runs(page, user_folder, monkeypatch, capsys):
    path = next(path for path in PAGES if path.name == page)
    monkeypatch.setattr("sys.argv", ["python"])
    names = {"__name__": "snippet"}  # blocks of a page build on each other
    for code in code_blocks(path, "python"):
        short = re.sub(r"(run__steps=)[\d_]+", r"\g<1>120", code)
        exec(compile(short, page, "exec", dont_inherit=True), names)
    if page == "README.md":
        assert (user_folder / "logdir" / "python" / "ckpt").is_dir()


def test_environment_of_the_docs_trains(user_folder, capsys):
    line = next(x for _, x in printed("reverie train") if "--env.length" in x)
    words = shlex.split(line)[1:]
    short = "--run.steps 40 --run.log_every 0 --run.report_every 0 --logdir run"
    assert main([*words, *short.split(), "--agent", "random"]) == 0


@pytest.mark.parametrize("page", LINKED_PAGES, ids=lambda page: page.name)
def test_relative_links_exist(page):
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
            assert unquote(anchor) in slugs, link


def quoted_messages() -> list[str]:
    """Return the messages in the headings of `docs/troubleshooting.md`."""
    page = (DOCS / "troubleshooting.md").read_text()
    return re.findall(r'^### "(.+)"$', page, re.M)


@pytest.mark.parametrize("message", quoted_messages())
def test_quoted_message_exists_in_the_code(message):
    paths = [*(ROOT / "reverie").rglob("*.py"), ROOT / "tools" / "install.sh"]
    code = "\n".join(path.read_text() for path in paths)
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # join the parts of a string
    for part in message.split("..."):
        assert part.strip(" ,") in code


@pytest.mark.parametrize("page", LINKED_PAGES, ids=lambda page: page.name)
def test_files_named_in_text_exist(page):
    """Paths below the folders of the repository, without placeholders."""
    for span in inline_code(page):
        match = re.fullmatch(
            r"(reverie|tests|benchmarks|examples|tools)/[\w./-]+", span
        )
        is_example = span in EXAMPLE_FILES
        assert not match or is_example or (ROOT / span).exists(), span


def test_package_tree_of_the_readme_exists():
    tree = next(text for text in code_blocks(README, "text") if "api.py" in text)
    package, _, others = tree.partition("\ntests/")
    names = re.findall(r"^  ([\w.]+/?)  ", package, re.M)
    assert len(names) > 8
    for name in names:
        assert (ROOT / "reverie" / name).exists(), name
    for name in re.findall(r"^([\w.]+/)  ", f"tests/{others}", re.M):
        assert (ROOT / name).exists(), name


def test_package_tree_of_the_readme_is_complete():
    tree = next(text for text in code_blocks(README, "text") if "api.py" in text)
    for path in (ROOT / "reverie").iterdir():
        is_package = path.name == "presets" or (path / "__init__.py").exists()
        if is_package and not path.name.startswith("_"):
            assert re.search(rf"\b{path.name}/", tree), path.name
