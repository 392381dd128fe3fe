"""Chooses the size of the networks if the settings of a run give no size.

An agent declares its sizes in `AgentConfig.sizes`. The chosen size is saved in the
config: its settings, and its name as the setting `size`. It is not chosen again when
the run is resumed or its agent is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from reverie import config as configs
from reverie.capabilities import AgentConfig
from reverie.run.presets import expand_presets

if TYPE_CHECKING:
    from reverie.run.config import Config

MEMORY_FRACTION = 0.5
"""Fraction of the free GPU memory that the estimated training memory may take. The
other half is for larger images, float32 and a copy of the replay."""


def choose_size(
    sizes: tuple[str, ...], device: str, config_of: Callable[[str], AgentConfig]
) -> str:
    """Return the preset of the size to use on a device.

    `sizes` are presets, largest first. `config_of` returns the settings of the agent
    with one of them. Without a CUDA GPU, the smallest is used; on a GPU whose memory is
    not known, the largest.
    """
    if not uses_cuda(device):
        return sizes[-1]
    free = free_gpu_memory(device)
    if free is None:
        return sizes[0]
    limit = free * MEMORY_FRACTION
    fitting = (name for name in sizes if config_of(name).training_memory <= limit)
    return next(fitting, sizes[-1])


def uses_cuda(device: str) -> bool:
    """True if the setting `device` means a CUDA GPU."""
    if device == "auto":
        return torch.cuda.is_available()
    return device.startswith("cuda")


def free_gpu_memory(device: str) -> int | None:
    """Return the free bytes of a CUDA GPU; None if this machine does not have it."""
    name = "cuda" if device == "auto" else device
    try:
        return torch.cuda.mem_get_info(name)[0]
    except (AssertionError, RuntimeError, ValueError):
        return None


def describe_size(config: Config, is_new: bool) -> str:
    """Return lines about the size that was chosen; empty if settings give a size."""
    if not config.size:
        return ""
    if not is_new:
        return f"  network size {config.size}, chosen when the run was started\n"
    sizes = config.agent_config.sizes
    reason = "for runs without a CUDA GPU"
    if uses_cuda(config.device):
        reason = f"the largest up to {sizes[0]} that fits in the GPU memory"
    example = next(name for name in reversed(sizes) if name != config.size)
    return (
        f"  network size {config.size}: chosen {reason}, because no setting gives a "
        f"size\n  (for another size: --configs {example}, in a new run folder)\n"
    )


def smaller_size_flag(config: Config) -> str:
    """Return the flag for the smallest networks; empty if it would not reduce them."""
    agent = config.agent_config
    if not agent.sizes:
        return ""
    layers = [("the config", asdict(config)), *expand_presets(agent.sizes[-1:])]
    smallest = configs.resolve(type(config), layers).agent_config
    is_smaller = smallest.training_memory < agent.training_memory
    return f"--configs {agent.sizes[-1]}" if is_smaller else ""
