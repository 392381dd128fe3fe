"""Encoders of observations by name; all have the same arguments and config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from reverie.nets.dreamerv3_torch.encoder import DreamerV3TorchEncoder
from reverie.nets.encoder import Encoder

ENCODERS: Final[Mapping[str, type[Encoder] | type[DreamerV3TorchEncoder]]] = {
    "dreamerv3": Encoder,
    "dreamerv3_torch": DreamerV3TorchEncoder,
}
