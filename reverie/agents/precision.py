"""Floating-point formats of the networks, by name."""

from __future__ import annotations

import torch

from reverie.api import UserError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of a `--precision`."""
    if precision not in DTYPES:
        raise UserError(
            f"There is no precision {precision!r}.\n"
            f"  Fix: --precision {' or '.join(DTYPES)}"
        )
    return DTYPES[precision]
