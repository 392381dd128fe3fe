"""Documentation of settings for the command line: type, default and meaning."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from reverie.config import ConfigError, Setting, example, settings_of, suggest


def explain(schema: type, prefix: str = "") -> str:
    """Return a text with type, default and meaning of the settings with a prefix.

    The prefix is a group (`run`), a setting (`run.steps`) or empty for all settings.
    """
    prefix = prefix.replace("-", "_").strip(".")
    docs, settings = _docs(schema), settings_of(schema)
    names = [n for n in settings if not prefix or f"{n}.".startswith(f"{prefix}.")]
    if prefix and not names:
        options = {*settings, *(name.rpartition(".")[0] for name in settings)}
        raise ConfigError(
            f"There is no setting or group {prefix!r}.{suggest(prefix, options)}\n"
            "  Fix: `reverie config --explain` lists the groups."
        )
    return "\n".join(_explain_one(name, settings[name], docs) for name in names)


def explain_groups(schema: type, defaults: Mapping[str, Any] | None = None) -> str:
    """Explain the settings that are in no group, and list the groups.

    `defaults` replaces defaults of the schema, for commands that have their own.
    """
    docs, settings = _docs(schema), dict(settings_of(schema))
    for name, value in (defaults or {}).items():
        settings[name] = dataclasses.replace(settings[name], default=value)
    ungrouped = [_explain_one(n, settings[n], docs) for n in settings if "." not in n]
    groups = dict.fromkeys(name.split(".")[0] for name in settings if "." in name)
    rows = [f"  --{group + '.*':<12} {docs.get(group, '')}" for group in groups]
    return "\n".join([*ungrouped, "", "Groups of settings", *rows])


@functools.cache
def _docs(schema: Any, prefix: str = "") -> dict[str, str]:
    """Return the docstring below each field, as a single line, by dotted name."""
    docs: dict[str, str] = {}
    for class_ in reversed(schema.__mro__[:-1]):
        try:
            source = inspect.getsource(class_)
        except (OSError, TypeError):  # a class created at run time, for plug-ins
            continue
        tree = ast.parse(textwrap.dedent(source)).body[0]
        assert isinstance(tree, ast.ClassDef)
        for field, doc in itertools.pairwise(tree.body):
            match field, doc:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[prefix + name] = " ".join(text.split())
    for name, type_ in typing.get_type_hints(schema).items():
        if dataclasses.is_dataclass(type_):
            docs |= _docs(typing.cast(type, type_), f"{prefix}{name}.")
    return docs


def _explain_one(name: str, setting: Setting, docs: Mapping[str, str]) -> str:
    """Return the lines of the help text on one setting."""
    empty = "none" if setting.default is None else "empty"
    default = example(setting.default, empty)
    first = f"  --{name} {_type_name(setting.type)}  (default: {default})"
    doc = textwrap.wrap(docs.get(name, ""), 76)
    return "\n      ".join([first, *doc])


def _type_name(type_: Any) -> str:
    """Return the type as in a usage line: `int`, `{min,max}`, `int ...`."""
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if origin is Literal:
        return "{" + ",".join(str(option) for option in arguments if option) + "}"
    if origin is tuple:
        return " ".join("..." if t is Ellipsis else _type_name(t) for t in arguments)
    if origin in (Union, types.UnionType):
        return "|".join(_type_name(t) for t in arguments)
    return "None" if type_ is type(None) else getattr(type_, "__name__", str(type_))
