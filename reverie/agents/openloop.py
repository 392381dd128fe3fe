"""The picture of what a world foresees."""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor


def openloop_video(
    true: UInt8[Tensor, "B T h w c"], pred: Float[Tensor, "B T h w c"], half: int
) -> UInt8[Tensor, "t y x 3"]:
    """Truth, prediction and error from top to bottom; sequences side by side.

    The border is green while the world watches and red while it dreams; some black
    frames mark the end.
    """
    length = true.shape[1]
    pred = (pred * 255).clamp(0, 255).to(torch.uint8)
    error = ((pred.int() - true.int() + 255) / 2).to(torch.uint8)
    video = torch.cat([true, pred, error], 2)
    channels = 3 if video.shape[-1] >= 3 else 1  # of any others, the first are shown
    video = video[..., :channels].expand(*video.shape[:-1], 3)
    b, t, h, w, c = video.shape
    framed = torch.zeros((b, t, h + 4, w + 4, c), dtype=torch.uint8, device=true.device)
    framed[:, :half, ..., 1] = 255
    framed[:, half:, ..., 0] = 255
    framed[:, :, 2:-2, 2:-2] = video
    framed = torch.cat([framed, torch.zeros_like(framed[:, : min(10, length)])], 1)
    return framed.permute(1, 2, 0, 3, 4).reshape(framed.shape[1], h + 4, -1, c)
