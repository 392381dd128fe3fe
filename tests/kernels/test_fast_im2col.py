"""First and last layers as products of im2col, against the library's convolutions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reverie.kernels.conv import im2col

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize("colors", [1, 3])
def test_halving_is_the_convolution(colors):
    x, weight = normal(5, colors, 8, 12), normal(7, colors, 4, 4)
    exact = weight.double().requires_grad_()
    theirs = F.conv2d(x.double(), exact, None, 2, 1)
    (grad,) = torch.autograd.grad(theirs.square().sum(), exact)
    mine = weight.to(DEVICE).requires_grad_()
    ours = im2col.halve(x.to(DEVICE), mine)
    (slope,) = torch.autograd.grad(ours.square().sum(), mine)
    torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(slope.cpu().double(), grad, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("colors", [1, 3])
def test_doubling_is_the_transposed_convolution(colors):
    leaves = [normal(4, 8, 6, 4), normal(8, colors, 4, 4)]
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    theirs = F.conv_transpose2d(*exact, None, 2, 1)
    grads = torch.autograd.grad(theirs.square().sum(), exact)
    mine = [leaf.to(DEVICE).requires_grad_() for leaf in leaves]
    ours = im2col.double(*mine)
    slopes = torch.autograd.grad(ours.square().sum(), mine)
    torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-4, atol=1e-4)
    for slope, grad in zip(slopes, grads, strict=True):
        torch.testing.assert_close(slope.cpu().double(), grad, rtol=1e-3, atol=1e-2)


def test_a_sum_over_many_rows_is_shared(monkeypatch):
    monkeypatch.setattr(im2col, "PARTS", 4)
    x, weight = normal(2, 3, 8, 8).to(DEVICE), normal(5, 3, 4, 4).to(DEVICE)
    found = []
    for layer in (im2col.halve, lambda x, w: F.conv2d(x, w, None, 2, 1)):
        leaf = weight.clone().requires_grad_()
        found.append(torch.autograd.grad(layer(x, leaf).square().sum(), leaf)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    ("rows", "depth", "width"),
    [(5, 3, 1), (128, 64, 128), (130, 65, 129), (300, 200, 9)],
)
def test_a_product_of_any_size_is_exact(rows, depth, width):
    x, y = normal(rows, depth).to(DEVICE), normal(depth, width).to(DEVICE)
    exact = (x.double() @ y.double()).float()
    for right in (y, y.T.contiguous().T):
        found = im2col._multiply(x, right)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "width"), [(48, 128), (128, 48)])
def test_no_row_of_very_many_is_left_out(depth, width):
    # run it under MPS as well, with CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=22
    x = normal(983_040, depth).cuda().bfloat16()
    y = normal(depth, width).cuda().bfloat16()
    before = torch.full((len(x), width), torch.nan, device="cuda").bfloat16()
    del before  # its memory is what the product gets
    found = im2col._multiply(x, y)
    for some, ours in zip(x.split(8192), found.split(8192), strict=True):
        exact = some.float() @ y.float()
        torch.testing.assert_close(ours.float(), exact, rtol=1e-2, atol=0.1)


@pytest.mark.gpu
def test_layers_of_a_window_stay_close_in_half_precision():
    x = normal(512, 3, 32, 32).cuda().bfloat16()
    weight = (normal(128, 3, 4, 4) / 7).cuda().requires_grad_()
    inner = normal(512, 128, 16, 16).cuda().bfloat16()
    inner = inner.contiguous(memory_format=torch.channels_last).requires_grad_()
    outer = (normal(128, 3, 4, 4) / 45).cuda().requires_grad_()
    pairs = [
        (im2col.halve(x, weight), F.conv2d(x.float(), weight, None, 2, 1), [weight]),
        (
            im2col.double(inner, outer),
            F.conv_transpose2d(inner.float(), outer, None, 2, 1),
            [inner, outer],
        ),
    ]
    for ours, theirs, leaves in pairs:
        slope = torch.randn_like(theirs)
        mine = [ours, *torch.autograd.grad(ours, leaves, slope.bfloat16())]
        his = [theirs, *torch.autograd.grad(theirs, leaves, slope)]
        for one, two in zip(mine, his, strict=True):
            error = torch.linalg.vector_norm((one - two).float())
            assert error < 1e-2 * torch.linalg.vector_norm(two.float())
