"""Translates command lines of other implementations ("originals") to Reverie.

If a command line is not valid, `explain_original` looks up its arguments in the tables
of `reverie/convert/command_lines`. If some of them are found, it returns a message with
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
from reverie.cli.train import BASE_PRESETS, TRAINING_COMMANDS
from reverie.config import UnknownSetting
from reverie.convert.command_lines import Original, Replacement, originals
from reverie.envs import SUITES, add_gym_prefix, split_task
from reverie.plugins import settings_name
from reverie.run.config import Config, resolve
from reverie.run.used_settings import used_names

LAUNCHER = re.compile(
    r"python[\d.]*|-[amu]|bash|sh|uv|poetry|run|xvfb-run|(.*/)?xvfb_run\.sh|[A-Z_]+=.*"
)
"""Words before the name of a program: interpreters and environment variables."""

TASK_FLAGS = ("env", "env_id", "env-id", "env_name", "env-name", "environment", "game")
"""Flags that select the environment in many other programs."""

TRANSLATED = (*TRAINING_COMMANDS, "bench", "config")
"""Commands whose arguments are translated."""


class Change(NamedTuple):
    """A part of a command line, and what replaces it in Reverie."""

    old: str
    new: str
    """Empty if it has no equivalent."""
    note: str
    """Sentence about the difference; may be empty."""


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
    """Command of Reverie, with its positional arguments."""
    presets: list[str] = field(default_factory=list)
    program_presets: list[str] = field(default_factory=list)
    """Presets of the program, which a flag that selects a preset replaces."""
    has_program: bool = False
    """True if the command line begins with a program of the original."""
    arguments: list[list[str]] = field(default_factory=list)
    """Flags of Reverie, each with its values."""
    changes: list[Change] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Arguments of the original's program that are not in its table."""

    @property
    def match_score(self) -> int:
        """Number of arguments that were replaced, minus the number of unknown ones."""
        return len(self.changes) - len(self.unknown)

    def add_change(self, change: Change) -> None:
        """Add a change; combine it with an earlier change to the same words."""
        if change.new == change.old and not change.note:
            return
        for index, other in enumerate(self.changes):
            if change.new and change.new == other.new:
                old = f"{other.old} {change.old}"
                self.changes[index] = other._replace(old=old)
                return
        self.changes.append(change)

    @property
    def words(self) -> list[str]:
        """The translated command line."""
        unique = dict.fromkeys(tuple(argument) for argument in self.arguments)
        arguments = [word for argument in unique for word in argument]
        return [*self.command, *self.preset_words, *arguments]

    @property
    def preset_words(self) -> list[str]:
        presets = list(dict.fromkeys(self.presets))
        return ["--configs", *presets] if presets else []


def explain_original(
    words: Sequence[str], error: UserError, commands: Collection[str]
) -> str | None:
    """Return a message with the translation of a command line that raised `error`.

    None if no argument is in a table. `commands` are the commands of Reverie.
    """
    words = list(words)
    while words and LAUNCHER.fullmatch(words[0]):
        words.pop(0)
    try:
        found = [_translate(words, each, commands) for each in originals()]
    except UserError as invalid:  # such as a task that does not exist
        return str(invalid)
    best = max(found, key=lambda x: (x.has_program, x.match_score) if x else (False, 0))
    if best is not None and best.changes:
        return _describe_translation(best)
    if words and words[0].startswith("--") and words[0] not in ("--help", "--version"):
        fix = shlex.join(["train", *words])
        return f"The command is missing.\n  Fix: reverie {fix}"
    if (text := _explain_task_flag(words)) is not None:
        return text
    names = {word.lstrip("-").partition("=")[0] for word in words}
    if isinstance(error, UnknownSetting) and error.name not in names:
        return _explain_config_key(error)
    return None


def _explain_task_flag(words: list[str]) -> str | None:
    """Return a message for a flag such as `--env CartPole-v1`, if there is one."""
    if not words or words[0] not in TRANSLATED:
        return None
    arguments = list(_split_arguments(words[1:]))
    for argument in arguments:
        if argument.name in TASK_FLAGS and len(argument.values) == 1:
            task = add_gym_prefix(argument.values[0])
            others = [
                word for each in arguments if each != argument for word in each.words
            ]
            fix = shlex.join(["reverie", words[0], "--task", task, *others])
            return (
                f"`{argument.words[0]}` is not a setting: an environment is selected "
                f"with `--task`.\n  Fix: {fix}"
            )
    return None


def _describe_translation(translation: Translation) -> str:
    original = translation.original
    if len(translation.changes) == 1:
        change = translation.changes[0]
        if change.new.startswith("reverie "):  # the program
            command = [*translation.command, *translation.preset_words]
            change = change._replace(new=shlex.join(["reverie", *command]))
        text = _describe_change(change, original)
    else:
        rows = "\n".join(f"    {_table_row(change)}" for change in translation.changes)
        text = f"Arguments of {original.name} with other names in Reverie:\n{rows}"
    if translation.unknown:
        names = ", ".join(f"`{name}`" for name in translation.unknown)
        text += f"\n  Unknown in Reverie, and left out: {names}."
    fix = shlex.join(["reverie", *translation.words])
    return f"{text}\n  See {original.page}.\n  Fix: {fix}"


