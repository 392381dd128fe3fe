"""The encoder of a `latest.pt` that dreamerv3-torch, or a fork of it, has saved.

Its names begin with `_wm.encoder.`, or with `_wm._orig_mod.encoder.` if the model was
compiled; both are the same weights. Nothing in such a file says which keys were read in
which order, so that stays with whoever uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from reverie.api import UserError
from reverie.nets.dreamerv3_torch import OlderEncoderConfig
from reverie.storage.torch_file import read_torch_file


def is_torch_file(path: str) -> bool:
    return path.endswith((".pt", ".pth"))


def read_encoder(path: str | Path) -> dict[str, Tensor]:
    """The weights of its encoder, under the names of `nets/dreamerv3_torch.py`."""
    data = read_torch_file(path)
    state = data.get("agent_state_dict", data) if isinstance(data, Mapping) else None
    if not isinstance(state, Mapping):
        raise _no_encoder(path)
    named = {key: value for key, value in state.items() if isinstance(key, str)}
    return encoder_of(named, path)


def encoder_of(state: Mapping[str, Any], path: str | Path) -> dict[str, Tensor]:
    found = {}
    for key, value in state.items():
        plain = key.replace("_orig_mod.", "")
        if plain.startswith("_wm.encoder.") and isinstance(value, Tensor):
            found[plain.removeprefix("_wm.encoder.")] = value
    ours: dict[str, Tensor] = {}
    for part, deep, names in (
        ("_cnn", 4, ("convs", "cnorms")),
        ("_mlp", 2, ("linears", "norms")),
    ):
        mine = [(k, v) for k, v in found.items() if k.split(".")[0] == part]
        layers = [v for _, v in mine if v.ndim == deep]
        for i, value in enumerate(layers):
            ours[f"{names[0]}.{i}.weight"] = value
        for leaf in ("weight", "bias"):
            norms = [v for k, v in mine if v.ndim == 1 and k.endswith(f".{leaf}")]
            for i, value in enumerate(norms):
                ours[f"{names[1]}.{i}.{leaf}"] = value
    if not ours:
        raise _no_encoder(path)
    return ours


def sizes_of(weights: Mapping[str, Tensor]) -> OlderEncoderConfig:
    """The sizes that go with weights."""
    convs = [v for k, v in weights.items() if k.startswith("convs.")]
    linears = [v for k, v in weights.items() if k.startswith("linears.")]
    known = OlderEncoderConfig()
    return OlderEncoderConfig(
        depth=convs[0].shape[0] if convs else known.depth,
        stages=len(convs) or known.stages,
        layers=len(linears) or known.layers,
        units=linears[0].shape[0] if linears else known.units,
    )


def _no_encoder(path: str | Path) -> UserError:
    return UserError(
        f"{path} has no encoder of dreamerv3-torch (`_wm.encoder.*`).\n"
        "  Fix: give the latest.pt of such a run, or the folder of one of ours."
    )
