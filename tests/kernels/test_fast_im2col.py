"""Strided convolutions as matrix products of patches equal those of PyTorch."""

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
def test_conv2d_equals_that_of_pytorch(colors):
    x, weight = normal(5, colors, 8, 12), normal(7, colors, 4, 4)
    exact = weight.double().requires_grad_()
    expected = F.conv2d(x.double(), exact, None, 2, 1)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), exact)
    leaf = weight.to(DEVICE).requires_grad_()
    actual = im2col.conv2d(x.to(DEVICE), leaf)
    (grad,) = torch.autograd.grad(actual.square().sum(), leaf)
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grad.cpu().double(), expected_grad, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("colors", [1, 3])
def test_conv_transpose2d_equals_that_of_pytorch(colors):
    inputs = [normal(4, 8, 6, 4), normal(8, colors, 4, 4)]
    exact = [leaf.double().requires_grad_() for leaf in inputs]
    expected = F.conv_transpose2d(*exact, None, 2, 1)
    expected_grads = torch.autograd.grad(expected.square().sum(), exact)
    leaves = [leaf.to(DEVICE).requires_grad_() for leaf in inputs]
    actual = im2col.conv_transpose2d(*leaves)
    grads = torch.autograd.grad(actual.square().sum(), leaves)
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=1e-4, atol=1e-4)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-3, atol=1e-2)


def test_the_weight_gradient_can_be_summed_in_chunks(monkeypatch):
    monkeypatch.setattr(im2col, "CHUNKS", 4)
    x, weight = normal(2, 3, 8, 8).to(DEVICE), normal(5, 3, 4, 4).to(DEVICE)
    grads = []
    for layer in (im2col.conv2d, lambda x, w: F.conv2d(x, w, None, 2, 1)):
        leaf = weight.clone().requires_grad_()
        grads.append(torch.autograd.grad(layer(x, leaf).square().sum(), leaf)[0])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    ("rows", "depth", "width"),
    [(5, 3, 1), (128, 64, 128), (130, 65, 129), (300, 200, 9)],
)
def test_a_product_of_any_size_is_exact(rows, depth, width):
    x, y = normal(rows, depth).to(DEVICE), normal(depth, width).to(DEVICE)
    exact = (x.double() @ y.double()).float()
    for right in (y, y.T.contiguous().T):
        product = im2col._multiply(x, right)
        torch.testing.assert_close(product, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "width"), [(48, 128), (128, 48)])
def test_products_of_very_many_rows_are_complete(depth, width):
    # run it under MPS as well, with CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=22
    x = normal(983_040, depth).cuda().bfloat16()
    y = normal(depth, width).cuda().bfloat16()
    nans = torch.full((len(x), width), torch.nan, device="cuda").bfloat16()
    del nans  # the product gets its memory
    product = im2col._multiply(x, y)
    for rows, actual in zip(x.split(8192), product.split(8192), strict=True):
        exact = rows.float() @ y.float()
        torch.testing.assert_close(actual.float(), exact, rtol=1e-2, atol=0.1)


@pytest.mark.gpu
def test_layers_in_half_precision_are_close_to_float32():
    x = normal(512, 3, 32, 32).cuda().bfloat16()
    weight = (normal(128, 3, 4, 4) / 7).cuda().requires_grad_()
    inner = normal(512, 128, 16, 16).cuda().bfloat16()
    inner = inner.contiguous(memory_format=torch.channels_last).requires_grad_()
    outer = (normal(128, 3, 4, 4) / 45).cuda().requires_grad_()
    cases = [
        (im2col.conv2d(x, weight), F.conv2d(x.float(), weight, None, 2, 1), [weight]),
        (
            im2col.conv_transpose2d(inner, outer),
            F.conv_transpose2d(inner.float(), outer, None, 2, 1),
            [inner, outer],
        ),
    ]
    for actual, expected, leaves in cases:
        grad = torch.randn_like(expected)
        actual = [actual, *torch.autograd.grad(actual, leaves, grad.bfloat16())]
        expected = [expected, *torch.autograd.grad(expected, leaves, grad)]
        for a, b in zip(actual, expected, strict=True):
            error = torch.linalg.vector_norm((a - b).float())
            assert error < 1e-2 * torch.linalg.vector_norm(b.float())
