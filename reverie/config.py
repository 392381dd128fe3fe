"""Lay named blocks over typed defaults, then files, then flags; refuse misfits.

A config is a tree of frozen dataclasses. Every leaf has a dotted name
(`dreamer.rssm.deter`), and every layer above the defaults is a plain mapping from names
to values:

- blocks, the named entries of the YAML files in `presets/`, from left to right;
- files given with `--config`, in the same form;
- flags, `--run.train-ratio 32`.

Names may be nested or dotted. A name with a character that no field has is a regular
expression and sets every leaf it matches in full; one that matches nothing is an error,
as is an unknown name or a value of another type. Each layer is checked against the
field's type, because YAML reads `5e6` as a string and users write `1e6` for an int.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

from reverie.api import UserError

PRESETS = Path(__file__).parent / "presets"
T = TypeVar("T")

Layer = Mapping[str, Any]


class ConfigError(UserError):
    """A setting that does not exist or does not fit."""


def resolve(schema: type[T], layers: Iterable[tuple[str, Layer]]) -> T:
    """The schema's defaults with each `(origin, mapping)` laid over them in turn."""
    leaves = _leaves(typing.cast(type, schema))
    values = {key: leaf.default for key, leaf in leaves.items()}
    for origin, layer in layers:
        for name, value in _flatten_layer(layer, leaves):
            for key in _matches(name, leaves, origin):
                values[key] = leaves[key].cast(value, key, origin)
    return build(schema, values)


def build(schema: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Turn flat values back into the tree of dataclasses."""
    kinds = typing.get_type_hints(schema)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(schema):  # type: ignore[arg-type]
        key = prefix + field.name
        kind = kinds[field.name]
        if dataclasses.is_dataclass(kind):
            arguments[field.name] = build(typing.cast(type, kind), values, key + ".")
        elif typing.get_origin(kind) is dict:
            inner = {k: v for k, v in values.items() if k.startswith(key + ".")}
            arguments[field.name] = {k[len(key) + 1 :]: v for k, v in inner.items()}
        else:
            arguments[field.name] = values[key]
    try:
        return schema(**arguments)
    except ValueError as error:  # what a `__post_init__` thinks of its own fields
        group = prefix.rstrip(".") or "the settings"
        raise ConfigError(
            f"{group}: {error}.\n  Fix: choose other values for {group}."
        ) from None


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf of a config by its dotted name."""
    found: dict[str, Any] = {}
    items = (
        config.items()
        if isinstance(config, dict)
        else [(f.name, getattr(config, f.name)) for f in dataclasses.fields(config)]
    )
    for name, value in items:
        if dataclasses.is_dataclass(value) or isinstance(value, dict):
            found.update(flat(value, f"{prefix}{name}."))
        else:
            found[prefix + name] = value
    return found


def names(schema: type) -> list[str]:
    return list(_leaves(schema))


def explained(schema: type) -> str:
    """Every leaf as an option, with its default and what it is for."""
    lines, docs, indent = [], _docs(schema), " " * 6
    for name, leaf in _leaves(schema).items():
        lines.append(f"  --{name} {_example(leaf.default)}")
        lines += textwrap.wrap(
            docs.get(name, ""), 76, initial_indent=indent, subsequent_indent=indent
        )
    return "\n".join(lines)


def kind_of(schema: type, key: str) -> Any:
    return _leaves(schema)[key].kind


def dump(config: Any) -> str:
    """The whole tree as YAML that `resolve` reads back."""
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)


def differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """The leaves on which two configs disagree; a missing one counts as None."""
    a, b = flat(old), flat(new)
    keys = [*a, *(k for k in b if k not in a)]
    return {k: (a.get(k), b.get(k)) for k in keys if a.get(k) != b.get(k)}


# Layers: where settings come from.


