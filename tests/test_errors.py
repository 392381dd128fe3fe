"""Every user error ends with a line `  Fix: ...` that names existing settings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from reverie import config as configs
from reverie.run.config import Config

PACKAGE = Path(__file__).resolve().parent.parent / "reverie"
ERROR_CLASSES = {"UserError", "ConfigError", "EnvFailure", "DiskFull", "WriteFailed"}


def user_errors(path: Path) -> list[tuple[int, str]]:
    """Line and message of each user error that a file raises with a literal message.

    A brace stands for the values of an f-string.
    """
    errors = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
            continue
        name, message = node.exc.func, node.exc.args[:1]
        if isinstance(name, ast.Name) and name.id in ERROR_CLASSES and message:
            parts = [
                part.value
                for part in ast.walk(message[0])
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
            if isinstance(message[0], ast.Constant | ast.JoinedStr):
                errors.append((node.lineno, "{".join(parts)))
    return errors


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if user_errors(path)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_user_errors_have_a_line_with_their_fix(path: Path):
    without_fix = [line for line, text in user_errors(path) if "\n  Fix: " not in text]
    assert not without_fix, f"{path.name} lines {without_fix}"


FLAG = r"--([a-z]\w*(?:\.\w+)+)(?![\w.{*-])"
OTHER_OPTIONS = ("map.", "bench.")
"""Prefixes of options that are not settings of a run."""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_settings_named_in_a_fix_exist(path: Path):
    names = configs.settings_of(Config)
    known = {*names, *(name.rpartition(".")[0] for name in names)}
    for line, text in user_errors(path):
        wrong = set(re.findall(FLAG, text)) - known
        wrong = {name for name in wrong if not name.startswith(OTHER_OPTIONS)}
        assert not wrong, f"{path.name} line {line}: {wrong}"


def test_errors_are_found():
    assert len(FILES) > 20
