"""Error messages for command lines of other implementations ("originals").

If a command line is not valid, `explain_original` looks up its arguments in the tables
of `reverie/convert/command_lines`. If some of them are found, it returns a message with
their names in Reverie and the complete command to type. For example,
`reverie train --batch_size 16`, a flag of danijar/dreamerv3, gives the fix
`reverie train --dreamer.batch_size 16`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence

from reverie.api import UserError
from reverie.cli.translation import (
    TRANSLATED_COMMANDS,
    Change,
    Translation,
    fill_template,
    split_arguments,
    translate,
)
from reverie.config import UnknownSetting
from reverie.convert.command_lines import Original, originals
from reverie.envs import add_gym_prefix

LAUNCHER = re.compile(
    r"python[\d.]*|-[amu]|bash|sh|sbatch|nohup|uv|poetry|run|xvfb-run"
    r"|(.*/)?xvfb_run\.sh|[A-Z_]+=.*"
)
"""Words before the name of a program: interpreters and environment variables."""

TASK_FLAGS = ("env", "env_id", "env-id", "env_name", "env-name", "environment", "game")
"""Flags that select the environment in many other programs."""

NO_EQUIVALENT = re.compile("not implemented|no such option|not supported|There is no")
"""Matches the `note` of an argument that has no equivalent in Reverie."""


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
        candidates = [translate(words, each, commands) for each in originals()]
    except UserError as invalid:  # such as a task that does not exist
        return str(invalid)
    best = max(
        candidates,
        key=lambda x: (x.has_program, x.match_score) if x else (False, 0),
    )
    if best is not None and best.changes:
        return _describe_translation(best)
    if words and words[0].startswith("--") and words[0] not in ("--help", "--version"):
        fix = shlex.join(["train", *words])
        return f"The command is missing.\n  Fix: reverie {fix}"
    if (text := _explain_task_flag(words)) is not None:
        return text
    # a setting that is not on the command line is in a config file
    names = {word.lstrip("-").partition("=")[0] for word in words}
    if isinstance(error, UnknownSetting) and error.name not in names:
        return _explain_config_key(error)
    return None


def _explain_task_flag(words: list[str]) -> str | None:
    """Return a message for a flag such as `--env CartPole-v1`, if there is one."""
    if not words or words[0] not in TRANSLATED_COMMANDS:
        return None
    arguments = list(split_arguments(words[1:]))
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
    """Return the error message with all replaced arguments and the new command."""
    original = translation.original
    if len(translation.changes) == 1:
        change = translation.changes[0]
        if change.new.startswith("reverie "):  # the program: show its presets
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
    """Return a sentence on the only change of a command line."""
    old, new, note = change
    predicate = f"is `{new}`" if new else _missing(note)
    return f"`{old}` of {original.name} {predicate} in Reverie. {note}".rstrip()


def _table_row(change: Change) -> str:
    """Return one of several changes, as a line of a list."""
    new = f"is `{change.new}`." if change.new else f"{_missing(change.note)}."
    return f"`{change.old}` {new} {change.note}".rstrip()


def _missing(note: str) -> str:
    """Return the predicate of the sentence on an argument without replacement."""
    return "has no equivalent" if NO_EQUIVALENT.search(note) else "is not needed"


def _explain_config_key(error: UnknownSetting) -> str | None:
    """Return a message for a key of a config file; None if it is not in a table."""
    for original in originals():
        for flag in original.flags:
            match = re.fullmatch(flag.pattern, error.name)
            if match is None or flag.agent:
                continue
            # agent and task are not known here; assume DreamerV3 and Atari
            new = fill_template(
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
