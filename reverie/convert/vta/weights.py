"""Import weights of VTA (`model_best.pt`).

The implementation of the authors (taesupkim/vta) and its port
(Mainlst/stable-deep-world-model) use different names for the same tensors. In Reverie,
mean and standard deviation of a Gaussian head are one layer, and the weights of the
three recurrent encoders are stacked. The files do not contain the Gumbel-softmax
temperature, which keeps its initial value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from reverie.api import StateDict, UserError
from reverie.storage.torch_file import read_tensors

# Names in the original: `abs` is the upper level (segments) and `obs` the lower one.
# The values of dicts are the names in Reverie.
_HEADS = ("prior_abs", "prior_obs", "post_abs", "post_obs")  # Gaussian heads
_NETS = {"enc_obs": "enc", "dec_obs": "dec", "post_boundary": "detector"}
_ENCODERS = ("abs_post_fwd", "obs_post_fwd", "abs_post_bwd")  # recurrent encoders
_CELLS = {"update_abs_belief": "abs_cell", "update_obs_belief": "obs_cell"}
_GRU = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
_NOT_IMPORTED = r"^updates$|^temperature$|num_batches_tracked$"
"""Pattern of counters and of the temperature, which keep their initial values."""
_FILES = (
    "model_best.pt or ckpt_STEP.pt of taesupkim/vta or Mainlst/stable-deep-world-model"
)


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Return the weights of a file by the names of Reverie."""
    tensors = read_tensors(path)
    is_vta = any(key.startswith("state_model.") for key in tensors)
    try:
        weights = rename_tensors(tensors) if is_vta else {}
        problem = f"{path} has no VTA model."
    except KeyError as missing:
        weights, problem = {}, f"{path} has no {missing.args[0]!r}."
    if "abs_feat.weight" not in weights:
        raise UserError(f"{problem}\n  Fix: use {_FILES}.")
    return weights


def import_state(
    path: str | Path, template: StateDict, components: str = ".*"
) -> StateDict:
    """Return the state of a VTA agent with the weights of a file."""
    loaded, current = read_checkpoint(path), template["world"]
    expected = {
        k: v.shape for k, v in current.items() if not re.search(_NOT_IMPORTED, k)
    }
    shapes = {key: value.shape for key, value in loaded.items()}
    different = [
        key for key in {**expected, **shapes} if expected.get(key) != shapes.get(key)
    ]
    if different:
        sizes, current_sizes = infer_sizes(loaded), infer_sizes(current)
        fixes = [f"--{k} {x}" for k, x in sizes.items() if current_sizes[k] != x]
        width, current_width = action_width(loaded), action_width(current)
        if width != current_width:
            fixes.append(
                f"use a dataset whose actions have {width} entries"
                if width
                else "--sequences.actions False"
            )
        key = different[0]
        raise UserError(
            f"The model in {path} differs from that of this run: {key!r} is "
            f"{_shape(shapes, key)} in the file, {_shape(expected, key)} in the run.\n"
            f"  Fix: {' '.join(fixes) or 'use a complete file for images of this size'}"
        )
    return {**template, "world": {**current, **loaded}}


def infer_sizes(weights: Mapping[str, Tensor]) -> dict[str, int | bool]:
    """Return the settings of a model with these weights."""
    belief, features = weights["abs_feat.weight"].shape
    layers = sum(bool(re.match(r"detector\.conv\d+\.weight", key)) for key in weights)
    sizes = {
        "belief": belief,
        "state": features - belief,
        "layers": layers,
        "bias": "enc.conv0.bias" in weights,
        "static_lower_belief": "obs_cell.weight_ih" not in weights,
    }
    return {f"vta.world.{name}": size for name, size in sizes.items()}


