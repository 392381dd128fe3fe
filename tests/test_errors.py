"""Every error a user can cause says how to mend it, always in the same place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from reverie import config as configs
from reverie.run.config import Config

PACKAGE = Path(__file__).resolve().parent.parent / "reverie"
KINDS = {"UserError", "ConfigError", "EnvFailure", "DiskFull"}


def raised(path: Path) -> list[tuple[int, str]]:
    """Line and message of each user error a file raises with a literal message.

    A brace stands for whatever is filled in.
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue
        name, message = node.exc.func, node.exc.args[:1]
        if isinstance(name, ast.Name) and name.id in KINDS and message:
            parts = [
                part.value
                for part in ast.walk(message[0])
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
            if isinstance(message[0], ast.Constant | ast.JoinedStr):
                found.append((node.lineno, "{".join(parts)))
    return found


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if raised(path)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_user_errors_put_their_fix_on_a_line_of_its_own(path: Path):
    lacking = [line for line, text in raised(path) if "\n  Fix: " not in text]
    assert not lacking, f"{path.name} lines {lacking}"


FLAG = r"--([a-z]\w*(?:\.\w+)+)(?![\w.{*-])"
ELSEWHERE = ("map.", "bench.")
"""Of commands with settings of their own."""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_settings_that_a_fix_names_exist(path: Path):
    names = configs.setting_names(Config)
    known = {*names, *(name.rpartition(".")[0] for name in names)}
    for line, text in raised(path):
        wrong = set(re.findall(FLAG, text)) - known
        wrong = {name for name in wrong if not name.startswith(ELSEWHERE)}
        assert not wrong, f"{path.name} line {line}: {wrong}"


def test_there_are_errors_to_look_at():
    assert len(FILES) > 20
