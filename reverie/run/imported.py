"""Find and import checkpoints of other implementations.

A path given by the user is a checkpoint file, or a run folder that contains one.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from reverie.api import StateDict, UserError
from reverie.convert.importer import EncoderImporter, Settings
from reverie.convert.importers import ImportedFile, find_file, open_file
from reverie.run.checkpoint import has_checkpoint


def find_imported(path: str | Path, schema: type) -> ImportedFile | None:
    """Return the checkpoint of another implementation at `path`.

    Return None for a run or checkpoint of Reverie, and if there is no checkpoint. Raise
    an error if the file is not a checkpoint. `schema` is the class of the config, which
    has the settings of all agents.
    """
    path = Path(path).expanduser()
    if has_checkpoint(path):
        return None
    file = find_file(path, schema)
    return None if file is None else open_file(file, schema)


def importing_agent(path: str | Path, schema: type) -> str:
    """Return the agent that imports the checkpoint at `path`; empty if there is none.

    It is empty for a run of Reverie, too.
    """
    with contextlib.suppress(UserError):
        imported = find_imported(path, schema) if path else None
        return imported.agent if imported else ""
    return ""


def check_importing_agent(imported: ImportedFile, agent: str) -> None:
    """Raise if `agent`, the agent of the run, cannot import this checkpoint."""
    if imported.agent != agent:
        with imported.explain_import_errors():
            presets = imported.importer.presets("", imported.contents)  # without a task
        fix = f"--configs {presets[0]}" if presets else f"--agent {imported.agent}"
        raise UserError(
            f"{imported.describe()}. The agent {imported.agent!r} can load it, but the "
            f"agent of this run is {agent!r}.\n  Fix: {fix}, without settings that "
            "select another agent."
        )


def missing_task(imported: ImportedFile) -> UserError:
    """Return the error for a checkpoint without a task, if the user gives none."""
    return UserError(
        f"{imported.describe()} and does not contain its task.\n"
        f"  Fix: {imported.importer.task_hint}"
    )


def encoder_importer(imported: ImportedFile) -> EncoderImporter:
    """Return the importer of the encoder alone; raise if there is none."""
    encoder = imported.importer.encoder
    if encoder is None:
        raise UserError(
            f"{imported.describe()}, whose encoder cannot be imported alone.\n"
            "  Fix: give the folder of a run of Reverie, for example one that was "
            f"trained with --run.from_checkpoint {imported.path}"
        )
    return encoder


def infer_settings(
    imported: ImportedFile, given: Settings, components: str
) -> dict[str, Any]:
    """Infer settings, such as layer sizes, from the tensors of a checkpoint.

    `given` are settings that the user gives and the tensors do not determine.
    `components` is the pattern of the components to load; settings of others are not
    returned.
    """
    importer = imported.importer
    with imported.explain_import_errors():
        inferred = importer.infer_settings(imported.path, imported.contents, given)
    settings: dict[str, Any] = {}
    for component, values in inferred.items():
        # settings of the component "" are always used
        if not component or _matches(components, component):
            settings |= values
    return settings


def import_state(
    imported: ImportedFile, template: StateDict, components: str
) -> StateDict:
    """Return the state of an agent with the weights of a file.

    `template` is the state of the new agent, with the names and shapes of all tensors.
    """
    with imported.explain_import_errors():
        return imported.importer.import_state(imported.path, template, components)


def _matches(pattern: str, component: str) -> bool:
    try:
        return bool(re.fullmatch(pattern, component))
    except re.error:  # reported when the weights are loaded
        return True
