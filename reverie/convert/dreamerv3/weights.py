"""Import and export checkpoints of the original DreamerV3 (danijar/dreamerv3, JAX).

The original stores one dict from names like `dyn/dynin0/kernel` to arrays. In Reverie,
the component `dyn` has the same parameter as `dynin0.weight`, in PyTorch's layout:
linear kernels are transposed and convolutions are (out, in, h, w); block-diagonal
kernels are unchanged. Import and export are exact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reverie.api import StateDict, UserError
from reverie.convert.importer import is_selected
from reverie.nets.blocks import ModulesByKey
from reverie.storage.file_kind import PICKLE, TEXT, UNKNOWN, file_kind
from reverie.storage.limits import InvalidFile, quote, read_bytes
from reverie.storage.numpy_pickle import parse_arrays
from reverie.storage.outline import MAX_PICKLE_BYTES

NETWORKS = ("enc", "dyn", "dec", "rew", "con", "pol", "val", "slowval")
NORMS = ("retnorm", "valnorm", "advnorm")
"""Running statistics of returns, values and advantages."""


def from_original(
    arrays: Mapping[str, Any], template: StateDict, components: str = ".*"
) -> StateDict:
    """Return the state of an agent with the values of the original.

    `template` is the state of an agent of the same size. It provides the entries that
    `arrays` does not have (random generators, and the optimizer if only parameters were
    saved), and the components that do not match the pattern `components`.
    """
    state = dict(template)
    used: set[str] = set()

    def take(name: str, old: Tensor) -> Tensor:
        """Return an array in the dtype and layout of `old`, and mark it as used."""
        if name not in arrays:
            raise UserError(
                f"The checkpoint has no {name!r}, which this agent needs.\n"
                "  Fix: use the config, observations and actions of the checkpoint."
            )
        used.add(name)
        new = _from_original_layout(np.asarray(arrays[name]))
        if new.shape != old.shape:
            raise UserError(
                f"{name!r} has shape {tuple(new.shape)} in the checkpoint, and "
                f"{tuple(old.shape)} in this agent.\n"
                "  Fix: use the config of the checkpoint, or load only some components "
                "with --run.from_components."
            )
        return new.to(old.dtype)

    selected = [x for x in (*NETWORKS, *NORMS) if is_selected(components, x)]
    for part in selected:
        is_network = part in NETWORKS
        state[part] = {
            k: take(original_name(part, k) if is_network else f"{part}/{k}/value", v)
            for k, v in template[part].items()
        }
    if len(selected) < len(NETWORKS) + len(NORMS):
        return state
    if "slowval_count/value" in arrays:
        count = take("slowval_count/value", torch.zeros(()))
        state["counters"] = {**template["counters"], "updates_taken": count}
    if "opt/step/value" in arrays:
        state["opt"] = dict(template["opt"])
        state["opt"]["step"] = take("opt/step/value", torch.zeros(()))
        # in the state of each moment, entry 0 is the step and entry 1 has the arrays
        for moment, prefix in zip(("nu", "mu"), _moment_prefixes(arrays), strict=True):
            state["opt"][moment] = {
                key: take(f"{prefix}/1/{_opt_name(key)}", old)
                for key, old in template["opt"][moment].items()
            }
            used.add(f"{prefix}/0")
    unused = [k for k in arrays if k not in used and not k.startswith("opt/")]
    if unused:
        raise UserError(
            f"This agent has no parameter {unused[0]!r}, which is in the checkpoint "
            f"(arrays without a parameter: {len(unused)}).\n"
            "  Fix: use the config, observations and actions of the checkpoint."
        )
    return state


def to_original(state: StateDict) -> dict[str, np.ndarray]:
    """Return the state of an agent with the names and layouts of the original."""
    arrays = {}
    for part in NETWORKS:
        for key, tensor in state[part].items():
            arrays[original_name(part, key)] = _to_original_layout(tensor)
    for part in NORMS:
        for key, tensor in state[part].items():
            arrays[f"{part}/{key}/value"] = _to_original_layout(tensor)
    count = np.asarray(int(state["counters"]["updates_taken"]), np.int32)
    arrays["slowval_count/value"] = count
    # `opt/state/1` has the running RMS, `2` the momentum, `3` the learning rate
    step = np.asarray(int(state["opt"]["step"]), np.int32)
    for index, moment in ((1, "nu"), (2, "mu")):
        arrays[f"opt/state/{index}/0"] = step
        for key, tensor in state["opt"][moment].items():
            arrays[f"opt/state/{index}/1/{_opt_name(key)}"] = _to_original_layout(
                tensor
            )
    arrays["opt/state/3/count"] = step
    arrays["opt/step/value"] = step
    return arrays


def original_name(part: str, name: str) -> str:
    """Return the original's name: `dyn/dynin0/kernel` for `dyn`, `dynin0.weight`."""
    *path, leaf = name.split(".")
    leaf = {"weight": "kernel"}.get(leaf, leaf)
    return "/".join([part, *(ModulesByKey.key(module) for module in path), leaf])


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read `agent.pkl` of the original; only arrays and plain containers are allowed.

    Returns a dict with `params` (arrays by name, read-only) and `counters`.
    """
    try:
        kind = file_kind(path)
        # pickles of protocols 0 and 1 have no signature, and may be text
        if kind not in (PICKLE, UNKNOWN, TEXT):
            raise InvalidFile(f"is {kind}, not a pickle")
        data = parse_arrays(read_bytes(Path(path), MAX_PICKLE_BYTES))
        params = data.get("params") if isinstance(data, dict) else None
        if not isinstance(params, dict):
            raise InvalidFile("has no `params`")
        for name, array in params.items():
            if not isinstance(array, np.ndarray | np.generic):
                raise InvalidFile(f"has {quote(str(name))!r}, which is not an array")
    except InvalidFile as error:
        raise UserError(
            f"{path} {error}.\n  Fix: use agent.pkl of the original, or copy it again."
        ) from error
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror or error}.\n"
            "  Fix: use agent.pkl of the original."
        ) from None
    return dict(data)


def import_state(
    path: str | Path, template: StateDict, components: str = ".*"
) -> StateDict:
    """Return the state of an agent with the weights of `agent.pkl`."""
    if "dyngru.weight" not in template["dyn"]:
        raise UserError(
            f"{path} is a checkpoint of danijar/dreamerv3, but this run has another "
            "world model.\n  Fix: --dreamer.world rssm, without the presets of other "
            "world models."
        )
    return from_original(read_checkpoint(path)["params"], template, components)


def _from_original_layout(array: np.ndarray) -> Tensor:
    if array.ndim == 2:
        array = array.T
    elif array.ndim == 4:
        array = array.transpose(3, 2, 0, 1)
    return torch.from_numpy(np.array(array, order="C"))


def _to_original_layout(tensor: Tensor) -> np.ndarray:
    array = tensor.detach().cpu().numpy()
    if array.ndim == 2:
        array = array.T
    elif array.ndim == 4:
        array = array.transpose(2, 3, 1, 0)
    return np.array(array, order="C")


def _opt_name(key: str) -> str:
    """Return the original's name of a parameter such as `dyn.dynin0.weight`."""
    part, name = key.split(".", 1)
    return original_name(part, name)


def _moment_prefixes(arrays: Mapping[str, Any]) -> list[str]:
    """Return the name prefixes of `nu` and `mu`.

    The index N in their prefix `opt/state/N` depends on the optimizer's settings.
    """
    prefixes = {m[1] for k in arrays if (m := re.match(r"(opt/state/\d+)/1/", k))}
    if len(prefixes) != 2:
        raise UserError(
            f"The optimizer in the checkpoint has {len(prefixes)} moments, not 2.\n"
            "  Fix: load only the networks, without the optimizer: "
            f"--run.from_components '{'|'.join(NETWORKS)}'"
        )
    return sorted(prefixes)
