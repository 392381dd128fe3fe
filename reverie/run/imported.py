"""Find and import checkpoints of other implementations.

A path given by the user is a checkpoint file, or a run folder that contains one.
"""

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

    Return None for a run or checkpoint of Reverie, and if there is no checkpoint. Raise
    an error if the file is not a checkpoint. `schema` is the class of the config, which
    has the settings of all agents.
    """
    path = Path(path).expanduser()
    if has_checkpoint(path):
        return None
    file = find_file(path, schema)
    return None if file is None else open_file(file, schema)


def check_agent(imported: ImportedFile, agent: str) -> None:
    """Raise if `agent`, the agent of the run, cannot import this checkpoint."""
    if imported.agent != agent:
        with imported.explain_import_errors():
            no_task = ""
            presets = imported.importer.presets(no_task, imported.contents)
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
    """Return the importer of the encoder alone; raise if there is none."""
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
    with imported.explain_import_errors():
        inferred = infer(imported.path, imported.contents, given)
    settings: dict[str, Any] = {}
    for component, values in inferred.items():
        # settings of the component "" are always used
        if not component or _matches(components, component):
            settings |= values
    return settings


def import_state(
    imported: ImportedFile, template: StateDict, components: str
) -> StateDict:
    """Return the state of an agent with the weights of a file."""
    with imported.explain_import_errors():
        return imported.importer.import_state(imported.path, template, components)


def _matches(pattern: str, component: str) -> bool:
    try:
        return bool(re.fullmatch(pattern, component))
    except re.error:  # reported when the weights are loaded
        return True
