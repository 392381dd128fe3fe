"""Incremental steps of the fast transformer against the plain one."""

from __future__ import annotations

import copy

import pytest
import torch

from reverie.nets.transformer import Transformer, TransformerConfig

pytest.importorskip("triton")

from reverie.kernels.accelerate import use_fast_versions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_pair(config):
    net = Transformer(3, config)
    for parameter in net.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape)
    net.to(DEVICE)
    fast = copy.deepcopy(net)
    use_fast_versions(fast)
    assert type(fast) is not type(net)
    return net, fast


@pytest.mark.parametrize("pieces", [[3, 1, 1, 2, 4], [5, 1, 3]])
@torch.no_grad()
def test_outputs_and_caches_are_equal(pieces):
    net, fast = make_pair(TransformerConfig(2, 2, 16, 4))
    x = torch.randn(2, sum(pieces), 16, device=DEVICE)
    caches = [m.cache(2, torch.float32) for m in (net, fast)]
    for piece in x.split(pieces, 1):
        expected, caches[0] = net(piece, caches[0])
        actual, caches[1] = fast(piece, caches[1])
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert caches[0].size == caches[1].size
    for actual, expected in zip(caches[1][:2], caches[0][:2], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_training_uses_the_plain_code():
    net, fast = make_pair(TransformerConfig(1, 2, 8, 2))
    x = torch.randn(2, 3, 8, device=DEVICE)
    for a, b in zip(grads(net, x), grads(fast, x), strict=True):
        torch.testing.assert_close(a, b)


def grads(net, x):
    out, _ = net(x, net.cache(len(x), torch.float32))
    return torch.autograd.grad(out.square().sum(), list(net.parameters()))


@torch.no_grad()
def test_widths_that_are_not_powers_of_two():
    net, fast = make_pair(TransformerConfig(1, 2, 24, 2))  # head size 12: plain code
    x = torch.randn(2, 2, 24, device=DEVICE)
    expected, _ = net(x, net.cache(2, torch.float32))
    actual, _ = fast(x, fast.cache(2, torch.float32))
    torch.testing.assert_close(actual, expected)
    net, fast = make_pair(TransformerConfig(1, 3, 24, 2))  # head size 8, width 24
    expected, _ = net(x, net.cache(2, torch.float32))
    actual, _ = fast(x, fast.cache(2, torch.float32))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
