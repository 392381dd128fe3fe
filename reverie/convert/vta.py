"""Weights of the authors' VTA, and of its port with actions, as weights of ours.

Their names differ from each other, and ours from both: the parts of a Gaussian head are
one layer here, and the three encoders are one stack of recurrent units.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from reverie.api import UserError

_HEADS = ("prior_abs", "prior_obs", "post_abs", "post_obs")
_NETS = {"enc_obs": "enc", "dec_obs": "dec", "post_boundary": "detector"}
_READERS = ("abs_post_fwd", "obs_post_fwd", "abs_post_bwd")
_CELLS = {"update_abs_belief": "abs_cell", "update_obs_belief": "obs_cell"}
_GRU = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


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
