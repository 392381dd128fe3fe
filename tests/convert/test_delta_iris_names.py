"""Parameter names of the original Δ-IRIS, and errors of the import."""

from __future__ import annotations

import pytest
import torch

from reverie.api import UserError
from reverie.convert.delta_iris.names import (
    TOKENIZER,
    WORLD_MODEL,
    Target,
    copy_weights,
    find_targets,
)


@pytest.mark.parametrize(
    ("rules", "original", "name", "third"),
    [
        (TOKENIZER, "encoder_act_emb.weight", "encoder_action.weight", None),
        (TOKENIZER, "quantizer.codewords_freqs", "quantizer.usage", None),
        (TOKENIZER, "quantizer.pre_quant_proj.bias", "quantizer.down.bias", None),
        (WORLD_MODEL, "transformer.ln.weight", "transformer.norm.scale", None),
        (WORLD_MODEL, "frame_cnn.2.bias", "frame_norm.shift", None),
        (
            WORLD_MODEL,
            "transformer.blocks.2.sa.value.weight",
            "transformer.layers.2.qkv.weight",
            2,
        ),
        (WORLD_MODEL, "head_ends.head_module.2.bias", "ends.out.bias", None),
    ],
)
def test_names(rules, original, name, third):
    assert find_targets([original], rules) == {original: Target(name, third)}


def test_layers_after_the_last_residual_block():
    names = [f"frame_cnn.encoder.{i}.weight" for i in (0, 9, 11)]
    names.append("frame_cnn.encoder.8.f.3.bias")
    found = [target.name for target in find_targets(names, TOKENIZER).values()]
    assert found == [
        "frame.layers.0.weight",
        "frame.layers.9.scale",
        "frame.layers.10.weight",
        "frame.layers.8.norm1.shift",
    ]


def test_derived_buffers_are_left_out():
    names = ["head_ends.indices", "transformer.blocks.0.sa.mask"]
    assert find_targets(names, WORLD_MODEL) == {}


def test_queries_keys_and_values_are_joined():
    names = [f"transformer.blocks.0.sa.{x}.bias" for x in ("query", "key", "value")]
    tensors = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    template = {"transformer.layers.0.qkv.bias": torch.zeros(6)}
    (state,) = copy_weights(tensors, WORLD_MODEL, template).values()
    assert state.tolist() == [0, 0, 1, 1, 2, 2]
    assert not template["transformer.layers.0.qkv.bias"].any()


@pytest.mark.parametrize(
    ("tensors", "template", "complaint"),
    [
        ({"act_emb.weight": (3, 2)}, {"action.weight": (4, 2)}, r"has shape \(3, 2\)"),
        ({"act_emb.weight": (3, 2)}, {}, "no parameter for 'act_emb.weight'"),
        ({}, {"action.weight": (3, 2)}, "no values for 'action.weight'"),
    ],
)
def test_mismatches_are_errors(tensors, template, complaint):
    originals = {name: torch.zeros(shape) for name, shape in tensors.items()}
    state = {name: torch.zeros(shape) for name, shape in template.items()}
    with pytest.raises(UserError, match=complaint) as error:
        copy_weights(originals, WORLD_MODEL, state)
    assert "Fix:" in str(error.value)
