"""Recognize checkpoints of dreamerv3-torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reverie.convert.dreamerv3_torch.checkpoint import (
    read_encoder,
    select_weights,
)
from reverie.convert.dreamerv3_torch.config import PRESET, WORLD
from reverie.convert.dreamerv3_torch.sizes import infer_encoder, infer_settings
from reverie.convert.dreamerv3_torch.weights import import_state
from reverie.convert.importer import EncoderImporter, Importer, Settings, find_files

STOCH_SETTINGS = (f"{WORLD}.stoch", f"{WORLD}.classes")


def _infer(path: Path, contents: Any, given: Settings) -> dict[str, Settings]:
    sizes = (int(given.get(name, 0)) for name in STOCH_SETTINGS)
    return {"": infer_settings(select_weights(contents), *sizes)}


IMPORTER = Importer(
    program="dreamerv3-torch",
    file="latest.pt",
    matches=lambda contents: bool(select_weights(contents)),
    import_state=import_state,
    infer_settings=_infer,
    undetermined=STOCH_SETTINGS,
    base_presets=(PRESET,),
    find=lambda folder: find_files(folder, "latest.pt", "latest_model.pt"),
    encoder=EncoderImporter(
        PRESET, lambda contents: infer_encoder(select_weights(contents)), read_encoder
    ),
)
