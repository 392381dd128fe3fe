"""Import the encoder of a `latest.pt` of dreamerv3-torch or its forks.

Names begin with `_wm.encoder.`, or with `_wm._orig_mod.encoder.` if the model was
compiled; the weights are the same. The file does not contain the order of the
observation keys, so the user has to know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from reverie.api import UserError
from reverie.nets.dreamerv3_torch import DreamerV3TorchEncoderConfig
from reverie.storage.torch_file import read_tensors


def is_torch_file(path: str) -> bool:
    return path.endswith((".pt", ".pth"))


def read_encoder(path: str | Path) -> dict[str, Tensor]:
    """Return the encoder's weights with the names of `nets/dreamerv3_torch.py`."""
    encoder = {}
    for key, value in read_tensors(path, "agent_state_dict").items():
        plain = key.replace("_orig_mod.", "")
        if plain.startswith("_wm.encoder."):
            encoder[plain.removeprefix("_wm.encoder.")] = value
    renamed: dict[str, Tensor] = {}
    for part, rank, names in (
        ("_cnn", 4, ("convs", "cnorms")),
        ("_mlp", 2, ("linears", "norms")),
    ):
        tensors = [(k, v) for k, v in encoder.items() if k.split(".")[0] == part]
        layers = [v for _, v in tensors if v.ndim == rank]
        for i, value in enumerate(layers):
            renamed[f"{names[0]}.{i}.weight"] = value
        for leaf in ("weight", "bias"):
            norms = [v for k, v in tensors if v.ndim == 1 and k.endswith(f".{leaf}")]
            for i, value in enumerate(norms):
                renamed[f"{names[1]}.{i}.{leaf}"] = value
    if not renamed:
        raise UserError(
            f"{path} has no encoder of dreamerv3-torch (`_wm.encoder.*`).\n  Fix: use "
            "a latest.pt of dreamerv3-torch, or the folder of a Reverie run."
        )
    return renamed


def sizes_of(weights: Mapping[str, Tensor]) -> DreamerV3TorchEncoderConfig:
    convs = [v for k, v in weights.items() if k.startswith("convs.")]
    linears = [v for k, v in weights.items() if k.startswith("linears.")]
    default = DreamerV3TorchEncoderConfig()
    return DreamerV3TorchEncoderConfig(
        depth=convs[0].shape[0] if convs else default.depth,
        stages=len(convs) or default.stages,
        layers=len(linears) or default.layers,
        units=linears[0].shape[0] if linears else default.units,
    )