def _describe_change(change: Change, original: Original) -> str:
    old, new, note = change
    if not new:
        reason = f": {note[:1].lower()}{note[1:]}" if note else "."
        return f"`{old}` of {original.name} {_missing(note)} in Reverie{reason}"
    return f"`{old}` of {original.name} is `{new}` in Reverie. {note}".rstrip()


def _table_row(change: Change) -> str:
    new = f"is `{change.new}`." if change.new else f"{_missing(change.note)}."
    return f"`{change.old}` {new} {change.note}".rstrip()


def _missing(note: str) -> str:
    """Return the predicate for an argument that nothing replaces."""
    return "has no equivalent" if "not implemented" in note else "is not needed"


def _explain_config_key(error: UnknownSetting) -> str | None:
    """Return a message for a key of a config file; None if it is not in a table."""
    for original in originals():
        for flag in original.flags:
            match = re.fullmatch(flag.pattern, error.name)
            if match is None or flag.agent:
                continue
            # the agent and task of the file are not known
            new = _fill_template(
                flag.new, match, {"agent": "dreamer", "env": "env.atari"}
            )
            names = [word[2:] for word in new if word.startswith("--")]
            change = Change(error.name, " and ".join(names), flag.note)
            fix = f"write {names[0]!r}." if names else f"remove {error.name!r}."
            return (
                f"{_describe_change(change, original)} "
                f"It was found in {error.origin}.\n"
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
            _set_program(translation, program, words[0])
            if program.example:
                translation.command += rest or program.example.split()
            options = program.options or {}
            translation.command += [options[word] for word in rest if word in options]
            if program.example or not program.takes_arguments:
                return translation
    if translation.command[0] not in TRANSLATED:
        return None
    if original.hydra_preset:
        rest = ["--multirun" if word == "-m" else word for word in rest]
    while rest and not _is_argument(rest[0]):
        translation.command.append(rest.pop(0))
    arguments = list(_split_arguments(rest))
    is_hydra = any(argument.is_hydra for argument in arguments)
    if is_hydra and not original.hydra_preset:
        return None
    selects_preset = any(argument.name in ("env", "params") for argument in arguments)
    is_original = is_hydra or bool(translation.changes)
    if original.hydra_preset and is_original and not selects_preset:
        translation.presets.append(original.hydra_preset)
    for argument in arguments:
        if argument.name == "configs":
            _add_presets(translation, argument.values)
    values = {each.name: " ".join(each.values) for each in arguments}
    # arguments that select the agent or task come first: others depend on them
    first = re.compile("task|env|expl_behavior|dynamics_type")
    arguments.sort(key=lambda each: not first.search(each.name))
    for argument in arguments:
        if argument.name != "configs":
            _add_argument(translation, argument, values)
    if translation.command[0] == "eval":
        _keep_run_and_task(translation, values)
    return translation


def _keep_run_and_task(translation: Translation, values: dict[str, str]) -> None:
    """Keep only the run and the task, which are the arguments of `reverie eval`."""
    sources = ("run.from_checkpoint", "resume_checkpoint", "logdir")
    paths = [values[name] for name in sources if name in values]
    task = _config_so_far(translation, "train").task
    has_task = translation.presets or "task" in values
    translation.command.append(paths[0] if paths else "LOGDIR")
    translation.presets = []
    translation.arguments = [["--task", task]] if has_task else []


def _is_argument(word: str) -> bool:
    """True for a flag or a Hydra argument, False for a command or a path."""
    return word.startswith("--") or re.match(r"[+~]{0,2}[\w.]+=", word) is not None


def _set_program(translation: Translation, program: Replacement, word: str) -> None:
    """Set the command and presets that replace a program of the original."""
    command, translation.has_program = program.new.split(), True
    translation.add_change(Change(word, f"reverie {program.new}", program.note))
    if "--configs" in command and program.takes_arguments:
        start = command.index("--configs")
        translation.presets, command = command[start + 1 :], command[:start]
        translation.program_presets = list(translation.presets)
    translation.command = command


def _split_arguments(words: Sequence[str]) -> Iterator[Argument]:
    """Yield each flag or Hydra argument with the values that follow it."""
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


def _add_presets(translation: Translation, names: Sequence[str]) -> None:
    """Add the values of `--configs`; replace names that only the original has."""
    original = translation.original
    for_program = original.program_presets if translation.has_program else {}
    for name in ",".join(names).split(","):
        preset = for_program.get(name, original.presets.get(name))
        if preset is None or (name in configs.presets() and name not in for_program):
            translation.presets.append(name)
        else:
            translation.add_change(Change(name, preset.new, preset.note))
            translation.presets += preset.new.split()


def _add_argument(
    translation: Translation, argument: Argument, values: dict[str, str]
) -> None:
    """Add an argument; replace it if the original has it and Reverie does not."""
    name, value = argument.name, " ".join(argument.values)
    is_setting = name.replace("-", "_") in _settings()
    for flag in translation.original.flags:
        has_value = " " in flag.pattern  # the pattern also matches the value
        text = f"{name} {value}" if has_value else name
        match = re.fullmatch(flag.pattern, text, re.IGNORECASE if has_value else 0)
        if match is None or (is_setting and not has_value):
            continue
        if not _concerns_agent(translation, flag):
            continue
        if flag.unless_equal and values.get(flag.unless_equal) == value:
            continue
        new = _replace(translation, flag, match, {**values, "value": value})
        if new is not None:
            names = [word for word in new if word.startswith("--")]
            shows_values = has_value or len(names) > 1
            old = " ".join(argument.words) if shows_values else argument.words[0]
            replacement = " ".join(new if shows_values else names)
            if flag.new and not replacement:
                replacement = f"reverie {translation.command[0]}"
            translation.add_change(Change(old, replacement, flag.note))
            return
    is_known = is_setting or name == "config" or configs.is_pattern(name)
    if argument.is_hydra or (translation.has_program and not is_known):
        translation.unknown.append(argument.words[0])
    else:
        translation.arguments.append(argument.words)


def _concerns_agent(translation: Translation, flag: Replacement) -> bool:
    """True if the command trains the agent of the flag, or the flag has none."""
    if not flag.agent:
        return True
    return _config_so_far(translation, translation.command[0]).agent == flag.agent


def _replace(
    translation: Translation,
    flag: Replacement,
    match: re.Match[str],
    values: dict[str, str],
) -> list[str] | None:
    """Add the words that replace a flag, and return them.

    If they are settings that only another training command uses, that command replaces
    the present one; if only runs with the preset of the flag use them, the preset is
    added. None if no run uses them.
    """
    new = _replace_with_presets(translation, flag, match, values)
    if new is None and flag.preset and _may_add_preset(translation, flag.preset):
        presets = list(translation.presets)
        translation.presets.append(flag.preset)
        new = _replace_with_presets(translation, flag, match, values)
        if new is None:
            translation.presets = presets
    return new


def _may_add_preset(translation: Translation, preset: str) -> bool:
    """True if the preset keeps the agent, or the command line selects no task."""
    has_task = any(words[0] == "--task" for words in translation.arguments)
    if not translation.presets and not has_task:
        return True
    agent = _config_so_far(translation, translation.command[0]).agent
    return resolve([*translation.presets, preset]).agent == agent


def _replace_with_presets(
    translation: Translation,
    flag: Replacement,
    match: re.Match[str],
    values: dict[str, str],
) -> list[str] | None:
    """Add the words that replace a flag in a run with the presets found so far."""
    commands = [translation.command[0]]
    if commands[0] in TRAINING_COMMANDS and "{agent}" not in flag.new:
        commands += [name for name in TRAINING_COMMANDS if name not in commands]
    for command in commands:
        config = _config_so_far(translation, command)
        fields = {"agent": settings_name(config.agent), "env": _env_group(config)}
        new = _fill_template(flag.new, match, {**values, **fields})
        words = [word for word in new if not word.startswith("COMMAND:")]
        if len(words) < len(new):
            command = new[0].removeprefix("COMMAND:")
        is_run = command in (*TRAINING_COMMANDS, "bench")
        used = used_names(config, command) if is_run else _settings()
        names = [word[2:].rstrip("+") for word in words if word.startswith("--")]
        known = {*used, "configs"}
        if all(name in known or configs.is_pattern(name) for name in names):
            break
    else:
        return None
    translation.command[0] = command
    if words[:1] == ["--configs"]:
        others = set(translation.presets) - set(translation.program_presets)
        presets = [name for name in translation.presets if name in others]
        translation.presets = [*presets, *words[1:]]
    else:
        translation.arguments += [
            argument.words for argument in _split_arguments(words)
        ]
    return words


def _fill_template(
    template: str, match: re.Match[str], values: dict[str, str]
) -> list[str]:
    """Return the words of a template; see `Replacement.new`."""

    def value_of(name: re.Match[str]) -> str:
        if name[1].startswith("snake:"):
            return settings_name(name[1].removeprefix("snake:"))
        return values.get(name[1], values.get("value", ""))

    return re.sub(r"\{([\w:]+)\}", value_of, match.expand(template)).split()


def _config_so_far(translation: Translation, command: str) -> Config:
    """Return the config of the words that are translated so far.

    Flags that are not valid together are left out, except for task and agent if these
    are valid.
    """
    presets = [*BASE_PRESETS.get(command, ()), *translation.presets]
    known = [name for name in presets if name in configs.presets()]
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
    """Return the group of settings of the task's suite, such as `env.atari`."""
    with contextlib.suppress(UserError):
        suite = SUITES.get(split_task(config.task)[0])
        if suite is not None and suite.config is not None:
            return f"env.{suite.config_name or suite.name}"
    return "env"


def _settings() -> dict[str, configs.Setting]:
    return configs.settings_of(Config)
