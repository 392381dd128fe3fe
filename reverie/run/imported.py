"""Checkpoints of other implementations that runs use: files, and their run folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from reverie.api import StateDict, UserError
from reverie.convert.importer import EncoderImporter, Settings
from reverie.convert.importers import ImportedFile, find_file, open_file
from reverie.run.checkpoint import has_checkpoint


def find_imported(path: str | Path, schema: type) -> ImportedFile | None:
    """Return the checkpoint of another implementation at `path`.

    None for a run or checkpoint of Reverie, and if there is no checkpoint. Raises an
    error that names the file if it is something else. `schema` is the class of the
    config, which has the settings of all agents.
    """
    path = Path(path).expanduser()
    if has_checkpoint(path):
        return None
    file = find_file(path, schema)
    return None if file is None else open_file(file, schema)


def check_agent(imported: ImportedFile, agent: str) -> None:
    """Raise if `agent`, the agent of the run, does not import this file."""
    if imported.agent != agent:
        with imported.explain_contents():
            presets = imported.importer.presets("", imported.contents)
        fix = f"--configs {presets[0]}" if presets else f"--agent {imported.agent}"
        raise UserError(
            f"{imported.describe()}, which the agent {imported.agent!r} imports, but "
            f"the agent of this run is {agent!r}.\n  Fix: {fix}, without settings that "
            "choose another agent."
        )


def missing_task(imported: ImportedFile) -> UserError:
    """Return the error for a file that is used without a task."""
    return UserError(
        f"{imported.describe()} and does not contain its task.\n"
        f"  Fix: {imported.importer.task_hint}"
    )


def encoder_importer(imported: ImportedFile) -> EncoderImporter:
    """Return the reader of the encoder; raise if the file cannot be a base run."""
    encoder = imported.importer.encoder
    if encoder is None:
        raise UserError(
            f"{imported.describe()}, whose encoder cannot be imported alone.\n"
            "  Fix: give the folder of a run of Reverie, for example one that was "
            f"trained with --run.from_checkpoint {imported.path}"
        )
    return encoder


def settings_of_file(
    imported: ImportedFile, given: Settings, components: str
) -> dict[str, Any]:
    """Return the settings that follow from a file, for the components to load."""
    infer = imported.importer.infer_settings
    with imported.explain_contents():
        inferred = infer(imported.path, imported.contents, given)
    settings: dict[str, Any] = {}
    for component, values in inferred.items():
        if not component or _matches(components, component):
            settings |= values
    return settings


def import_state(
    imported: ImportedFile, template: StateDict, components: str
) -> StateDict:
    """Return the state of an agent with the weights of a file."""
    with imported.explain_contents():
        return imported.importer.import_state(imported.path, template, components)


def _matches(pattern: str, component: str) -> bool:
    try:
        return bool(re.fullmatch(pattern, component))
    except re.error:  # reported when the weights are loaded
        return True
