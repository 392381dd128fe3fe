"""Recognize checkpoints and run folders of Δ-IRIS."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from reverie.convert.delta_iris.sizes import HEADS, infer_settings, infer_training
from reverie.convert.delta_iris.weights import import_state
from reverie.convert.importer import Importer, Settings, find_files, read_text
from reverie.plugins import settings_name
from reverie.storage.limits import InvalidFile, parse_yaml
from reverie.storage.torch_file import read_torch_file

CODEBOOK = "tokenizer.quantizer.codebook"
"""A tensor that all checkpoints have."""
MASK = "world_model.transformer.blocks.0.sa.mask"
"""Attention mask of the first transformer layer."""


def is_checkpoint(contents: Any) -> bool:
    return isinstance(contents, Mapping) and CODEBOOK in contents


def _infer(path: Path, contents: Any, given: Settings) -> dict[str, Settings]:
    settings = infer_settings(contents, given)
    if "world_model" in settings and MASK in contents:
        mask = read_torch_file(path, [MASK])[MASK]
        # with block-causal attention, the first token attends to the second
        kind = "block_causal" if mask[0, 1] else "causal"
        settings["world_model"]["iris.world_model.transformer.attention"] = kind
    return settings


def find_task(path: Path) -> str:
    """Return the task of the run of a checkpoint, from its `config/trainer.yaml`."""
    for folder in path.absolute().parents[:2]:
        try:
            data = parse_yaml(read_text(folder / "config" / "trainer.yaml"))
        except (InvalidFile, yaml.YAMLError):
            continue
        for key in ("env", "train", "id"):
            data = data.get(key) if isinstance(data, Mapping) else None
        name = re.fullmatch(r"(?:ALE/)?(\w+?)(?:NoFrameskip)?-v\d", str(data))
        if name is not None:
            is_crafter = name[1] == "CrafterReward"
            return "crafter_reward" if is_crafter else f"atari_{settings_name(name[1])}"
    return ""


def _presets(task: str, contents: Any) -> tuple[str, ...]:
    return ("iris_atari" if task.startswith("atari") else "iris_crafter",)


IMPORTER = Importer(
    program="Δ-IRIS",
    file="last.pt",
    matches=is_checkpoint,
    import_state=import_state,
    infer_settings=_infer,
    undetermined=(HEADS,),
    presets=_presets,
    defaults=infer_training,
    task_hint="--task crafter_reward, or --task atari_GAME",
    find_task=find_task,
    find=lambda folder: find_files(folder, "last.pt", "checkpoints/last.pt"),
)