@functools.cache
def blocks() -> dict[str, dict[str, Any]]:
    """The named blocks of all preset files."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(PRESETS.glob("*.yaml")):
        for name, block in read(path).items():
            assert name not in found, f"block {name} of {path.name} exists already"
            found[name] = block or {}
    return found


def block(name: str) -> dict[str, Any]:
    if name not in blocks():
        raise ConfigError(
            f"There is no config block {name!r}.{suggest(name, blocks())}\n"
            f"  Fix: choose from {', '.join(sorted(blocks()))}."
        )
    return blocks()[name]


def read(path: Path) -> dict[str, Any]:
    """A YAML or JSON file of settings."""
    try:
        text = path.expanduser().read_text("utf-8-sig")  # some begin with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The config file {path} cannot be read: {error}.\n"
            "  Fix: give --config the path of a YAML or JSON file."
        ) from None
    try:
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"The config file {path} is not valid: {' '.join(str(error).split())}\n"
            "  Fix: mend the line it names."
        ) from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"The config file {path} holds a {type(data).__name__}, not names with "
            "values.\n  Fix: write one `name: value` a line."
        )
    return {str(key): value for key, value in data.items()}


def parse_flags(arguments: Sequence[str]) -> list[tuple[str, Any]]:
    """`--a.b 1 --c=2 --d 3 4` as names with one string, a list of strings, or None.

    None marks a flag without a value; `--key+ value` keeps the plus in its name.
    """
    found: list[tuple[str, Any]] = []
    for word in arguments:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            found.append((name, value if equals else None))
        elif not found:
            raise ConfigError(
                f"{word!r} stands where a flag was expected.\n"
                "  Fix: write settings as `--name value`."
            )
        else:
            name, before = found.pop()
            if before is None:
                found.append((name, word))
            else:
                rest = before if isinstance(before, list) else [before]
                found.append((name, [*rest, word]))
    return found


def flag_layer(schema: type, flags: Iterable[tuple[str, Any]], below: Any) -> Layer:
    """Flags as a layer: appends resolved against `below`, bare booleans made true."""
    leaves = _leaves(schema)
    layer: dict[str, Any] = {}
    for name, value in flags:
        append = name.endswith("+")
        for key in _matches(name.rstrip("+"), leaves, f"the flag --{name}"):
            if value is None:
                if leaves[key].kind is not bool:
                    raise ConfigError(
                        f"The flag --{name} needs a value.\n"
                        f"  Fix: --{name} {_example(leaves[key].default)}"
                    )
                layer[key] = True
            elif append:
                more = leaves[key].cast(value, key, f"the flag --{name}")
                if not isinstance(more, tuple):
                    raise ConfigError(
                        f"The flag --{name} appends, but {key} is no list.\n"
                        f"  Fix: --{key} VALUE"
                    )
                layer[key] = (*layer.get(key, flat(below)[key]), *more)
            else:
                layer[key] = value
    return layer


def suggest(name: str, known: Iterable[str]) -> str:
    """` Did you mean X?` with the nearest known name, or nothing."""
    known = list(known)
    tail = name.rsplit(".", 1)[-1]
    same_tail = [key for key in known if key.rsplit(".", 1)[-1] == tail]
    likeness = difflib.SequenceMatcher(b=name)

    def alike(key: str) -> float:
        likeness.set_seq1(key)
        return likeness.ratio()

    near = sorted(same_tail, key=alike, reverse=True)
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not near:
        tails = {key.rsplit(".", 1)[-1]: key for key in known}
        near = [tails[t] for t in difflib.get_close_matches(tail, tails, n=1)]
    return f" Did you mean {near[0]!r}?" if near else ""


# The schema: every leaf with its type and default.


@dataclasses.dataclass(frozen=True)
class _Leaf:
    kind: Any
    default: Any

    def cast(self, value: Any, key: str, origin: str) -> Any:
        try:
            return _cast(value, self.kind)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{key} should be {_describe(self.kind)}, but {origin} says "
                f"{value!r}.\n  Fix: --{key} {_example(self.default)}"
            ) from None


@functools.cache
def _leaves(schema: Any, prefix: str = "") -> dict[str, _Leaf]:
    found: dict[str, _Leaf] = {}
    kinds = typing.get_type_hints(schema)
    defaults = schema()
    for field in dataclasses.fields(schema):
        key, kind = prefix + field.name, kinds[field.name]
        default = getattr(defaults, field.name)
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            for name, leaf in _leaves(kind).items():
                value = functools.reduce(
                    lambda tree, part: (
                        tree[part] if isinstance(tree, dict) else getattr(tree, part)
                    ),
                    name.split("."),
                    default,
                )
                found[f"{key}.{name}"] = dataclasses.replace(leaf, default=value)
        elif typing.get_origin(kind) is dict:
            inner = typing.get_args(kind)[1]
            for name, value in default.items():
                found[f"{key}.{name}"] = _Leaf(inner, value)
        else:
            found[key] = _Leaf(kind, default)
    return found


def _docs(schema: type, prefix: str = "") -> dict[str, str]:
    """The string below each field, in one line."""
    found: dict[str, str] = {}
    for kind in reversed(schema.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for field, below in itertools.pairwise(tree.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[prefix + name] = " ".join(text.split())
    for name, kind in typing.get_type_hints(schema).items():
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            found |= _docs(kind, f"{prefix}{name}.")
    return found


def _flatten_layer(
    layer: Layer, leaves: Mapping[str, _Leaf], prefix: str = ""
) -> Iterable[tuple[str, Any]]:
    for name, value in layer.items():
        name = str(name)
        if prefix:
            name = prefix + (r"\." if _is_pattern(prefix) else ".") + name
        if isinstance(value, Mapping) and name not in leaves:
            yield from _flatten_layer(value, leaves, name)
        else:
            yield name, value


def _is_pattern(name: str) -> bool:
    return re.search(r"[^A-Za-z0-9_.-]", name) is not None


def _matches(name: str, leaves: Mapping[str, _Leaf], origin: str) -> list[str]:
    if _is_pattern(name):
        try:
            pattern = re.compile(name)
        except re.error as error:
            raise ConfigError(
                f"The pattern {name!r} in {origin} is not a regular expression: "
                f"{error}.\n  Fix: write a dot as `\\.` and anything as `.*`."
            ) from None
        found = [key for key in leaves if pattern.fullmatch(key)]
        if not found:
            raise ConfigError(
                f"The pattern {name!r} in {origin} matches no setting.\n"
                "  Fix: `reverie config` lists them all."
            )
        return found
    for candidate in (name, name.replace("-", "_")):
        if candidate in leaves:
            return [candidate]
    group = [key for key in leaves if key.startswith(name.replace("-", "_") + ".")]
    if group:
        raise ConfigError(
            f"{name!r} in {origin} is a group of settings, not one.\n"
            f"  Fix: name one of them, for example --{group[0]}."
        )
    raise ConfigError(
        f"There is no setting {name!r} ({origin}).{suggest(name, leaves)}\n"
        "  Fix: `reverie config` lists them all."
    )


def _cast(value: Any, kind: Any) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None or value in ("None", "null", "none"):
            if type(None) in inner:
                return None
            raise TypeError
        for option in inner:
            if option is not type(None):
                try:
                    return _cast(value, option)
                except (TypeError, ValueError):
                    continue
        raise TypeError
    if origin is Literal:
        for option in inner:
            if value == option or str(value) == str(option):
                return option
        raise ValueError
    if origin is tuple:
        if isinstance(value, str):
            value = [part for part in re.split(r"[,\s]+", value.strip("()[] ")) if part]
        elif isinstance(value, (int, float, bool)):
            value = [value]
        else:
            value = [
                part
                for item in value
                for part in (item.split(",") if isinstance(item, str) else [item])
                if part != ""
            ]
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(_cast(item, inner[0]) for item in value)
        if len(value) != len(inner):
            raise ValueError
        return tuple(_cast(i, k) for i, k in zip(value, inner, strict=True))
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise TypeError
    if kind is int:
        if isinstance(value, bool):
            raise TypeError
        if isinstance(value, str):
            value = value.replace("_", "")
            value = int(value) if re.fullmatch(r"[+-]?\d+", value) else float(value)
        if isinstance(value, float):
            if not value.is_integer():
                raise ValueError
            return int(value)
        if not isinstance(value, int):
            raise TypeError
        return value
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise TypeError
        return float(value)
    if kind is str:
        if isinstance(value, (list, tuple, dict)) or value is None:
            raise TypeError
        return str(value)
    raise TypeError


def _describe(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(str(option) for option in inner)
    if origin is tuple:
        return f"a list of {_describe(inner[0]).split(' ', 1)[-1]}s"
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(k) for k in inner)
    words = {bool: "True or False", int: "a whole number", float: "a number"}
    words |= {str: "a word", type(None): "None"}
    return words.get(kind, str(kind))


def _example(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(str(item) for item in default) or "VALUE"
    return str(default) if default not in ("", None) else "VALUE"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
