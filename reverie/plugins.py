"""Import plug-in classes, named `package.module:Class`, and optional packages.

Plug-in code may raise any exception; `is_failure` and `summarize_error` handle them.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import shlex
import signal
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reverie.api import UserError

PLAY_PACKAGES = ("starlette", "uvicorn", "websockets")
"""Packages of the extra `play`."""
LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
    str(Path(__file__).resolve().parent),
)
"""Folders of the standard library and of this package."""
MAX_MESSAGE = 500
"""Maximum number of characters of an error message that are shown."""


def is_plugin(name: str) -> bool:
    """True for `package.module:Class`, False for the name of a built-in."""
    return ":" in name


def import_object(name: str, flag: str) -> Any:
    """Import `package.module:Class`; modules in the current folder are found, too.

    `flag` is the flag with which the user gave the name, for error messages.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UserError(
            f"{flag} {name!r} is not complete.\n  Fix: {flag} package.module:Class"
        )
    if module_name.endswith(".py") and Path(module_name).is_file():
        path = Path(module_name).with_suffix("")
        fix = f"{flag} {'.'.join(path.parts)}:{attribute}"
        if path.is_absolute() or ".." in path.parts:
            fix = f"{flag} {path.name}:{attribute}, in the folder {path.parent}"
        raise UserError(
            f"{flag} {name!r} names a file, and a module is expected.\n  Fix: {fix}"
        )
    add_current_folder(module_name)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not f"{module_name}.".startswith(f"{error.name}."):
            package = error.name.partition(".")[0]
            problem, fix = "is not installed", f"pip install {package}"
            if importlib.util.find_spec(package) is not None:
                problem = f"the installed {package} does not have"
                fix = f"correct the import of {error.name!r}."
            raise UserError(
                f"{flag} {name!r}: module {module_name!r} needs {error.name!r}, which "
                f"{problem}.\n  Fix: {fix}"
            ) from error
        raise UserError(
            f"{flag} {name!r}: there is no module {module_name!r}.\n  Fix: run from "
            f"the folder of {module_name.partition('.')[0]}.py, or install its package."
        ) from error
    except BaseException as error:
        if not is_failure(error):
            raise
        raise UserError(
            f"{flag} {name!r}: importing {module_name!r} failed: "
            f"{summarize_error(error)}\n  Fix: correct that error."
        ) from error
    if not hasattr(module, attribute):
        public = [key for key in vars(module) if not key.startswith("_")]
        close = difflib.get_close_matches(attribute, public, 1)
        hint = f"did you mean {module_name}:{close[0]}?" if close else "check its name."
        raise UserError(
            f"{flag} {name!r}: module {module_name!r} has no {attribute!r}.\n"
            f"  Fix: {hint}"
        )
    return getattr(module, attribute)


def add_current_folder(module_name: str) -> None:
    """Add the current folder to `sys.path`, unless the module is part of Reverie."""
    folder = str(Path.cwd())
    if not module_name.startswith("reverie.") and folder not in sys.path:
        sys.path.insert(0, folder)


def is_failure(error: BaseException) -> bool:
    """True if an exception of plug-in code is an error in that code.

    This includes `sys.exit()`, and `KeyboardInterrupt` unless it is Ctrl-C, but not
    `UserError`, which has its own message for the user.
    """
    if isinstance(error, KeyboardInterrupt):
        return not _is_ctrl_c(error)
    return not isinstance(error, UserError)


def _is_ctrl_c(error: KeyboardInterrupt) -> bool:
    """True if the handler of SIGINT raised the error.

    Python's default handler has no frame in the traceback. With this handler, every
    KeyboardInterrupt counts as Ctrl-C.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.SIG_IGN:
        return False
    code = getattr(handler, "__code__", None)  # of a function or method
    frames = traceback.walk_tb(error.__traceback__)
    return code is None or any(frame.f_code is code for frame, _ in frames)


def summarize_error(error: BaseException) -> str:
    """Format an error in one line: its type, its message and where it was raised.

    If a library raised it, the innermost line outside of libraries is added.
    """
    tb = error.__traceback__
    lines = [(x.f_code.co_filename, line) for x, line in traceback.walk_tb(tb)]
    where = ""
    if lines:
        where = f" ({lines[-1][0]}:{lines[-1][1]}"
        own = [line for line in lines if not _is_library(line[0])]
        if own and own[-1] != lines[-1]:
            where += f", called from {own[-1][0]}:{own[-1][1]}"
        where += ")"
    # not `type(error).__name__`, which a metaclass can replace by code that fails
    name = type.__dict__["__name__"].__get__(type(error))
    return f"{name}: {error_message(error)}{where}"


def _is_library(file: str) -> bool:
    """True for files of installed packages, of Python and of this package."""
    if file.startswith("<"):  # `<frozen importlib._bootstrap>`, or code of `exec`
        return True
    path = Path(file)
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or any(
        path.is_relative_to(folder) for folder in LIBRARIES
    )


def error_message(error: BaseException) -> str:
    """Return the message of an error: shortened, and without control characters."""
    try:
        text = str(error)
    except BaseException as second:
        if isinstance(second, KeyboardInterrupt) and _is_ctrl_c(second):
            raise
        return f"(its message cannot be shown: {type(second).__name__})"
    if len(text) > MAX_MESSAGE:
        text = f"{text[:MAX_MESSAGE]}... ({len(text):,} characters)"
    printable = (c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return "".join(printable)


def import_optional(module: str, extra: str, needed_by: str) -> Any:
    """Import a module, or raise an error that names the extra to install."""
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if getattr(error, "name", None) == package:
            problem = f"needs the {package} package, which is not installed"
        else:  # one of its dependencies is missing or incompatible
            problem = f"cannot import the {package} package ({error})"
        raise UserError(
            f"{needed_by} {problem}.\n  Fix: {install_command(extra)}"
        ) from error


def missing_packages(names: Sequence[str]) -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra (optional dependencies).

    Reverie is not in a package index, so the command installs from the git clone, if
    there is one. Without a clone, pip adds the extra to the installed package.
    """
    clone = Path(__file__).resolve().parents[1]
    if not (clone / "pyproject.toml").is_file():
        return f"pip install 'reverie[{extra}]'"
    folder = "." if Path.cwd() == clone else clone
    return f"pip install -e {shlex.quote(f'{folder}[{extra}]')}"


def settings_name(name: str) -> str:
    """Return the name of a component's settings: `my_module:MyAgent` -> `my_agent`."""
    class_name = name.partition(":")[2] if is_plugin(name) else name
    word_start = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    return re.sub(word_start, "_", class_name).lower()
