"""The transformer and its KV cache."""

from __future__ import annotations

import pytest
import torch

from reverie.nets.transformer import Dense, Embedding, Transformer, TransformerConfig

CONFIG = TransformerConfig(layers=2, heads=2, width=8, blocks=4)
TOKENS = 3


def make(config=CONFIG):
    net = Transformer(TOKENS, config)
    generator = torch.Generator().manual_seed(0)
    for layer in net.modules():
        if hasattr(layer, "initialize"):
            layer.initialize(generator)
    for parameter in net.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return net


@pytest.mark.parametrize("pieces", [[12], [1] * 12, [7, 1, 1, 3], [2, 3, 3, 4]])
@pytest.mark.parametrize("attention", ["causal", "block_causal"])
def test_continuing_from_a_cache_equals_one_forward_pass(pieces, attention):
    if attention == "block_causal":
        pieces = [TOKENS, 2 * TOKENS]  # a time step must not be divided
    net = make(TransformerConfig(2, 2, 8, 4, attention))
    x = torch.randn(2, sum(pieces), 8)
    cache, outputs = net.cache(2, torch.float32), []
    for piece in x.split(pieces, 1):
        out, cache = net(piece, cache)
        outputs.append(out)
    assert cache.size == sum(pieces)
    assert cache.free == net.length - cache.size
    torch.testing.assert_close(torch.cat(outputs, 1), net(x)[0])


def test_outputs_do_not_depend_on_later_tokens():
    net, x = make(), torch.randn(1, 12, 8)
    changed = x.clone()
    changed[:, 6:] += torch.randn(6, 8)
    one, two = net(x)[0], net(changed)[0]
    torch.testing.assert_close(one[:, :6], two[:, :6])
    assert (one[:, 6:] - two[:, 6:]).abs().amax(-1).min() > 1e-3


def test_block_causal_attention_includes_later_tokens_of_the_time_step():
    net, x = make(TransformerConfig(2, 2, 8, 4, "block_causal")), torch.randn(1, 12, 8)
    changed = x.clone()
    changed[:, 5] += torch.randn(8)  # the last of the second block
    one, two = net(x)[0], net(changed)[0]
    torch.testing.assert_close(one[:, :3], two[:, :3])
    assert (one[:, 3] - two[:, 3]).abs().max() > 1e-4


def test_a_cloned_cache_is_independent():
    net, x = make(), torch.randn(1, 4, 8)
    _, cache = net(x[:, :2], net.cache(1, torch.float32))
    clone = cache.clone()
    expected, _ = net(x[:, 2:3], cache)
    net(x[:, 3:4], cache)  # overwrites the position of the previous line
    again, _ = net(x[:, 2:3], clone)
    torch.testing.assert_close(again, expected)
    torch.testing.assert_close(clone.keys[..., :2, :], cache.keys[..., :2, :])


def test_a_cleared_cache_equals_an_empty_one():
    net, x = make(), torch.randn(2, 5, 8)
    fresh, _ = net(x[:, 3:], net.cache(2, torch.float32))
    _, cache = net(x[:, :3], net.cache(2, torch.float32))
    again, after = net(x[:, 3:], cache.clear())
    torch.testing.assert_close(again, fresh)
    assert after.size == 2


def test_initial_weights_are_small():
    dense, table = Dense(300, 200), Embedding(300, 200)
    for layer in (dense, table):
        layer.initialize(torch.Generator().manual_seed(0))
        assert float(layer.weight.detach().std()) == pytest.approx(0.02, rel=0.02)
    assert not dense.bias.any()
    assert table(torch.tensor([3]), torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("sizes", [{"heads": 3}, {"layers": 0}, {"blocks": 0}])
def test_invalid_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match=r"width|at least"):
        TransformerConfig(**{"width": 8, "heads": 2, **sizes})
