"""Errors for runs that do not fit into memory.

`check_memory` refuses settings whose minimum memory is more than is available.
`explain_out_of_memory` converts a failed allocation to an error with the requested size
and the settings that reduce it.
"""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from reverie import config as configs
from reverie.api import UserError
from reverie.plugins import error_message, settings_name
from reverie.replay.memory_plan import available_memory, format_bytes
from reverie.run.checkpoint import Checkpoints
from reverie.run.config import Config
from reverie.run.folder import resolve_logdir
from reverie.run.size import free_gpu_memory, smaller_size_flag, uses_cuda

MIN_ROW_BYTES = 256
"""Lower bound of the memory per row of a batch: 64 activations in float32."""

MIN_WORKER_BYTES = 20_000_000
"""Lower bound of the memory of a worker process."""

ESTIMATE_MARGIN = 16
"""A run is refused if the estimate `AgentConfig.training_memory` is above this multiple
of the memory. The factor is large, because the estimate is for image observations, and
other data needs less."""

MAX_LAYERS = 1000
"""Maximum number of layers of a network, or of networks of an ensemble; more would take
minutes to build."""

LAYERS = re.compile(r"(?:dyn|img|obs)?layers|models")
"""Names of the settings that `MAX_LAYERS` limits."""

BYTES_PER_WEIGHT = 16
"""Memory per weight in training: weight, gradient and two moments, in float32."""

_OUT_OF_MEMORY = re.compile(
    "out of memory|can't allocate memory|cannot allocate memory|_ALLOC_FAILED",
    re.IGNORECASE,
)
"""Matches messages of errors that are caused by a failed allocation."""
_AMOUNT = re.compile(r"(?:[Tt]ried|Unable) to allocate ([\d.]+) ?(\w+)")
"""Matches the requested size in such a message: number and unit."""


def check_memory(config: Config) -> None:
    """Raise if environments, networks or batches cannot fit into memory."""
    memory = available_memory()
    processes = min(config.env.vector.workers, config.run.envs)
    if processes * MIN_WORKER_BYTES > memory:
        raise UserError(
            f"{processes:,} worker processes need at least "
            f"{format_bytes(processes * MIN_WORKER_BYTES)} of memory, but "
            f"{format_bytes(memory)} are available.\n"
            "  Fix: --env.vector.workers -1, for one per CPU core."
        )
    where = "memory"  # name of the memory, for messages
    if uses_cuda(config.device):
        where, memory = "GPU memory", free_gpu_memory(config.device) or memory
    _check_networks(config, memory, where)
    for group in batch_settings(config):
        needed = math.prod(group.values()) * MIN_ROW_BYTES
        if needed > memory:
            _raise_too_large(
                config, group, f"at least {format_bytes(needed)}", memory, where
            )
    needed = config.agent_config.training_memory
    if needed > memory * ESTIMATE_MARGIN:
        # raises for the first kind of batch; an agent without batches is not refused
        for group in batch_settings(config):
            _raise_too_large(
                config, group, f"about {format_bytes(needed)}", memory, where
            )


def _check_networks(config: Config, memory: int, where: str) -> None:
    """Raise if a network of this config has too many layers or weights."""
    values = configs.flatten(config)
    defaults = configs.flatten(type(config)())
    groups = (settings_name(config.agent), "explore")
    for name, layers in values.items():
        group, _, setting = name.rpartition(".")
        if name.partition(".")[0] not in groups or not LAYERS.fullmatch(setting):
            continue
        if layers > MAX_LAYERS:
            raise UserError(
                f"--{name} {layers} is too large: at most {MAX_LAYERS:,} are "
                f"supported.\n  Fix: --{name} {defaults[name]}"
            )
        width = next((x for x in ("units", "width") if f"{group}.{x}" in values), "")
        units = values[f"{group}.{width}"] if width else 0
        needed = (layers - 1) * units**2 * BYTES_PER_WEIGHT
        if needed > memory:
            raise UserError(
                f"A network with --{name} {layers} and --{group}.{width} {units} needs "
                f"at least {format_bytes(needed)} of {where} in training, but "
                f"{format_bytes(memory)} are available.\n"
                f"  Fix: --{group}.{width} {defaults[f'{group}.{width}']}"
            )


def _raise_too_large(
    config: Config, group: dict[str, int], needed: str, memory: int, where: str
) -> None:
    """Raise the error for batches that need too much memory.

    `group` has the settings of one kind of batch, and `needed` is the memory as text.
    """
    settings = " and ".join(f"--{name} {value}" for name, value in group.items())
    default = configs.flatten(type(config.agent_config)())
    prefix = settings_name(config.agent) + "."
    defaults = {name: int(default[name.removeprefix(prefix)]) for name in group}
    largest = max(group, key=lambda name: group[name] / defaults[name])
    fix = f"--{largest} {defaults[largest]}"
    if group[largest] <= defaults[largest]:  # the networks are too large
        size = smaller_size_flag(config) or "smaller networks"
        fix = f"{size}, without other settings of network sizes."
    raise UserError(
        f"Training with {settings} needs {needed} of {where}, but "
        f"{format_bytes(memory)} are available.\n  Fix: {fix}"
    )


def batch_settings(config: Config) -> list[dict[str, int]]:
    """Return name and value of the settings in `AgentConfig.batch_settings`.

    Each dict is for one kind of batch; the product of its values is the number of rows.
    """
    values = configs.flatten(config.agent_config)
    prefix = settings_name(config.agent) + "."
    groups = config.agent_config.batch_settings
    return [{prefix + name: int(values[name]) for name in group} for group in groups]


@contextmanager
def explain_out_of_memory(
    config: Config, activity: str, *settings: str
) -> Iterator[None]:
    """Convert errors of memory allocation to a `UserError` that suggests settings.

    `activity` is what the run is doing, for the message. `settings` are names of
    settings that need memory there; by default, those of the agent's batches.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"{describe_out_of_memory(error, activity)}\n"
            f"  Fix: {_advice(config, settings)}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocation in host or GPU memory failed."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(
        _OUT_OF_MEMORY.search(error_message(error))
    )


def describe_out_of_memory(error: BaseException, activity: str) -> str:
    """Return a sentence about which memory is full, and the requested size."""
    text = error_message(error)
    # messages of CUDA libraries contain names such as CUDA_ERROR and CUBLAS_STATUS
    on_gpu = isinstance(error, torch.OutOfMemoryError) or re.search("CU[A-Z]", text)
    where = "The GPU" if on_gpu else "This machine"
    amount = ""
    if match := _AMOUNT.search(text):
        number, unit = match.groups()
        size = format_bytes(float(number)) if unit == "bytes" else f"{number} {unit}"
        amount = f": {size} could not be allocated"
    return f"{where} ran out of memory while {activity}{amount}."


def _advice(config: Config, settings: tuple[str, ...]) -> str:
    """Return flags that reduce the memory: half of the current values."""
    values = configs.flatten(config)
    current: dict[str, int] = {name: values[name] for name in settings}
    if not settings:
        for group in batch_settings(config):
            current |= group
    advice = [f"--{k} {v // 2} (now {v:,})" for k, v in current.items() if v > 1]
    if smaller := smaller_size_flag(config):
        advice.append(f"smaller networks ({smaller})")
    advice.append("end other programs that use this memory")
    has_checkpoint = Checkpoints(resolve_logdir(config.logdir) / "ckpt").paths()
    new_folder = "; other settings need a new --logdir" if has_checkpoint else ""
    return f"{', or '.join(advice)}{new_folder}."
