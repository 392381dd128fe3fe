"""`Importer`: the functions that read checkpoints of another implementation.

The settings of an agent name its importers (`AgentConfig.importers`). The functions of
an importer read files without running code that the files contain.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from reverie.api import StateDict, UserError
from reverie.patterns import matches
from reverie.storage.limits import MAX_YAML_BYTES, InvalidFile, quote, read_bytes

T = TypeVar("T")
Settings = dict[str, Any]
"""Settings of Reverie by dotted name, such as `dreamer.rssm.deter`."""


@dataclass(frozen=True)
class EncoderImporter:
    """Reads only the encoder of a checkpoint, for agents that train on its features."""

    architecture: str
    """Name of the encoder in `nets/encoders.py`."""
    infer_config: Callable[[Any], Any]
    """Return the config of the encoder, from the contents of its file."""
    read: Callable[[Path], StateDict]
    """Return the weights of the encoder."""


@dataclass(frozen=True)
class Importer:
    """Reads the checkpoint files of one other implementation."""

    program: str
    """The implementation, such as `Δ-IRIS`."""
    file: str
    """Usual name of its checkpoint file, such as `last.pt`."""
    matches: Callable[[Any], bool]
    """True for the contents of its files: nested containers, and arrays that have a
    shape but no data."""
    import_state: Callable[[Path, StateDict, str], StateDict]
    """`import_state(path, template, components)`: return the state of an agent with the
    weights of a file. `template` is the agent's current state. Components that do not
    match the regular expression `components` are returned unchanged. The entry
    `continues_training` is True if the state includes the optimizers of the file."""
    infer_settings: Callable[[Path, Any, Settings], dict[str, Settings]]
    """`infer_settings(path, contents, given)`: return a dict from components to the
    settings that the shapes of their arrays determine. Settings are used only if their
    component is loaded; those under the key `""` always. `given` has the settings in
    `undetermined` that the user has set."""
    undetermined: tuple[str, ...] = ()
    """Settings that cannot be inferred from the shapes, and on which others depend."""
    base_presets: tuple[str, ...] = ()
    """Presets that reproduce the algorithm of the implementation, applied before all
    other settings."""
    presets: Callable[[str, Any], tuple[str, ...]] = lambda task, contents: ()
    """`presets(task, contents)`: return the presets of an agent for a task. They
    are used if no other setting chooses the agent."""
    defaults: Callable[[Any], Settings] = lambda contents: {}
    """Return settings for the contents of a file, applied after `presets`."""
    task_hint: str = "--task TASK, such as --task crafter_reward"
    """Flags that set the task, which the file does not contain."""
    find: Callable[[Path], list[Path]] = lambda folder: []
    """Return the checkpoints in a run or checkpoint folder of the implementation, the
    best or newest one first."""
    find_config: Callable[[Path], Path | None] = lambda path: None
    """Return the config file that the implementation saved with a checkpoint."""
    find_task: Callable[[Path], str] = lambda path: ""
    """Return the task from a config file that was saved with a checkpoint, or "". It is
    for implementations whose other settings are not converted (no `find_config`)."""
    note: Callable[[Any, Settings], str] = lambda contents, settings: ""
    """`note(contents, settings)`: return a message to print when a file is loaded: what
    is assumed because the file does not contain it. `settings` are those of the agent;
    their names are relative, such as `rssm.deter` for `dreamer.rssm.deter`."""
    encoder: EncoderImporter | None = None
    """Reader of the encoder, if other agents can train on its features."""


def find_files(folder: Path, *patterns: str) -> list[Path]:
    """Return the files of the first pattern that matches any, newest first.

    The newest file has the largest number or the latest date in its name, so names are
    sorted by length and then alphabetically.
    """
    for pattern in patterns:
        paths = [path for path in folder.glob(pattern) if path.is_file()]
        if paths:
            return sorted(paths, key=lambda p: (len(str(p)), str(p)), reverse=True)
    return []


def is_selected(components: str, name: str) -> bool:
    """True if a component matches the regular expression `components`."""
    try:
        return matches(components, name)
    except re.error:  # reported by `load_weights`
        return True


def split_stochastic(
    width: int, stoch: int, classes: int, options: str, group: str
) -> tuple[int, int]:
    """Return number and classes of the categorical variables; their product is `width`.

    `stoch` and `classes` are 0 if not known. Raises if they do not fit, with a message
    that names `options` of the original config and the settings in `group`.
    """
    number = stoch or (width // classes if classes else 0)
    if not number or number * (classes or width // number) != width:
        given = f", but {stoch} x {classes} are set" if stoch and classes else ""
        example = next(n for n in range(math.isqrt(width), 0, -1) if width % n == 0)
        raise UserError(
            f"The stochastic state of the checkpoint has {width} entries: the number "
            f"of variables times their classes{given}.\n  Fix: set {options} of its "
            f"config, for example --{group}.stoch {example} --{group}.classes "
            f"{width // example}"
        )
    return number, width // number


def select_prefix(values: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Return the entries whose names start with `prefix`, which is removed."""
    return {k[len(prefix) :]: v for k, v in values.items() if k.startswith(prefix)}


def entry_names(contents: Any) -> list[str]:
    """Return the keys of a mapping as text for messages; empty for other contents."""
    keys = list(contents) if isinstance(contents, Mapping) else []
    return [quote(str(key))[:40] for key in keys]


def read_text(path: Path) -> str:
    """Return the contents of a small text file; empty if there is none."""
    try:
        return read_bytes(path, MAX_YAML_BYTES).decode(errors="replace")
    except (OSError, InvalidFile):
        return ""
