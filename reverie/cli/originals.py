"""Translates command lines of other implementations to those of Reverie.

If a command line is not valid, `explain` looks up its arguments in the tables of
`reverie/convert/command_lines`. If some of them are found, it returns a message with
their names in Reverie and the complete command to type.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.train import BASE_BLOCKS
from reverie.config import UnknownSetting
from reverie.convert.command_lines import Original, Replacement, originals
from reverie.envs import SUITES, split_task
from reverie.plugins import settings_name
from reverie.run.config import Config, resolve
from reverie.run.used_settings import used_names

LAUNCHERS = ("python", "python3", "-m", "bash", "sh")
"""Words before the name of a program."""


TRANSLATED = (*BASE_BLOCKS, "bench", "config")
"""Commands whose arguments are translated."""


class Change(NamedTuple):
    """A part of a command line, and what replaces it in Reverie."""

    old: str
    new: str
    """Empty if it has no equivalent."""
    note: str


class Argument(NamedTuple):
    """A flag with its values, or a Hydra argument `NAME=VALUE`."""

    name: str
    values: list[str]
    words: list[str]
    """As typed."""
    is_hydra: bool


@dataclass
class Translation:
    """A command line that was translated to Reverie."""

    original: Original
    command: list[str]
    blocks: list[str] = field(default_factory=list)
    is_program: bool = False
    """True if the command line begins with a program of the original."""
    arguments: list[list[str]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Arguments of the original's program that are not in its table."""

    def add_change(self, change: Change) -> None:
        """Add a change, together with an earlier one that has the same result."""
        for index, other in enumerate(self.changes):
            if change.new and change.new == other.new:
                old = f"{other.old} {change.old}"
                self.changes[index] = other._replace(old=old)
                return
        self.changes.append(change)

    @property
    def words(self) -> list[str]:
        unique = dict.fromkeys(tuple(argument) for argument in self.arguments)
        arguments = [word for argument in unique for word in argument]
        return [*self.command, *self.block_words, *arguments]

    @property
    def block_words(self) -> list[str]:
        blocks = list(dict.fromkeys(self.blocks))
        return ["--configs", *blocks] if blocks else []


def explain(
    words: Sequence[str], error: UserError, commands: Collection[str]
) -> str | None:
    """Return a message for an invalid command line; None if no argument is in a table.

    `commands` are the commands of Reverie.
    """
    words = list(words)
    while words and words[0] in LAUNCHERS:
        words.pop(0)
    try:
        found = [_translate(words, each, commands) for each in originals()]
    except UserError as invalid:  # such as a task that does not exist
        return str(invalid)
    best = max(found, key=lambda each: len(each.changes) if each else 0)
    if best is not None and best.changes:
        return _describe(best)
    if words and words[0].startswith("--") and words[0] not in ("--help", "--version"):
        fix = shlex.join(["train", *words])
        return f"The command is missing.\n  Fix: reverie {fix}"
    names = {word.lstrip("-").partition("=")[0] for word in words}
    if isinstance(error, UnknownSetting) and error.name not in names:
        return _explain_key(error)
    return None


def _describe(translation: Translation) -> str:
    original = translation.original
    if len(translation.changes) == 1:
        change = translation.changes[0]
        if change.new.startswith("reverie "):  # the program
            command = [*translation.command, *translation.block_words]
            change = change._replace(new=shlex.join(["reverie", *command]))
        text = _sentence(change, original)
    else:
        rows = "\n".join(f"    {_row(change)}" for change in translation.changes)
        text = f"These arguments of {original.name} have other names here:\n{rows}"
    if translation.unknown:
        names = ", ".join(f"`{name}`" for name in translation.unknown)
        text += f"\n  Not known here, and left out: {names}."
    fix = shlex.join(["reverie", *translation.words])
    return f"{text}\n  See {original.page}.\n  Fix: {fix}"


def _sentence(change: Change, original: Original) -> str:
    old, new, note = change
    if not new:
        reason = f": {note[:1].lower()}{note[1:]}" if note else "."
        return f"`{old}` of {original.name} is not needed here{reason}"
    return f"`{old}` of {original.name} is `{new}` here. {note}".rstrip()


def _row(change: Change) -> str:
    new = f"is `{change.new}`." if change.new else "is not needed."
    return f"`{change.old}` {new} {change.note}".rstrip()


