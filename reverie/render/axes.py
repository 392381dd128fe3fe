"""What pictures with axes share: colours, round numbers and words, drawn by Pillow.

Everything is drawn at `SCALE` times its size and scaled down, for smooth lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

SCALE = 2

PAPER, GRID, AXIS = (255, 255, 255), (232, 234, 237), (154, 160, 166)
INK, FAINT = (32, 33, 36), (95, 99, 104)
COLOURS = [  # told apart by colour-blind readers too (Okabe and Ito)
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
]


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between the ends: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def axis(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """From values to pixels."""
    span = (high - low) or 1.0
    return lambda value: start + (float(value) - low) / span * (end - start)


def label(value: float) -> str:
    """1500000 -> 1.5M; short, whatever the size."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size * SCALE)
