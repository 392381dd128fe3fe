"""Bring in agents of the original DreamerV3, and hand ours back.

The original keeps one mapping from names like `dyn/dynin0/kernel` to arrays. Ours are
the same parameters under `dyn` as `dynin0.weight`, in PyTorch's layouts: linear kernels
transposed, convolutions (out, in, h, w); block kernels are alike. Nothing is computed,
so there and back is exact.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reverie.agents.dreamer.config import DreamerConfig
from reverie.api import StateDict, UserError
from reverie.nets.blocks import ByKey

NETWORKS = ("enc", "dyn", "dec", "rew", "con", "pol", "val", "slowval")
NORMS = ("retnorm", "valnorm", "advnorm")

IGNORED = (
    "(dyn|enc|dec)\\.typ|.*\\.winit|opt\\.momentum|policy\\.unimix|policy_dist_.*|"
    "report|logdir|seed|replicas?|.*\\.debug"
)
"""Options of the original that are about other things, or have no effect there."""


def from_original(
    arrays: Mapping[str, Any], like: StateDict, components: str = ".*"
) -> StateDict:
    """The state of an agent with the original's numbers in it.

    `like` is the state of an agent of that size; what the mapping does not mention
    (random generators, and the optimizer if only parameters were saved) stays as it is,
    as do components that the pattern does not name.
    """
    state = dict(like)
    used: set[str] = set()

    def take(name: str, old: Tensor) -> Tensor:
        if name not in arrays:
            raise UserError(
                f"The original has no {name!r}, which this agent needs.\n"
                "  Fix: build the agent with the original's config, observations and "
                "actions."
            )
        used.add(name)
        new = _to_ours(np.asarray(arrays[name]))
        if new.shape != old.shape:
            raise UserError(
                f"{name!r} is {tuple(new.shape)} in our layout, this agent wants "
                f"{tuple(old.shape)}.\n"
                "  Fix: build the agent with the original's config, or take some "
                "components alone with --run.from_components."
            )
        return new.to(old.dtype)

    def wanted(part: str) -> bool:
        try:
            return bool(re.fullmatch(components, part))
        except re.error:  # said by whoever is to load them
            return True

    whole = all(map(wanted, (*NETWORKS, *NORMS)))
    for part in filter(wanted, NETWORKS):
        state[part] = {
            k: take(original_name(part, k), v) for k, v in like[part].items()
        }
    for part in filter(wanted, NORMS):
        state[part] = {k: take(f"{part}/{k}/value", v) for k, v in like[part].items()}
    if not whole:
        return state
    if "slowval_count/value" in arrays:
        count = take("slowval_count/value", torch.zeros(()))
        state["counters"] = {**like["counters"], "slow_updates": count}
    if "opt/step/value" in arrays:
        state["opt"] = dict(like["opt"])
        state["opt"]["step"] = take("opt/step/value", torch.zeros(()))
        for moment, prefix in zip(("nu", "mu"), _moments(arrays), strict=True):
            state["opt"][moment] = {
                key: take(f"{prefix}/1/{_opt_name(key)}", old)
                for key, old in like["opt"][moment].items()
            }
            used.add(f"{prefix}/0")
    left = [k for k in arrays if k not in used and not k.startswith("opt/")]
    if left:
        raise UserError(
            f"This agent has no place for {left[0]!r} (and {len(left) - 1} more).\n"
            "  Fix: build the agent with the original's config, observations and "
            "actions."
        )
    return state


def to_original(state: StateDict) -> dict[str, np.ndarray]:
    """Our state under the original's names and in its layouts."""
    arrays = {}
    for part in NETWORKS:
        for key, tensor in state[part].items():
            arrays[original_name(part, key)] = _to_original(tensor)
    for part in NORMS:
        for key, tensor in state[part].items():
            arrays[f"{part}/{key}/value"] = _to_original(tensor)
    count = np.asarray(int(state["counters"]["slow_updates"]), np.int32)
    arrays["slowval_count/value"] = count
    step = np.asarray(int(state["opt"]["step"]), np.int32)
    for index, moment in ((1, "nu"), (2, "mu")):
        arrays[f"opt/state/{index}/0"] = step
        for key, tensor in state["opt"][moment].items():
            arrays[f"opt/state/{index}/1/{_opt_name(key)}"] = _to_original(tensor)
    arrays["opt/state/3/count"] = step
    arrays["opt/step/value"] = step
    return arrays


def original_name(part: str, name: str) -> str:
    """`dyn`, `dynin0.weight` -> `dyn/dynin0/kernel`."""
    *path, leaf = name.split(".")
    leaf = {"weight": "kernel"}.get(leaf, leaf)
    return "/".join([part, *(ByKey.key(slot) for slot in path), leaf])


