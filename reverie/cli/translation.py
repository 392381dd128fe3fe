"""Translate command lines of other implementations to Reverie.

`translate` replaces all arguments that the table of an implementation lists: from
`python dreamer.py --configs atari --task atari_pong` to `reverie train ...`. The tables
(`Original`) are in `reverie/convert/command_lines`. "The original" is the
implementation that a table describes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.train import BASE_PRESETS, TRAINING_COMMANDS
from reverie.convert.command_lines import Original, Replacement
from reverie.datasets.sequences import is_sequence_task
from reverie.envs import SUITES, split_task
from reverie.plugins import settings_name
from reverie.run.config import Config, resolve
from reverie.run.used_settings import find_unused, unused_settings, used_names

TRANSLATED_COMMANDS = (*TRAINING_COMMANDS, "bench", "config")
"""Commands whose arguments are translated."""

SEQUENCE_AGENT = "vta"
"""The agent that trains on sequence datasets, such as `sequences_balls`."""


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
    """The part of `presets` that comes from the program at the start of the command
    line. It is removed if a flag of the original is translated to presets."""
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


def translate(
    words: Sequence[str], original: Original, commands: Collection[str]
) -> Translation | None:
    """Return the command line with all arguments of the original replaced.

    `commands` are the commands of Reverie. None if the first word is neither one of
    them nor a program of the original, or if nothing can be translated.
    """
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
            # tables have an example only for programs that have the same arguments in
            # Reverie: copy the arguments, or show the example if there are none
            if program.example:
                translation.command += rest or program.example.split()
            options = program.options or {}
            translation.command += [options[word] for word in rest if word in options]
            if program.example or not program.takes_arguments:
                return translation
    if translation.command[0] not in TRANSLATED_COMMANDS:
        return None
    if original.hydra_preset:
        rest = ["--multirun" if word == "-m" else word for word in rest]
    while rest and not _is_argument(rest[0]):
        translation.command.append(rest.pop(0))
    arguments = list(split_arguments(rest))
    is_hydra = any(argument.is_hydra for argument in arguments)
    if is_hydra and not original.hydra_preset:
        return None
    # groups of Hydra that the table replaces with presets: `env=atari`
    selects_preset = any(argument.name in ("env", "params") for argument in arguments)
    is_original = is_hydra or bool(translation.changes)
    if original.hydra_preset and is_original and not selects_preset:
        translation.presets.append(original.hydra_preset)
    for argument in arguments:
        if argument.name == "configs":
            _add_presets(translation, argument.values)
    values = {each.name: " ".join(each.values) for each in arguments}
    # arguments that select the agent or task come first: others depend on them
    selects_run = re.compile("task|env|expl_behavior|dynamics_type")
    arguments.sort(key=lambda each: not selects_run.search(each.name))
    for argument in arguments:
        if argument.name != "configs":
            _add_argument(translation, argument, values)
        if argument.name == "task":
            _add_sequence_agent(translation)
    if translation.command[0] == "eval":
        _keep_run_and_task(translation, values)
    return translation


def _add_sequence_agent(translation: Translation) -> None:
    """Select an agent for sequences if the task is a sequence dataset."""
    config = _config_so_far(translation, translation.command[0])
    if is_sequence_task(config.task) and config.agent_config.sequence_window is None:
        translation.arguments.append(["--agent", SEQUENCE_AGENT])


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


def split_arguments(words: Sequence[str]) -> Iterator[Argument]:
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
    unused: Change | None = None
    for flag in translation.original.flags:
        has_value = " " in flag.pattern  # the pattern also matches the value
        text = f"{name} {value}" if has_value else name
        match = re.fullmatch(flag.pattern, text, re.IGNORECASE if has_value else 0)
        if match is None or (is_setting and not has_value):
            continue
        if not _concerns_agent(translation, flag):
            continue
        # skip an entry that applies only if two flags differ, such as the devices of
        # policy and training; a later entry may match
        if flag.unless_equal and values.get(flag.unless_equal) == value:
            continue
        new = _replace(translation, flag, match, {**values, "value": value})
        if new is not None:
            names = [word for word in new if word.startswith("--")]
            # values are shown unless one flag replaces another, for all values
            shows_values = has_value or len(names) > 1
            old = " ".join(argument.words) if shows_values else argument.words[0]
            replacement = " ".join(new if shows_values else names)
            # the entry replaces only the command: `COMMAND:NAME` (`Replacement.new`)
            if flag.new and not replacement:
                replacement = f"reverie {translation.command[0]}"
            translation.add_change(Change(old, replacement, flag.note))
            return
        unused = unused or _describe_unused(translation, argument, flag, match)
    if unused is not None:
        translation.add_change(unused)
        return
    is_known = is_setting or name == "config" or configs.is_pattern(name)
    if argument.is_hydra or (translation.has_program and not is_known):
        translation.unknown.append(argument.words[0])
    else:
        translation.arguments.append(argument.words)


def _describe_unused(
    translation: Translation,
    argument: Argument,
    flag: Replacement,
    match: re.Match[str],
) -> Change | None:
    """Return the setting that replaces a flag, and why this run does not use it."""
    # `_settings` has the settings of the default agent, `dreamer`
    new = " ".join(fill_template(flag.new, match, {"agent": "dreamer", "env": "env"}))
    names = [name for name in re.findall(r"--(\S+)", new) if name in _settings()]
    command = translation.command[0]
    unused = unused_settings(_config_so_far(translation, command), command)
    found = find_unused(names[0], unused) if names else None
    if found is None:
        return None
    note = f"It has no effect in this run: {found.reason}."
    return Change(argument.words[0], f"--{names[0]}", note)


def _concerns_agent(translation: Translation, flag: Replacement) -> bool:
    """True if the flag applies to the agent of this run (or to all agents)."""
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

    If the command does not use these settings, it is replaced by a training command
    that uses them. If they have an effect only with the preset `flag.preset`, the
    preset is added. Returns None, and adds nothing, if no run uses them.
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
    """True if the preset selects no other agent, or no preset and no task is given."""
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
    commands = _possible_commands(translation.command[0])
    # `{agent}` is the agent of the run. Try only the given command: others may select
    # another agent (`reverie bc` selects `bc`) that has a setting of the same name.
    if "{agent}" in flag.new:
        del commands[1:]
    for command in commands:
        config = _config_so_far(translation, command)
        fields = {"agent": settings_name(config.agent), "env": _env_group(config)}
        new = fill_template(flag.new, match, {**values, **fields})
        # `COMMAND:NAME` before the flags selects the command (see `Replacement.new`)
        words = [word for word in new if not word.startswith("COMMAND:")]
        if len(words) < len(new):
            command = new[0].removeprefix("COMMAND:")
            if command in TRAINING_COMMANDS and command not in commands:
                continue
        used = _used_names(config, command, is_given=command == commands[0])
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
        translation.arguments += [argument.words for argument in split_arguments(words)]
    return words


def _possible_commands(command: str) -> list[str]:
    """Return the command, and the ones that an argument may replace it with.

    Commands that train on recorded data are not replaced by commands that train in an
    environment.
    """
    if command not in TRAINING_COMMANDS:
        return [command]
    start = 0 if command in ("train", "train_eval") else 2  # index of `offline`
    others = [name for name in TRAINING_COMMANDS[start:] if name != command]
    return [command, *others]


def _used_names(config: Config, command: str, is_given: bool) -> Collection[str]:
    """Return the settings that a command uses.

    Empty if the command cannot train on the task and was not given by the user.
    """
    if command not in (*TRAINING_COMMANDS, "bench"):
        return _settings()
    try:
        return used_names(config, command)
    except UserError:
        if is_given:
            raise
        return ()


def fill_template(
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
    """Return all settings of a run, by name."""
    return configs.settings_of(Config)
