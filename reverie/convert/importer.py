"""`Importer`: how the checkpoints of one other implementation are read.

The settings of an agent name its importers (`AgentConfig.importers`). The functions of
an importer read files without running code that the files contain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reverie.api import StateDict
from reverie.storage.limits import MAX_YAML_BYTES, InvalidFile, quote, read_bytes

Settings = dict[str, Any]
"""Values by dotted name."""


def no_presets(task: str, contents: Any) -> tuple[str, ...]:
    return ()


def no_defaults(contents: Any) -> Settings:
    return {}


def no_files(folder: Path) -> list[Path]:
    return []


def no_config(path: Path) -> Path | None:
    return None


def no_task(path: Path) -> str:
    return ""


@dataclass(frozen=True)
class EncoderImporter:
    """Reads only the encoder of a checkpoint, for agents that are trained on it."""

    architecture: str
    """Name of the encoder in `nets/encoders.py`."""
    infer_config: Callable[[Any], Any]
    """Return the config of the encoder; the argument is that of `Importer.matches`."""
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
    match the regular expression `components` are returned unchanged. If the entry
    `continues_training` is True, the state has the optimizers of the file, too."""
    infer_settings: Callable[[Path, Any, Settings], dict[str, Settings]]
    """`infer_settings(path, contents, given)`: return the settings that follow from the
    shapes of the arrays, by component; those under `""` are used also if only some
    components are loaded. `given` has the values of `undetermined` that the user has
    set."""
    undetermined: tuple[str, ...] = ()
    """Settings that do not follow from the shapes, and on which others depend."""
    algorithm: tuple[str, ...] = ()
    """Preset blocks of the algorithm of the file, applied before all other settings."""
    presets: Callable[[str, Any], tuple[str, ...]] = no_presets
    """`presets(task, contents)`: return the preset blocks of an agent for a task. They
    are used if no other setting chooses the agent."""
    defaults: Callable[[Any], Settings] = no_defaults
    """Return settings for the contents of a file, applied after `presets`."""
    task_hint: str = "--task TASK, such as --task crafter_reward"
    """Flags that set the task, which the file does not contain."""
    find: Callable[[Path], list[Path]] = no_files
    """Return the checkpoints in a run or checkpoint folder of the implementation, the
    best or newest one first."""
    find_config: Callable[[Path], Path | None] = no_config
    """Return the config file that the implementation saved with a checkpoint."""
    find_task: Callable[[Path], str] = no_task
    """Return the task in a config file that was saved with a checkpoint and from which
    nothing else is read; empty if there is none."""
    encoder: EncoderImporter | None = None
    """Reader of the encoder, if other agents can be trained on it."""


def find_files(folder: Path, *patterns: str) -> list[Path]:
    """Return the files that match the first pattern with a match, newest first.

    The newest file is the last by length and then alphabet: its name has the largest
    number, or the latest date.
    """
    for pattern in patterns:
        paths = [path for path in folder.glob(pattern) if path.is_file()]
        if paths:
            return sorted(paths, key=lambda p: (len(str(p)), str(p)), reverse=True)
    return []


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
