"""Build typed configs from defaults, named presets, files and flags.

A config is a tree of frozen dataclasses. Every setting has a dotted name
(`dreamer.rssm.deter`) and a default. Layers override the defaults in this order; each
is a mapping from names to values:

1. presets, the named entries of the YAML files in `presets/`, from left to right;
2. YAML or JSON files given with `--config`;
3. flags, such as `--run.train-ratio 32`.

Names may be nested or dotted. A name that contains a character not allowed in field
names is a regular expression, and sets every setting whose full name it matches. An
unknown name, a pattern without a match and a value of the wrong type are errors. All
values are checked against the type of the field, because YAML reads `5e6` as a string
and users write `1e6` for an int.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

from reverie.api import UserError
from reverie.patterns import select_names
from reverie.storage.limits import (
    MAX_JSON_BYTES,
    InvalidFile,
    is_shell_pipe,
    parse_json,
    parse_yaml,
    read_bytes,
    read_pipe,
)

PRESETS_FOLDER = Path(__file__).parent / "presets"
T = TypeVar("T")

Layer = Mapping[str, Any]
"""Values by setting name or pattern."""
_select_names = functools.lru_cache(maxsize=512)(select_names)


class ConfigError(UserError):
    """An unknown setting, or a value that does not fit its setting."""


class UnknownSetting(ConfigError):
    """A name that is not a setting.

    `origin` is the place where it was given. A similar name from `options` is
    suggested.
    """

    def __init__(self, name: str, origin: str, options: Collection[str]):
        self.name, self.origin = name, origin
        super().__init__(
            f"There is no setting {name!r:.200} ({origin}).{suggest(name, options)}\n"
            "  Fix: `reverie config` lists all settings."
        )


def resolve(schema: type[T], layers: Iterable[tuple[str, Layer]]) -> T:
    """Apply `(origin, layer)` pairs to the defaults of a dataclass; later pairs win.

    The origin is named in error messages, for example "the file my.yaml".
    """
    settings = settings_of(typing.cast(type, schema))
    values = {name: setting.default for name, setting in settings.items()}
    return _build(schema, values | values_in(typing.cast(type, schema), layers))


def flatten(config: Any, prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Return all values of a config or of nested dicts, by dotted name."""
    tree = config if isinstance(config, dict) else dataclasses.asdict(config)
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            values.update(flatten(value, f"{prefix}{name}{separator}", separator))
        else:
            values[f"{prefix}{name}"] = value
    return values


def dump(config: Any) -> str:
    """Return the config as YAML, which `resolve` can read."""
    tree = dataclasses.asdict(config)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def check_minimum(config: Any, prefix: str = "", **minima: float) -> None:
    """Raise unless these settings of a config have at least their minimum.

    The prefix is the group of the settings on the command line, such as `run.`.
    """
    for name, minimum in minima.items():
        if not getattr(config, name) >= minimum:
            raise ConfigError(
                f"{prefix}{name} must be at least {minimum}, not "
                f"{getattr(config, name)}.\n  Fix: --{prefix}{name} {minimum}"
            )


def differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Return `(old, new)` values of settings that differ; None if one is missing."""
    a, b = flatten(old), flatten(new)
    names = [*a, *(name for name in b if name not in a)]
    return {n: (a.get(n), b.get(n)) for n in names if a.get(n) != b.get(n)}


def values_in(schema: type, layers: Iterable[tuple[str, Layer]]) -> dict[str, Any]:
    """Return the values that `(origin, layer)` pairs set, by setting name."""
    settings = settings_of(schema)
    values: dict[str, Any] = {}
    for origin, layer in layers:
        for pattern, value in _flatten_layer(layer, settings):
            for name in matching_names(pattern, settings, origin):
                values[name] = settings[name].cast(value, name, origin)
    return values


def names_in(schema: type, layers: Iterable[tuple[str, Layer]]) -> set[str]:
    """Return the names of the settings that `(origin, layer)` pairs set."""
    return set(values_in(schema, layers))


MIN_SIMILARITY = 0.75
"""Similarity that a suggested name needs, from 0 to 1."""


def suggest(name: str, options: Collection[str]) -> str:
    """Return ` Did you mean X?` with the most similar option; empty if none is similar.

    Options with the same last part are preferred: `units` suggests `enc.units`. For
    other options, the last part must be similar, too, because the names of settings in
    the same group have long common prefixes.
    """
    name = name[-100:]  # the time to compare long names is quadratic
    group, _, last_part = name.replace("-", "_").rpartition(".")
    same_last_part = [o for o in options if o.rpartition(".")[2] == last_part]
    same_group = [o for o in same_last_part if o.startswith(f"{group}.")]
    similar = same_group or same_last_part
    if not similar:
        last_parts = {option: option.rpartition(".")[2] for option in options}
        close = difflib.get_close_matches(
            last_part, set(last_parts.values()), n=3, cutoff=MIN_SIMILARITY
        )
        if len(last_part) > 3:
            similar = [o for o, part in last_parts.items() if part in close[:1]]
        else:
            # up to 3 letters are similar to many words: also compare the whole names
            whole = difflib.get_close_matches(name, options, n=3, cutoff=0.85)
            similar = [o for o in whole if last_parts[o] in close]
    best = difflib.get_close_matches(name, similar, n=1, cutoff=0)
    return f" Did you mean {best[0]!r}?" if best else ""


# Layers.


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """Return all presets, by name."""
    by_name: dict[str, dict[str, Any]] = {}
    for path in sorted(PRESETS_FOLDER.glob("*.yaml")):
        for name, preset in read_config_file(path).items():
            assert name not in by_name, f"duplicate preset {name} in {path.name}"
            by_name[name] = preset or {}
    return by_name


def get_preset(name: str) -> dict[str, Any]:
    if name not in presets():
        raise ConfigError(
            f"There is no preset {name!r:.200}.{suggest(name, presets())}\n"
            f"  Fix: choose from {', '.join(sorted(presets()))}."
        )
    return presets()[name]


def read_config_file(path: Path) -> dict[str, Any]:
    """Read settings from a YAML or JSON file."""
    try:
        read = read_pipe if is_shell_pipe(path) else read_bytes
        content = read(path.expanduser(), MAX_JSON_BYTES)
        text = content.decode("utf-8-sig")  # skips a byte order mark
    except (OSError, ValueError) as error:  # `InvalidFile` needs a subject: "it is"
        text = f"{'' if isinstance(error, UnicodeDecodeError) else 'it '}{error}"
        reason = getattr(error, "strerror", None) or text
        is_preset = path.parent != PRESETS_FOLDER and str(path) in presets()
        fix = f"--configs {path}" if is_preset else "give the path of a YAML file."
        raise ConfigError(
            f"Cannot read the config file {path}: {reason}.\n  Fix: {fix}"
        ) from None
    try:
        data = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        subject = "it " * isinstance(error, InvalidFile)
        reason = subject + " ".join(str(error).split())
        raise ConfigError(
            f"The config file {path} is not valid: {reason}\n  Fix: correct it."
        ) from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"The config file {path} contains a {type(data).__name__}, not a mapping."
            "\n  Fix: write one `name: value` per line."
        )
    if references := sorted(set(re.findall(r"\$\{[^}]*\}", text))):
        raise ConfigError(
            f"The config file {path} contains {references[0]}, a reference of Hydra.\n"
            "  Fix: write the value instead of each reference `${...}`."
        )
    return {str(key): value for key, value in data.items()}


def parse_flags(arguments: Sequence[str]) -> list[tuple[str, Any]]:
    """Split `--a.b 1 --c=2 --d 3 4` into pairs of name and value.

    A value is a string, a list of strings, or None for a flag without a value.
    """
    flags: list[tuple[str, Any]] = []
    for word in arguments:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            flags.append((name, value if equals else None))
        elif not flags:
            raise ConfigError(
                f"Unexpected argument {word!r}; a flag was expected here.\n"
                "  Fix: write settings as `--name value`."
            )
        else:
            name, before = flags.pop()
            if before is None:
                flags.append((name, word))
            else:
                values = before if isinstance(before, list) else [before]
                flags.append((name, [*values, word]))
    return flags


def flag_layer(schema: type, flags: Iterable[tuple[str, Any]], base: Any) -> Layer:
    """Turn parsed flags into a layer.

    `--name+ value` appends to the value in the config `base`, and a boolean flag
    without a value becomes True.
    """
    settings = settings_of(schema)
    layer: dict[str, Any] = {}
    for flag, value in flags:
        origin = f"the flag --{flag}"
        for name in matching_names(flag.rstrip("+"), settings, origin):
            if value is None:
                if settings[name].type is not bool:
                    raise ConfigError(
                        f"The flag --{flag} needs a value.\n"
                        f"  Fix: --{flag} {example(settings[name].default)}"
                    )
                layer[name] = True
            elif flag.endswith("+"):
                items = settings[name].cast(value, name, origin)
                if not isinstance(items, tuple):
                    raise ConfigError(
                        f"The flag --{flag} appends to a list, but {name} is not a "
                        f"list.\n  Fix: --{name} VALUE"
                    )
                layer[name] = (*layer.get(name, flatten(base)[name]), *items)
            else:
                layer[name] = value
    return layer


# Schemas: names, types, defaults and docs of the settings of a dataclass.


@dataclasses.dataclass(frozen=True)
class Setting:
    """Type and default of a setting."""

    type: Any
    default: Any

    def cast(self, value: Any, name: str, origin: str) -> Any:
        """Convert a value to the type; name and origin are for the error message."""
        try:
            return _cast(value, self.type)
        except (TypeError, ValueError, OverflowError):
            fix = self._repeated(value) or example(self.default, _example_of(self.type))
            raise ConfigError(
                f"{name} must be {_describe_type(self.type)}, not {value!r:.200} "
                f"(from {origin}).\n  Fix: --{name} {fix}"
            ) from None

    def _repeated(self, value: Any) -> str:
        """Return the fix for a single value where a list of fixed length is needed:
        the value repeated, such as `64 64`. Empty if the value is not a valid item.
        """
        types_ = typing.get_args(self.type)
        if typing.get_origin(self.type) is not tuple or Ellipsis in types_:
            return ""
        with contextlib.suppress(TypeError, ValueError):
            if all(_cast(value, type_) is not None for type_ in types_):
                return " ".join([str(value)] * len(types_))
        return ""


@functools.cache
def settings_of(schema: Any) -> dict[str, Setting]:
    """Return all settings of a dataclass, by dotted name."""
    settings: dict[str, Setting] = {}
    defaults = schema()
    for name, type_, is_group, is_dict in _field_types(schema):
        default = getattr(defaults, name)
        if is_group:
            values = flatten(default)  # may differ from the defaults of its class
            for inner_name, setting in settings_of(typing.cast(type, type_)).items():
                settings[f"{name}.{inner_name}"] = dataclasses.replace(
                    setting, default=values[inner_name]
                )
        elif is_dict:
            for key, value in default.items():
                settings[f"{name}.{key}"] = Setting(typing.get_args(type_)[1], value)
        else:
            settings[name] = Setting(type_, default)
    return settings


@functools.lru_cache(maxsize=512)
def _field_types(schema: Any) -> list[tuple[str, Any, bool, bool]]:
    """Return name and type of each field, and whether it is a dataclass or a dict."""
    hints = typing.get_type_hints(schema)
    types_ = [(field.name, hints[field.name]) for field in dataclasses.fields(schema)]
    return [(x, t, is_dataclass(t), typing.get_origin(t) is dict) for x, t in types_]


def _build(schema: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Create the tree of dataclasses from values by dotted name."""
    arguments: dict[str, Any] = {}
    for field, type_, is_group, is_dict in _field_types(schema):  # type: ignore[arg-type]
        name = prefix + field
        if is_group:
            arguments[field] = _build(type_, values, name + ".")
        elif is_dict:
            inner = {k: v for k, v in values.items() if k.startswith(name + ".")}
            arguments[field] = {k[len(name) + 1 :]: v for k, v in inner.items()}
        else:
            arguments[field] = values[name]
    try:
        return schema(**arguments)
    except ValueError as error:  # raised by `__post_init__`
        group = prefix.rstrip(".") or "the settings"
        raise ConfigError(
            f"{group}: {error}.\n  Fix: choose other values for {group}."
        ) from None


