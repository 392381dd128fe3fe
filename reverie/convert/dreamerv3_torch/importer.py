"""Recognize checkpoints of dreamerv3-torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reverie.convert.dreamerv3_torch.checkpoint import (
    read_encoder,
    read_optimizers,
    select_weights,
)
from reverie.convert.dreamerv3_torch.config import PRESET, WORLD
from reverie.convert.dreamerv3_torch.sizes import infer_encoder, infer_settings
from reverie.convert.dreamerv3_torch.weights import import_state
from reverie.convert.importer import EncoderImporter, Importer, Settings, find_files

STOCH_SETTINGS = (f"{WORLD}.stoch", f"{WORLD}.classes")
OPTIMIZER_SETTINGS = {
    "model": "dreamer.world_opt",
    "actor": "dreamer.actor_opt",
    "value": "dreamer.critic_opt",
}


def _infer(path: Path, contents: Any, given: Settings) -> dict[str, Settings]:
    sizes = (int(given.get(name, 0)) for name in STOCH_SETTINGS)
    settings = infer_settings(select_weights(contents), *sizes)
    return {"": {**settings, **_infer_optimizers(path)}}


def _infer_optimizers(path: Path) -> dict[str, float]:
    """Return learning rates and epsilons, which PyTorch saves with an optimizer."""
    settings: dict[str, float] = {}
    optimizers = read_optimizers(path)
    for name, group in OPTIMIZER_SETTINGS.items():
        groups = optimizers.get(name, {}).get("param_groups")
        first = groups[0] if isinstance(groups, list) and groups else {}
        for key in ("lr", "eps"):
            value = first.get(key) if isinstance(first, Mapping) else None
            if isinstance(value, float) and 0 < value < math.inf:
                settings[f"{group}.{key}"] = value
    return settings


def _note(contents: Any, settings: Settings) -> str:
    """State how images are preprocessed, which the file does not contain."""
    has_images = any(
        n.startswith("_wm.encoder._cnn.") for n in select_weights(contents)
    )
    if not has_images or settings.get("enc.standard", "none") != "none":
        return ""
    return (
        "Images are preprocessed as pixels / 255 - 0.5, as in dreamerv3-torch. If its "
        "robomimic fork trained this checkpoint with `image_standardize: True`, add "
        "--configs standardize and --offline.stats FILE."
    )


IMPORTER = Importer(
    program="dreamerv3-torch",
    file="latest.pt",
    matches=lambda contents: bool(select_weights(contents)),
    import_state=import_state,
    infer_settings=_infer,
    undetermined=STOCH_SETTINGS,
    base_presets=(PRESET,),
    find=lambda folder: find_files(folder, "latest.pt", "latest_model.pt"),
    note=_note,
    encoder=EncoderImporter(
        PRESET, lambda contents: infer_encoder(select_weights(contents)), read_encoder
    ),
)
