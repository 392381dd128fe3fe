"""Names of the original Δ-IRIS, and what cannot be taken over."""

from __future__ import annotations

import pytest
import torch

from reverie.api import UserError
from reverie.convert.delta_iris.names import (
    TOKENIZER,
    WORLD_MODEL,
    Place,
    places,
    take_over,
)


@pytest.mark.parametrize(
    ("rules", "original", "ours", "third"),
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
def test_names(rules, original, ours, third):
    assert places([original], rules) == {original: Place(ours, third)}


def test_the_last_layers_of_a_network_are_counted_from_its_end():
    names = [f"frame_cnn.encoder.{i}.weight" for i in (0, 9, 11)]
    names.append("frame_cnn.encoder.8.f.3.bias")
    found = [place.name for place in places(names, TOKENIZER).values()]
    assert found == [
        "frame.layers.0.weight",
        "frame.layers.9.scale",
        "frame.layers.10.weight",
        "frame.layers.8.norm1.shift",
    ]


def test_what_follows_from_sizes_is_left_out():
    names = ["head_ends.indices", "transformer.blocks.0.sa.mask"]
    assert places(names, WORLD_MODEL) == {}


def test_thirds_are_put_together():
    names = [f"transformer.blocks.0.sa.{x}.bias" for x in ("query", "key", "value")]
    tensors = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    like = {"transformer.layers.0.qkv.bias": torch.zeros(6)}
    (state,) = take_over(tensors, WORLD_MODEL, like).values()
    assert state.tolist() == [0, 0, 1, 1, 2, 2]
    assert not like["transformer.layers.0.qkv.bias"].any()


@pytest.mark.parametrize(
    ("tensors", "like", "complaint"),
    [
        ({"act_emb.weight": (3, 2)}, {"action.weight": (4, 2)}, r"has shape \(3, 2\)"),
        ({"act_emb.weight": (3, 2)}, {}, "no place for 'act_emb.weight'"),
        ({}, {"action.weight": (3, 2)}, "nothing for 'action.weight'"),
    ],
)
def test_misfits_are_named(tensors, like, complaint):
    theirs = {name: torch.zeros(shape) for name, shape in tensors.items()}
    ours = {name: torch.zeros(shape) for name, shape in like.items()}
    with pytest.raises(UserError, match=complaint) as error:
        take_over(theirs, WORLD_MODEL, ours)
    assert "Fix:" in str(error.value)
