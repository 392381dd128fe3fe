"""Previous actions (`prevact`): the actions that led to each row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from reverie.api import Action, Batch
from reverie.spaces import Spaces


def zero_actions(
    act_space: Spaces, batch: int, device: torch.device
) -> dict[str, Tensor]:
    """Return zeros by action key: the previous actions at the start of an episode."""
    return {
        key: torch.as_tensor(space.zeros(batch), device=device)
        for key, space in act_space.items()
    }


def to_tensors(action: Action, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert actions by key to tensors with the device and dtype of `like`."""
    return {
        key: torch.as_tensor(np.asarray(action[key])).to(tensor)
        for key, tensor in like.items()
    }


def previous_actions(batch: Batch, keys: Iterable[str]) -> dict[str, Tensor]:
    """Return the actions `(B, T, ...)` that led to each row; zero in the first row."""
    return {
        key: torch.cat([torch.zeros_like(batch[key][:, :1]), batch[key][:, :-1]], 1)
        for key in keys
    }
