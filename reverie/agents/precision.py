"""The number formats that networks compute in, by name."""

from __future__ import annotations

import torch

from reverie.api import UserError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_of(precision: str) -> torch.dtype:
    if precision not in DTYPES:
        known = ", ".join(DTYPES)
        raise UserError(f"There is no precision {precision!r}.\n  Fix: use {known}.")
    return DTYPES[precision]