def _explain_key(error: UnknownSetting) -> str | None:
    """Return a message for a name in a config file; None if it is not in a table."""
    for original in originals():
        for flag in original.flags:
            match = re.fullmatch(flag.pattern, error.name)
            if match is None or (original.agent and not flag.new):
                continue
            new = _fill(flag.new, match, {"agent": "dreamer", "env": "env.atari"})
            names = [word[2:] for word in new if word.startswith("--")]
            change = Change(error.name, " and ".join(names), flag.note)
            fix = f"write {names[0]!r}." if names else f"remove {error.name!r}."
            return (
                f"{_sentence(change, original)} It was found in {error.origin}.\n"
                f"  See {original.page}.\n  Fix: {fix}"
            )
    return None


# Translation of a command line.


def _translate(
    words: Sequence[str], original: Original, commands: Collection[str]
) -> Translation | None:
    """Return the command line with all arguments of the original replaced."""
    if not words:
        return None
    translation = Translation(original, ["train"])
    rest = list(words)
    if not _is_argument(words[0]):
        rest = rest[1:]
        matching = (x for x in original.programs if re.fullmatch(x.pattern, words[0]))
        program = next(matching, None)
        if words[0] in commands:
            translation.command = [words[0]]
        elif program is None:
            return None
        else:
            _start(translation, program, words[0])
            if program.example:
                translation.command += rest or program.example.split()
            if program.example or not program.takes_arguments:
                return translation
    if translation.command[0] not in TRANSLATED:
        return None
    while rest and not _is_argument(rest[0]):
        translation.command.append(rest.pop(0))
    arguments = list(_split(rest))
    is_hydra = any(argument.is_hydra for argument in arguments)
    if is_hydra and not original.hydra_block:
        return None
    selects_block = any(argument.name in ("env", "params") for argument in arguments)
    if original.hydra_block and not selects_block and (is_hydra or translation.changes):
        translation.blocks.append(original.hydra_block)
    for argument in arguments:
        if argument.name == "configs":
            _add_blocks(translation, argument.values)
    values = {each.name: " ".join(each.values) for each in arguments}
    first = re.compile("task|env|expl_behavior|dynamics_type")
    arguments.sort(key=lambda each: not first.search(each.name))  # is stable
    for argument in arguments:  # first those on which other words depend
        if argument.name != "configs":
            _add(translation, argument, values)
    if translation.command[0] == "eval":
        _evaluate(translation, values)
    return translation


def _evaluate(translation: Translation, values: dict[str, str]) -> None:
    """Reduce the arguments of a command that evaluates to its run and its task."""
    sources = ("run.from_checkpoint", "resume_checkpoint", "logdir")
    paths = [values[name] for name in sources if name in values]
    task = _config(translation, "train").task
    has_task = translation.blocks or "task" in values
    translation.command.append(paths[0] if paths else "LOGDIR")
    translation.blocks = []
    translation.arguments = [["--task", task]] if has_task else []


def _is_argument(word: str) -> bool:
    """True for a flag or a Hydra argument, False for a command or a path."""
    return word.startswith("--") or re.match(r"[+~]{0,2}[\w.]+=", word) is not None


def _start(translation: Translation, program: Replacement, word: str) -> None:
    command, translation.is_program = program.new.split(), True
    translation.add_change(Change(word, f"reverie {program.new}", program.note))
    if "--configs" in command and program.takes_arguments:
        start = command.index("--configs")
        translation.blocks, command = command[start + 1 :], command[:start]
    translation.command = command


def _split(words: Sequence[str]) -> Iterator[Argument]:
    groups: list[list[str]] = []
    for word in words:
        if _is_argument(word) or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    for group in groups:
        name, equals, value = group[0].lstrip("+-~").partition("=")
        is_hydra = not group[0].startswith("--")
        yield Argument(
            name, [*([value] if equals else []), *group[1:]], group, is_hydra
        )


def _add_blocks(translation: Translation, names: Sequence[str]) -> None:
    original = translation.original
    own = original.program_blocks if translation.is_program else {}
    for name in ",".join(names).split(","):
        block = own.get(name, original.blocks.get(name))
        if block is None or (name in configs.blocks() and name not in own):
            translation.blocks.append(name)
        else:
            translation.add_change(Change(name, block.new, block.note))
            translation.blocks += block.new.split()