def action_width(weights: Mapping[str, Tensor]) -> int:
    """Return the size of an action in a model with these weights; 0 without actions."""
    if "abs_cell.weight_ih" not in weights:
        return 0
    belief, features = weights["abs_feat.weight"].shape
    return int(weights["abs_cell.weight_ih"].shape[-1]) - (features - belief)


def _shape(shapes: Mapping[str, torch.Size], key: str) -> str:
    return str(tuple(shapes[key])) if key in shapes else "missing"


def rename_tensors(originals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of either implementation with the names and shapes of Reverie.

    Also works for gradients and batch norm statistics; missing tensors are skipped.
    """
    remaining = {
        _strip_name(key): value
        for key, value in originals.items()
        if not key.endswith("num_batches_tracked")
    }
    renamed: dict[str, Tensor] = {}
    for head in _HEADS:
        for leaf in ("weight", "bias"):
            parts = [f"{head}_state.{part}.{leaf}" for part in ("mean", "std")]
            if parts[0] in remaining:
                renamed[f"{head}.out.{leaf}"] = torch.cat(
                    [remaining.pop(p) for p in parts]
                )
    for leaf in _GRU:
        names = [f"{encoder}.{leaf}" for encoder in _ENCODERS]
        if names[0] in remaining:
            renamed[f"encoders.{leaf}"] = torch.stack(
                [remaining.pop(name) for name in names]
            )
        for original, name in _CELLS.items():
            if f"{original}.{leaf}" in remaining:
                renamed[f"{name}.{leaf}"] = remaining.pop(f"{original}.{leaf}")[None]
    for leaf in ("weight", "bias"):
        for feat in ("abs_feat", "obs_feat"):
            if f"{feat}.{leaf}" in remaining:
                renamed[f"{feat}.{leaf}"] = remaining.pop(f"{feat}.{leaf}")
        if f"prior_boundary.network.{leaf}" in remaining:
            prior = remaining.pop(f"prior_boundary.network.{leaf}")
            renamed[f"flag_prior.{leaf}"] = prior
    output_index = _detector_output_index(remaining)
    for key in list(remaining):
        part, kind, index, leaf = _parse_layer(key)
        last = part == "post_boundary" and index == output_index
        layer = "out" if last else f"{kind}{index}"
        renamed[f"{_NETS[part]}.{layer}.{leaf}"] = remaining.pop(key)
    return renamed


def _strip_name(key: str) -> str:
    """Remove parts of a name that only the original has:
    `state_model.abs_post_fwd.rnn_cell.weight_ih` becomes `abs_post_fwd.weight_ih`."""
    key = key.removeprefix("state_model.").replace(".rnn_cell.", ".")
    if re.match(r"(enc_obs|dec_obs|post_boundary)\.", key):
        return key  # `linear` and `normalize` distinguish layers and norms
    return key.replace(".linear.", ".").replace(".std.0.", ".std.")


def _parse_layer(key: str) -> tuple[str, str, int, str]:
    """Return the network, `conv` or `norm`, its index, and the parameter name."""
    words = key.split(".")
    if len(words) == 5 and words[3] in ("linear", "normalize"):
        kind = "conv" if words[3] == "linear" else "norm"
        return words[0], kind, int(words[2]), words[4]
    if len(words) == 4 and words[0] in _NETS and words[2].isdecimal():
        # every layer is a convolution, a norm and an activation
        index, position = divmod(int(words[2]), 3)
        return words[0], "norm" if position else "conv", index, words[3]
    raise UserError(
        f"{key!r} is not a parameter of VTA.\n"
        "  Fix: use a checkpoint of taesupkim/vta or Mainlst/stable-deep-world-model."
    )


def _detector_output_index(keys: Mapping[str, Tensor]) -> int:
    """Return the index of the boundary detector's last convolution, the output layer.

    It is -1 if there is no convolution.
    """
    convs = [_parse_layer(key) for key in keys if key.startswith("post_boundary")]
    return max((i for _, kind, i, _ in convs if kind == "conv"), default=-1)
