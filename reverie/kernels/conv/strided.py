"""Fast versions of the strided image encoder and decoder (`nets/strided.py`).

Batch norm and ELU are fused. The encoder's first layer and the decoder's last layer,
which have few channels on one side, are matrix products of image patches (`im2col.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from jaxtyping import Float
from torch import Tensor, nn

from reverie.distributed.collective import local_sequences
from reverie.kernels.conv import im2col
from reverie.kernels.launch import can_launch
from reverie.kernels.norm.batch_norm import MAX_CHANNELS, batch_norm_elu
from reverie.nets.strided import ImageDecoder, ImageEncoder


class FastImageEncoder(ImageEncoder):
    """`ImageEncoder` with fused kernels in training mode."""

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n E"]:
        if not (self.training and _is_supported(self)):
            return super().forward(x)
        for i in range(self.layers):
            conv, norm = getattr(self, f"conv{i}"), getattr(self, f"norm{i}")
            if _has_image_side(conv) and not x.requires_grad:
                x = im2col.conv2d(x.to(_conv_dtype(x)), conv.weight)
            else:
                x = F.conv2d(x, conv.weight, None, conv.stride, conv.padding)
            x = batch_norm_elu(x, norm, conv.bias)
        return x.flatten(1)


class FastImageDecoder(ImageDecoder):
    """`ImageDecoder` with fused kernels in training mode."""

    def forward(self, x: Float[Tensor, "n E"]) -> Float[Tensor, "n c h w"]:
        if not (self.training and _is_supported(self)):
            return super().forward(x)
        x = x[..., None, None].contiguous(memory_format=torch.channels_last)
        for i in range(self.layers - 1):
            conv, norm = getattr(self, f"conv{i}"), getattr(self, f"norm{i}")
            x = F.conv_transpose2d(x, conv.weight, None, conv.stride, conv.padding)
            x = batch_norm_elu(x, norm, conv.bias)
        last = getattr(self, f"conv{self.layers - 1}")
        if _has_image_side(last):
            image = im2col.conv_transpose2d(x.to(_conv_dtype(x)), last.weight)
            return torch.add(image, last.bias.to(image.dtype)[:, None, None])
        output: Tensor = last(x)
        return output


def _has_image_side(conv: nn.Conv2d | nn.ConvTranspose2d) -> bool:
    """True if input or output of the layer is an image that `im2col` supports."""
    geometry = conv.kernel_size[0], conv.stride[0], conv.padding[0]
    # axis 1: the inputs of `Conv2d`, the outputs of `ConvTranspose2d`
    colors = conv.weight.shape[1]
    return geometry == im2col.GEOMETRY and colors <= im2col.MAX_COLORS


def _conv_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a convolution of `x`, which autocast may change."""
    device, enabled = x.device.type, torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(device) if enabled else x.dtype


def _is_supported(net: nn.Module) -> bool:
    """True if the kernels support the encoder or decoder in the current update."""
    if local_sequences() is not None:
        return False  # several ranks: only the plain batch norm synchronizes statistics
    weight = next(net.parameters())  # of the first convolution
    channels = max(weight.shape[:2])  # all hidden layers have the same number
    is_fusable = triton.next_power_of_2(channels) == channels <= MAX_CHANNELS
    return is_fusable and can_launch(weight.device, weight.dtype)