def _flatten_layer(
    layer: Layer, settings: Mapping[str, Setting], prefix: str = ""
) -> Iterable[tuple[str, Any]]:
    """Yield the dotted names or patterns of a nested layer, with their values."""
    for name, value in layer.items():
        name = str(name)
        if prefix:
            name = prefix + (r"\." if is_pattern(prefix) else ".") + name
        if isinstance(value, Mapping) and name not in settings:
            yield from _flatten_layer(value, settings, name)
        else:
            yield name, value


def is_pattern(name: str) -> bool:
    """True if a name has characters that setting names do not have."""
    return re.search(r"[^A-Za-z0-9_.-]", name) is not None


def matching_names(name: str, settings: Collection[str], origin: str) -> list[str]:
    """Return the settings that a name or pattern refers to; raise if there are none."""
    if is_pattern(name):
        try:
            matches = [*_select_names(name, tuple(settings))]
        except re.error as error:
            raise ConfigError(
                f"The pattern {name!r:.200} in {origin} is not a regular expression: "
                f"{error}.\n  Fix: write a dot as `\\.` and any text as `.*`."
            ) from None
        if not matches:
            raise ConfigError(
                f"The pattern {name!r:.200} in {origin} matches no setting.\n"
                "  Fix: `reverie config` lists all settings."
            )
        return matches
    for candidate in (name, name.replace("-", "_")):
        if candidate in settings:
            return [candidate]
    prefix = name.replace("-", "_") + "."
    members = [key for key in settings if key.startswith(prefix)]
    if members:
        raise ConfigError(
            f"{name!r} in {origin} is a group of settings, not a single setting.\n"
            f"  Fix: give one of its settings, for example --{members[0]}."
        )
    raise UnknownSetting(name, origin, settings)