def config_from_original(options: Mapping[str, Any]) -> DreamerConfig:
    """The original's agent config, nested or flat with dots, as ours."""
    changes: dict[str, Any] = {}
    for key, value in _flat(options).items():
        if re.fullmatch(IGNORED, key):
            continue
        ours = key.replace("dyn.rssm.", "rssm.").replace(".simple.", ".")
        *path, leaf = ours.split(".")
        place = changes
        for name in path:
            place = place.setdefault(name, {})
        place[leaf] = value
    config: DreamerConfig = _change(DreamerConfig(), changes, "")
    if config.opt.schedule == "cosine":
        # its floor is a part of the learning rate, and it passes 0.1 * lr there
        config = replace(config, opt=replace(config.opt, floor=0.1 * config.opt.lr))
    return config


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read the original's `agent.pkl`: arrays and containers, and nothing else.

    Returns its `params` (name to array) and `counters`.
    """
    data = _ArrayUnpickler(io.BytesIO(Path(path).read_bytes()), str(path)).read()
    if not isinstance(data, dict) or not isinstance(data.get("params"), dict):
        raise UserError(
            f"{path} holds no `params`.\n  Fix: pass the original's agent.pkl."
        )
    for name, array in data["params"].items():
        if (
            not isinstance(array, np.ndarray | np.generic)
            or array.dtype.kind not in "fiub"
        ):
            raise UserError(
                f"{path} holds {name!r}, which is not an array of numbers.\n"
                "  Fix: pass the original's agent.pkl."
            )
    return data


def read_state(path: str | Path, like: StateDict, components: str = ".*") -> StateDict:
    """The state of an agent with the numbers of the original's `agent.pkl` in it."""
    return from_original(read_checkpoint(path)["params"], like, components)


def _rebuilders() -> dict[tuple[str, str], Any]:
    """The names by which numpy pickles arrays, in all of its versions."""
    array, number = np.zeros(1), np.float32(0)
    allowed: dict[tuple[str, str], Any] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }
    for core in ("numpy.core", "numpy._core"):
        allowed[f"{core}.multiarray", "_reconstruct"] = array.__reduce_ex__(2)[0]
        allowed[f"{core}.multiarray", "scalar"] = number.__reduce_ex__(2)[0]
        allowed[f"{core}.numeric", "_frombuffer"] = array.__reduce_ex__(5)[0]
    return allowed


class _ArrayUnpickler(pickle.Unpickler):
    """Rebuilds numpy arrays, dtypes and plain containers; refuses every other name."""

    def __init__(self, file: io.BytesIO, path: str):
        super().__init__(file)
        self.path, self.allowed = path, _rebuilders()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise UserError(
                f"{self.path} asks for {module}.{name}, which no checkpoint needs.\n"
                "  Fix: do not use this file unless you know who made it."
            )
        return self.allowed[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise UserError(
            f"{self.path} refers to objects outside of itself.\n"
            "  Fix: do not use this file unless you know who made it."
        )

    def read(self) -> Any:
        try:
            return self.load()
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{self.path} is not a whole checkpoint ({error}).\n"
                "  Fix: pass the original's agent.pkl, and copy it again if it is one."
            ) from error


def _to_ours(array: np.ndarray) -> Tensor:
    if array.ndim == 2:
        array = array.T
    elif array.ndim == 4:
        array = array.transpose(3, 2, 0, 1)
    return torch.from_numpy(np.array(array, order="C"))


def _to_original(tensor: Tensor) -> np.ndarray:
    array = tensor.detach().cpu().numpy()
    if array.ndim == 2:
        array = array.T
    elif array.ndim == 4:
        array = array.transpose(2, 3, 1, 0)
    return np.array(array, order="C")


def _opt_name(key: str) -> str:
    part, name = key.split(".", 1)
    return original_name(part, name)


def _moments(arrays: Mapping[str, Any]) -> list[str]:
    """Where the two moments are; parts of the optimizer left out shift the numbers."""
    places = {m[1] for k in arrays if (m := re.match(r"(opt/state/\d+)/1/", k))}
    if len(places) != 2:
        raise UserError(
            f"The optimizer of the original has {len(places)} moments, not two.\n"
            "  Fix: leave out its `opt/` entries to take over the weights alone."
        )
    return sorted(places)


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _change(config: Any, changes: dict[str, Any], prefix: str) -> Any:
    """The config with all of the changes at once."""
    known = {field.name for field in fields(config)}
    new = {}
    for name, value in changes.items():
        if name not in known:
            raise UserError(
                f"The original's option {prefix + name!r} is not known.\n"
                "  Fix: drop it."
            )
        old = getattr(config, name)
        if is_dataclass(old):
            new[name] = _change(old, value, f"{prefix}{name}.")
        else:
            new[name] = tuple(value) if isinstance(old, tuple) else type(old)(value)
    return replace(config, **new)
