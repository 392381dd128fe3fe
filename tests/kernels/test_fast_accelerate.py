"""Putting twins in their places."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie.nets.blocks import initialize
from reverie.nets.conv import Decoder, DecoderConfig, Encoder, EncoderConfig
from reverie.nets.heads import Head, HeadConfig, PolicyConfig, PolicyHead
from reverie.spaces import Space

pytest.importorskip("triton")

from reverie.kernels.accelerate import accelerate, available, twins


def parts() -> torch.nn.ModuleDict:
    image = Space(np.dtype(np.uint8), (16, 16, 3), 0, 256)
    spaces = {"image": image, "vector": Space(np.float32, (3,))}
    enc = EncoderConfig(depth=2, mults=(2, 4), layers=1, units=8)
    dec = DecoderConfig(depth=2, mults=(2, 4), layers=1, units=8, bspace=2)
    made = {
        "enc": Encoder(spaces, enc),
        "dec": Decoder(spaces, 8, 4, dec),
        "rew": Head(12, HeadConfig(units=8)),
        "pol": PolicyHead(12, {"action": Space(np.int32, (), 0, 3)}, PolicyConfig()),
    }
    net = torch.nn.ModuleDict(made)
    initialize(net, torch.Generator().manual_seed(0))
    return net


def test_every_part_that_has_a_twin_becomes_it():
    net = parts()
    names = [name for name, _ in net.named_parameters()]
    accelerate(net)
    for key in ("enc", "dec", "rew", "pol"):
        assert type(net[key]) in twins().values()
    assert type(net["rew"].mlp) in twins().values()
    assert [name for name, _ in net.named_parameters()] == names


def test_twins_take_the_plain_place_of_any_part():
    """The same classes, so that no one needs to ask which of the two there is."""
    for plain, fast in twins().items():
        assert issubclass(fast, plain)
        assert "__init__" not in vars(fast)


def test_accelerating_twice_changes_nothing():
    net = parts()
    accelerate(net)
    kinds = [type(part) for part in net.modules()]
    accelerate(net)
    assert [type(part) for part in net.modules()] == kinds


def test_a_cpu_has_no_use_for_kernels():
    assert not available(torch.device("cpu"))