def _cast(value: Any, type_: Any) -> Any:
    """Convert a value to the type of a field, or raise TypeError or ValueError."""
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if type_ is Any:
        return value
    if origin in (Union, types.UnionType):
        return _cast_union(value, arguments)
    if origin is Literal:
        for option in arguments:
            if value == option or str(value) == str(option):
                return option
        raise ValueError
    if origin is tuple:
        return _cast_tuple(value, arguments)
    if type_ is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if type_ is str and not (isinstance(value, (list, tuple, dict)) or value is None):
        return str(value)
    is_number = isinstance(value, (int, float, str)) and not isinstance(value, bool)
    if type_ in (int, float) and is_number:
        return float(value) if type_ is float else _cast_int(value)
    raise TypeError


def _cast_union(value: Any, options: Sequence[Any]) -> Any:
    if value in (None, "None", "null", "none"):
        if type(None) in options:
            return None
        raise TypeError
    for option in options:
        with contextlib.suppress(TypeError, ValueError):
            return _cast(value, option)
    raise TypeError


def _cast_tuple(value: Any, types_: Sequence[Any]) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = re.split(r"[,\s]+", value.strip("()[] "))
    elif isinstance(value, (int, float, bool)):
        value = [value]
    parts = [item.split(",") if isinstance(item, str) else [item] for item in value]
    items = [item for part in parts for item in part if item != ""]
    if len(types_) == 2 and types_[1] is Ellipsis:
        return tuple(_cast(item, types_[0]) for item in items)
    if len(items) != len(types_):
        raise ValueError
    return tuple(_cast(item, t) for item, t in zip(items, types_, strict=True))


def _cast_int(value: int | float | str) -> int:
    if isinstance(value, str):  # exact for large integers, and accepts `1e6`
        value = int(value) if re.fullmatch(r"[+-]?[\d_]+", value) else float(value)
    if isinstance(value, float) and not value.is_integer():
        raise ValueError
    return int(value)


def _describe_type(type_: Any) -> str:
    """Return a type in words, for error messages."""
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if origin is Literal:
        return "one of " + ", ".join(str(option) for option in arguments)
    if origin is tuple:
        items = f"{_describe_type(arguments[0]).split(' ', 1)[-1]}s"
        is_fixed = Ellipsis not in arguments
        return f"{len(arguments)} {items}" if is_fixed else f"a list of {items}"
    if origin in (Union, types.UnionType):
        return " or ".join(_describe_type(t) for t in arguments)
    words = {bool: "True or False", int: "a whole number", float: "a number"}
    words |= {str: "a string", type(None): "None"}
    return words.get(type_, str(type_))


def _example_of(type_: Any) -> str:
    """Return an example of a value, for settings whose default is empty."""
    kinds = (type_, *typing.get_args(type_))
    words = {int: "1", float: "1.0", bool: "True", str: "NAME"}
    return next((words[kind] for kind in kinds if kind in words), "VALUE")


def example(default: Any, empty: str = "VALUE") -> str:
    """Return a default as typed on a command line, or `empty` if there is none."""
    if isinstance(default, tuple):
        return " ".join(str(item) for item in default) or empty
    return str(default) if default not in ("", None) else empty
