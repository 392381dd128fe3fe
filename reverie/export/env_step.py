"""Policy step that takes observations and returns actions of the environment.

Observations are cast, resized and cropped, and actions are clipped and converted to the
environment's own units, as in `run/player.py`, but inside the exported step.

`Space.source` has the dtype and shape that the environment itself uses, `Space.native`
the bounds of an action before it was scaled to [-1, 1].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from reverie.agents.export_steps import StepModule
from reverie.api import Batch
from reverie.capabilities import ExportStep
from reverie.datasets.action_units import differ_in_units
from reverie.nets.rng import Rng
from reverie.run.load import PolicySource
from reverie.spaces import Space, Spaces, agent_obs_space

FRACTION_BITS = 22
"""Fractional bits of the fixed-point weights with which Pillow resizes images."""


def to_env_step(step: ExportStep, source: PolicySource) -> ExportStep:
    """Wrap a step of the agent in conversions from and to the environment."""
    obs_space = agent_obs_space(source.spaces.obs_space)
    act_space, resample = source.spaces.act_space, source.config.env.resample
    used = {key: obs_space[key] for key in step.inputs if key in obs_space}

    def run(inputs: Batch, state: Any, rng: Rng) -> tuple[dict[str, Tensor], Any]:
        obs = {k: _to_agent(inputs[k], space, resample) for k, space in used.items()}
        if source.crop is not None:
            obs = source.crop.center_crop(obs)
        flags = {key: x for key, x in inputs.items() if key not in used}
        actions, state = step.module({**obs, **flags}, state, rng)
        converted = {
            key: _to_env(actions[key], source.trained_spaces.act_space[key], space)
            for key, space in act_space.items()
        }
        return converted, state

    inputs: Spaces = {
        key: env_space(obs_space[key]) if key in obs_space else space
        for key, space in step.inputs.items()
    }
    return ExportStep(StepModule(run, step.module), inputs, step.initial)


def env_space(space: Space) -> Space:
    """Return the space in the environment's own dtype and shape."""
    return space if space.source is None else space.source.space


def _to_agent(value: Tensor, space: Space, resample: str) -> Tensor:
    """Cast an observation, and resize it if it is an image of another size."""
    if space.is_image:
        value = value if value.ndim == 4 else value[..., None]
        return resize(value, space.shape[:2], resample)
    return value.to(torch.as_tensor(space.zeros()).dtype)


def _to_env(value: Tensor, trained_space: Space, space: Space) -> Tensor:
    """Convert an action of the agent to the environment's own units.

    `trained_space` is the action space of training, which may have other bounds.
    """
    target = env_space(space)
    dtype = torch.as_tensor(target.zeros()).dtype
    if space.dtype.kind != "f":
        return value.to(dtype).reshape(value.shape[0], *target.shape)
    if differ_in_units(trained_space, space):
        value = _from_native(_to_native(value, trained_space), space)
    value = _to_native(_clip(value, space.low, space.high), space)
    value = value.to(dtype).reshape(value.shape[0], *target.shape)
    return value if space.source is None else _clip(value, target.low, target.high)


def _clip(value: Tensor, low: np.ndarray, high: np.ndarray) -> Tensor:
    least, most = (torch.tensor(x, dtype=value.dtype) for x in (low, high))
    return value.clamp(least, most)


def _to_native(value: Tensor, space: Space) -> Tensor:
    """Do the same as `Space.to_native`, on a tensor."""
    if space.native is None:
        return value
    low, high, finite = _native_bounds(space)
    rescaled = ((value + 1) / 2 * (high - low) + low).clamp(low, high)
    return torch.where(finite, rescaled, value)


def _from_native(value: Tensor, space: Space) -> Tensor:
    """Do the same as `Space.from_native`, on a tensor."""
    if space.native is None:
        return value
    low, high, finite = _native_bounds(space)
    width = torch.where(high > low, high - low, 1)
    return torch.where(finite, 2 * (value - low) / width - 1, value)


def _native_bounds(space: Space) -> tuple[Tensor, Tensor, Tensor]:
    low, high = (torch.tensor(bound) for bound in space.native)
    finite = torch.isfinite(low) & torch.isfinite(high)
    return torch.where(finite, low, -1), torch.where(finite, high, 1), finite


def resize(
    image: UInt8[Tensor, "B h w c"], size: tuple[int, int], resample: str
) -> UInt8[Tensor, "B h2 w2 c"]:
    """Resize images as `envs.wrappers.resize` does, with the same rounding."""
    if tuple(image.shape[1:3]) == tuple(size):
        return image
    if resample == "nearest":
        for axis in (1, 2):
            old, new = image.shape[axis], size[axis - 1]
            index = ((np.arange(new) + 0.5) * old / new).astype(np.int64)
            image = image.index_select(axis, torch.as_tensor(index))
        return image
    x = image.double()
    for axis in (2, 1):  # width, then height, each rounded to integers, as in Pillow
        old, new = x.shape[axis], size[axis - 1]
        if old == new:
            continue
        total = x.movedim(axis, -1) @ torch.as_tensor(bilinear_weights(old, new)).T
        total = torch.floor((total + 2 ** (FRACTION_BITS - 1)) / 2**FRACTION_BITS)
        x = total.clamp(0, 255).movedim(-1, axis)
    return x.to(torch.uint8)


def bilinear_weights(old: int, new: int) -> Float[np.ndarray, "new old"]:
    """Return the fixed-point weight of each old pixel for each new one."""
    scale = max(old / new, 1.0)
    center = (np.arange(new) + 0.5) * old / new
    distance = np.abs(np.arange(old) + 0.5 - center[:, None]) / scale
    weights = np.clip(1 - distance, 0, None)
    weights /= weights.sum(1, keepdims=True)
    fixed: np.ndarray = np.floor(weights * 2**FRACTION_BITS + 0.5)
    return fixed
