"""Weights of the authors' VTA, and of its port with actions, as weights of ours.

Their names differ from each other, and ours from both: the parts of a Gaussian head are
one layer here, and the three encoders are one stack of recurrent units. Both save bare
mappings from names to tensors (`model_best.pt`), without the temperature of the flags,
which therefore begins anew. `--run.from_checkpoint model_best.pt` takes such a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from reverie.api import StateDict, UserError
from reverie.storage.torch_file import read_torch_file

_HEADS = ("prior_abs", "prior_obs", "post_abs", "post_obs")
_NETS = {"enc_obs": "enc", "dec_obs": "dec", "post_boundary": "detector"}
_READERS = ("abs_post_fwd", "obs_post_fwd", "abs_post_bwd")
_CELLS = {"update_abs_belief": "abs_cell", "update_obs_belief": "obs_cell"}
_GRU = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
_COUNTED = r"^age$|^temperature$|num_batches_tracked$"
"""What we count anew."""


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The weights of such a file, under our names."""
    data = read_torch_file(path)
    entries = data.items() if isinstance(data, Mapping) else ()
    tensors = {k: v for k, v in entries if isinstance(v, Tensor) and isinstance(k, str)}
    try:
        ours = from_reference(tensors) if _is_vta(tensors) else {}
        wrong = f"{path} holds no VTA."
    except KeyError as missing:
        ours, wrong = {}, f"{path} has no {missing.args[0]!r}."
    if "abs_feat.weight" not in ours:
        raise UserError(
            f"{wrong}\n  Fix: pass model_best.pt or ckpt_STEP.pt of the port."
        )
    return ours


def read_state(path: str | Path, like: StateDict, components: str = ".*") -> StateDict:
    """The state of a watcher with the weights of a file in its world."""
    theirs, mine = read_checkpoint(path), like["world"]
    wanted = {k: v.shape for k, v in mine.items() if not re.search(_COUNTED, k)}
    came = {key: value.shape for key, value in theirs.items()}
    odd = [key for key in {**wanted, **came} if wanted.get(key) != came.get(key)]
    if odd:
        sizes, present = _sizes(theirs), _sizes(mine)
        fixes = [f"--{k} {x}" for k, x in sizes.items() if present[k] != x]
        told, known = (_actions(x) for x in (theirs, mine))
        if told != known:
            fixes.append(
                f"sequences with actions of {told} numbers"
                if told
                else "--sequences.actions False"
            )
        raise UserError(
            f"The world in {path} differs from this one, first in {odd[0]!r}: "
            f"{_shape(came, odd[0])}, not {_shape(wanted, odd[0])}.\n  Fix: "
            f"{' '.join(fixes) or 'pass a whole file, of images of this size'}"
        )
    return {**like, "world": {**mine, **theirs}}


def _sizes(ours: Mapping[str, Tensor]) -> dict[str, int | bool]:
    """Settings for a world of these weights."""
    belief, both = ours["abs_feat.weight"].shape
    layers = sum(bool(re.match(r"detector\.conv\d+\.weight", key)) for key in ours)
    sizes = {
        "belief": belief,
        "state": both - belief,
        "layers": layers,
        "bias": "enc.conv0.bias" in ours,
        "static_lower_belief": "obs_cell.weight_ih" not in ours,
    }
    return {f"vta.world.{name}": size for name, size in sizes.items()}


def _actions(ours: Mapping[str, Tensor]) -> int:
    """Numbers an action has for a world of these weights."""
    if "abs_cell.weight_ih" not in ours:
        return 0
    belief, both = ours["abs_feat.weight"].shape
    return int(ours["abs_cell.weight_ih"].shape[-1]) - (both - belief)


def _shape(shapes: Mapping[str, torch.Size], key: str) -> str:
    return str(tuple(shapes[key])) if key in shapes else "nothing"


def from_reference(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of either code, under our names and in our shapes.

    Works for weights, gradients and batch norm statistics alike; what a mapping does
    not have stays out of the result.
    """
    left = {_plain(key): value for key, value in theirs.items()}
    left = {k: v for k, v in left.items() if not k.endswith("num_batches_tracked")}
    ours: dict[str, Tensor] = {}
    for head in _HEADS:
        for leaf in ("weight", "bias"):
            parts = [f"{head}_state.{part}.{leaf}" for part in ("mean", "std")]
            if parts[0] in left:
                ours[f"{head}.out.{leaf}"] = torch.cat([left.pop(p) for p in parts])
    for leaf in _GRU:
        names = [f"{reader}.{leaf}" for reader in _READERS]
        if names[0] in left:
            ours[f"readers.{leaf}"] = torch.stack([left.pop(name) for name in names])
        for theirs_name, name in _CELLS.items():
            if f"{theirs_name}.{leaf}" in left:
                ours[f"{name}.{leaf}"] = left.pop(f"{theirs_name}.{leaf}")[None]
    for leaf in ("weight", "bias"):
        for feat in ("abs_feat", "obs_feat"):
            if f"{feat}.{leaf}" in left:
                ours[f"{feat}.{leaf}"] = left.pop(f"{feat}.{leaf}")
        if f"prior_boundary.network.{leaf}" in left:
            ours[f"foresee.{leaf}"] = left.pop(f"prior_boundary.network.{leaf}")
    layers = _count(left)
    for key in list(left):
        part, kind, index, leaf = _layer(key)
        last = part == "post_boundary" and index == layers
        place = "out" if last else f"{kind}{index}"
        ours[f"{_NETS[part]}.{place}.{leaf}"] = left.pop(key)
    return ours


def _is_vta(theirs: Mapping[str, Tensor]) -> bool:
    return any(key.startswith("state_model.") for key in theirs)


def _plain(key: str) -> str:
    """`state_model.abs_post_fwd.rnn_cell.weight_ih` -> `abs_post_fwd.weight_ih`."""
    key = key.removeprefix("state_model.").replace(".rnn_cell.", ".")
    if re.match(r"(enc_obs|dec_obs|post_boundary)\.", key):
        return key  # here `linear` and `normalize` tell layers from norms
    return key.replace(".linear.", ".").replace(".std.0.", ".std.")


def _layer(key: str) -> tuple[str, str, int, str]:
    """The network, `conv` or `norm`, which one, and its tensor."""
    words = key.split(".")
    if len(words) == 5 and words[3] in ("linear", "normalize"):
        kind = "conv" if words[3] == "linear" else "norm"
        return words[0], kind, int(words[2]), words[4]
    if len(words) == 4 and words[0] in _NETS and words[2].isdigit():
        index, place = divmod(int(words[2]), 3)
        return words[0], "norm" if place else "conv", index, words[3]
    raise UserError(
        f"{key!r} is no tensor of a VTA.\n"
        "  Fix: give a checkpoint of the original, or of its port with actions."
    )


def _count(keys: Mapping[str, Tensor]) -> int:
    """Hidden layers of the boundary detector: the output is the one after them."""
    convs = [_layer(key) for key in keys if key.startswith("post_boundary")]
    return max((i for _, kind, i, _ in convs if kind == "conv"), default=-1)
