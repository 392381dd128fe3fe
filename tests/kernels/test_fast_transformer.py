"""The transformer's short steps against the plain ones."""

from __future__ import annotations

import copy

import pytest
import torch

from reverie.nets.transformer import Transformer, TransformerConfig

pytest.importorskip("triton")

from reverie.kernels.accelerate import use_fast_versions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def twins(config):
    net = Transformer(3, config)
    for parameter in net.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape)
    net.to(DEVICE)
    quick = copy.deepcopy(net)
    use_fast_versions(quick)
    assert type(quick) is not type(net)
    return net, quick


@pytest.mark.parametrize("pieces", [[3, 1, 1, 2, 4], [5, 1, 3]])
@torch.no_grad()
def test_steps_and_caches_are_equal(pieces):
    net, quick = twins(TransformerConfig(2, 2, 16, 4))
    x = torch.randn(2, sum(pieces), 16, device=DEVICE)
    caches = [m.cache(2, torch.float32) for m in (net, quick)]
    for piece in x.split(pieces, 1):
        wanted, caches[0] = net(piece, caches[0])
        got, caches[1] = quick(piece, caches[1])
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert caches[0].size == caches[1].size
    for mine, theirs in zip(caches[1][:2], caches[0][:2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_gradients_take_the_plain_way():
    net, quick = twins(TransformerConfig(1, 2, 8, 2))
    x = torch.randn(2, 3, 8, device=DEVICE)
    for a, b in zip(grads(net, x), grads(quick, x), strict=True):
        torch.testing.assert_close(a, b)


def grads(net, x):
    out, _ = net(x, net.cache(len(x), torch.float32))
    return torch.autograd.grad(out.square().sum(), list(net.parameters()))


@torch.no_grad()
def test_widths_that_are_no_powers_of_two():
    net, quick = twins(TransformerConfig(1, 2, 24, 2))  # heads of 12: the plain way
    x = torch.randn(2, 2, 24, device=DEVICE)
    wanted, _ = net(x, net.cache(2, torch.float32))
    got, _ = quick(x, quick.cache(2, torch.float32))
    torch.testing.assert_close(got, wanted)
    net, quick = twins(TransformerConfig(1, 3, 24, 2))  # heads of 8, a stream of 24
    wanted, _ = net(x, net.cache(2, torch.float32))
    got, _ = quick(x, quick.cache(2, torch.float32))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
