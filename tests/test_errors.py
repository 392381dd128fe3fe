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


def user_errors(path: Path) -> list[tuple[str, str]]:
    """Place and message of each user error that a file raises with a literal message.

    A brace stands for the values of an f-string.
    """
    text = path.read_text()
    if not any(f"raise {name}(" in text for name in ERROR_CLASSES):
        return []
    errors = []
    for node in ast.walk(ast.parse(text)):
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
                place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                errors.append((place, "{".join(parts)))
    return errors


@pytest.fixture(scope="module")
def errors() -> list[tuple[str, str]]:
    """The errors of all files of the package."""
    return [
        error for path in sorted(PACKAGE.rglob("*.py")) for error in user_errors(path)
    ]


def test_user_errors_have_a_line_with_their_fix(errors):
    assert len({place.split(":")[0] for place, _ in errors}) > 20
    assert not [place for place, text in errors if "\n  Fix: " not in text]


FLAG = r"--([a-z]\w*(?:\.\w+)+)(?![\w.{*-])"
OTHER_OPTIONS = ("map.", "bench.")
"""Prefixes of options that are not settings of a run."""


def test_settings_named_in_a_fix_exist(errors):
    names = configs.settings_of(Config)
    known = {*names, *(name.rpartition(".")[0] for name in names)}
    wrong = [
        (place, name)
        for place, text in errors
        for name in re.findall(FLAG, text)
        if name not in known and not name.startswith(OTHER_OPTIONS)
    ]
    assert not wrong
