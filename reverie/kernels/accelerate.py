"""GPU twins of the plain parts, one file each; the plain parts stay the reference.

A twin of a module is a subclass with the same parameters and another `forward`;
`accelerate` puts it in the place of the plain part. A twin that meets a shape, a norm
or a device it was not written for takes the plain way by itself.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import nn


def available(device: torch.device) -> bool:
    """Whether the twins can run: they are Triton kernels, and those want CUDA."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def accelerate(module: nn.Module) -> None:
    """Put the twins of all parts of a module in their places.

    A part outside this room names its own twin in a static method `twin`.
    """
    known = twins()
    for part in module.modules():
        named = getattr(type(part), "twin", None)
        twin = named() if named else known.get(type(part))
        if twin is not None:
            part.__class__ = twin


def accelerate_host(module: nn.Module) -> None:
    """The same on a CPU, for the few parts that have a faster form there."""
    from reverie.kernels.conv.upsample_cpu import FusedUpsampleConv
    from reverie.nets.conv import Conv

    for part in module.modules():
        if type(part) is Conv:
            part.__class__ = FusedUpsampleConv


@functools.cache
def twins() -> dict[type[nn.Module], type[nn.Module]]:
    """The twin of every plain part that has one."""
    from reverie.kernels.conv.decoder import FastDecoder
    from reverie.kernels.conv.encoder import FastEncoder
    from reverie.kernels.conv.residual import (
        FastDouble,
        FastFrameDecoder,
        FastFrameEncoder,
        FastHalve,
        FastResidual,
    )
    from reverie.kernels.heads.categorical import FastPolicyHead
    from reverie.kernels.heads.twohot import FastHead
    from reverie.kernels.norm.batch_norm import FastImageDecoder, FastImageEncoder
    from reverie.kernels.norm.rms_norm import FastMLP
    from reverie.kernels.scan.gru_loop import FastGRU, FastHold
    from reverie.kernels.transformer import FastTransformer
    from reverie.nets.blocks import MLP
    from reverie.nets.conv import Decoder, Encoder
    from reverie.nets.gru import GRU, Hold
    from reverie.nets.heads import Head, PolicyHead
    from reverie.nets.residual import (
        Double,
        FrameDecoder,
        FrameEncoder,
        Halve,
        Residual,
    )
    from reverie.nets.strided import ImageDecoder, ImageEncoder
    from reverie.nets.transformer import Transformer

    return {
        MLP: FastMLP,
        Encoder: FastEncoder,
        Decoder: FastDecoder,
        Head: FastHead,
        PolicyHead: FastPolicyHead,
        Residual: FastResidual,
        FrameEncoder: FastFrameEncoder,
        FrameDecoder: FastFrameDecoder,
        Double: FastDouble,
        Halve: FastHalve,
        Transformer: FastTransformer,
        GRU: FastGRU,
        Hold: FastHold,
        ImageEncoder: FastImageEncoder,
        ImageDecoder: FastImageDecoder,
    }