def _add(translation: Translation, argument: Argument, values: dict[str, str]) -> None:
    """Add an argument, replaced if it is one of the original and not of Reverie."""
    name, value = argument.name, " ".join(argument.values)
    is_setting = name.replace("-", "_") in _settings()
    for flag in translation.original.flags:
        is_value = " " in flag.pattern
        text = f"{name} {value}" if is_value else name
        match = re.fullmatch(flag.pattern, text, re.IGNORECASE if is_value else 0)
        if match is None or (is_setting and not is_value):
            continue
        if not flag.new and not _concerns_agent(translation):
            continue
        new = _replace(translation, flag, match, {**values, "value": value})
        if new is not None:
            names = [word for word in new if word.startswith("--")]
            is_long = is_value or len(names) > 1
            old = " ".join(argument.words) if is_long else argument.words[0]
            shown = " ".join(new if is_long else names)
            if flag.new and not shown:
                shown = f"reverie {translation.command[0]}"
            translation.add_change(Change(old, shown, flag.note))
            return
    is_known = is_setting or name == "config" or configs.is_pattern(name)
    if argument.is_hydra or (translation.is_program and not is_known):
        translation.unknown.append(argument.words[0])
    else:
        translation.arguments.append(argument.words)


def _concerns_agent(translation: Translation) -> bool:
    """True if the command trains the agent of the original."""
    agent = translation.original.agent
    return not agent or _config(translation, translation.command[0]).agent == agent


def _replace(
    translation: Translation,
    flag: Replacement,
    match: re.Match[str],
    values: dict[str, str],
) -> list[str] | None:
    """Add the words that replace a flag, and return them; None if they are not valid.

    If another training command uses these settings, it replaces the command.
    """
    commands = [translation.command[0]]
    if commands[0] in BASE_BLOCKS and "{agent}" not in flag.new:
        commands += [name for name in BASE_BLOCKS if name not in commands]
    for command in commands:
        config = _config(translation, command)
        fields = {"agent": settings_name(config.agent), "env": _env_group(config)}
        new = _fill(flag.new, match, {**values, **fields})
        words = [word for word in new if not word.startswith("COMMAND:")]
        if len(words) < len(new):
            command = new[0].removeprefix("COMMAND:")
        is_run = command in (*BASE_BLOCKS, "bench")
        used = used_names(config, command) if is_run else _settings()
        names = [word[2:].rstrip("+") for word in words if word.startswith("--")]
        known = {*used, "configs"}
        if all(name in known or configs.is_pattern(name) for name in names):
            break
    else:
        return None
    translation.command[0] = command
    if words[:1] == ["--configs"]:
        translation.blocks += words[1:]
    else:
        translation.arguments += [argument.words for argument in _split(words)]
    return words


def _fill(template: str, match: re.Match[str], values: dict[str, str]) -> list[str]:
    """Return the words of a template; see `Replacement.new`."""

    def value_of(name: re.Match[str]) -> str:
        if name[1].startswith("snake:"):
            return settings_name(name[1].removeprefix("snake:"))
        return values.get(name[1], values.get("value", ""))

    return re.sub(r"\{([\w:]+)\}", value_of, match.expand(template)).split()


def _config(translation: Translation, command: str) -> Config:
    """Return the config of the words that are translated so far."""
    blocks = [*BASE_BLOCKS.get(command, ()), *translation.blocks]
    known = [name for name in blocks if name in configs.blocks()]
    flags: list[tuple[str, str | list[str]]] = [
        (words[0][2:], words[1] if len(words) == 2 else words[1:])
        for words in translation.arguments
        if words[0][2:] in _settings() and len(words) > 1
    ]
    chosen = [(name, value) for name, value in flags if name in ("task", "agent")]
    for some_flags in (flags, chosen, []):
        with contextlib.suppress(UserError):
            return resolve(known, flags=some_flags)
    return Config()


def _env_group(config: Config) -> str:
    """Return the settings of the task's suite, such as `env.atari`."""
    with contextlib.suppress(UserError):
        suite = SUITES.get(split_task(config.task)[0])
        if suite is not None and suite.config is not None:
            return f"env.{suite.config_name or suite.name}"
    return "env"


def _settings() -> dict[str, configs.Setting]:
    return configs.settings_of(Config)
