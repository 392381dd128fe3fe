"""Losses of latent worlds without a decoder."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from reverie.worlds import prototypes
from reverie.worlds.prototypes import Prototypes, shift_images, sinkhorn
from reverie.worlds.representation import Barlow, InfoNCE, barlow_loss


def test_barlow_compares_the_correlation_matrix_with_the_identity():
    projected = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
    embed = torch.tensor([[3.0, 1.0], [-1.0, 1.0], [1.0, 5.0], [1.0, -3.0]])
    # deviations of the columns: sqrt(2 / 3), sqrt(8 / 3); 2 sqrt(2 / 3), 4 sqrt(2 / 3).
    # Divided by 4 rows, the correlations are 3 / 4 on the diagonal and 0 elsewhere.
    assert barlow_loss(projected, embed).item() == pytest.approx(2 * 0.25**2)
    swapped = barlow_loss(projected, embed.flip(1)).item()
    assert swapped == pytest.approx(2 + 5e-4 * 2 * 0.75**2)


def test_a_constant_dimension_has_finite_gradients():
    projected = torch.zeros(4, 2, requires_grad=True)
    loss = barlow_loss(projected, torch.ones(4, 2))
    assert loss.item() == pytest.approx(2.0)
    (gradient,) = torch.autograd.grad(loss, [projected])
    assert torch.isfinite(gradient).all()


def test_infonce_identifies_each_row_among_all_rows():
    infonce = InfoNCE(2, 2, make_encoder=lambda: None)
    infonce.projection.weight.data.copy_(torch.eye(2))
    feat = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    embed = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    loss = infonce(feat, embed, {})["infonce"]
    expected = [math.log(1 + math.exp(-1)), math.log(1 + math.exp(-2))]
    assert loss.shape == (1, 2)
    assert loss[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("make", [Barlow, InfoNCE])
def test_rows_outside_of_the_mask_are_not_used(make):
    representation = make(3, 3, make_encoder=lambda: None)
    representation.projection.initialize(torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    feat, embed = (torch.randn(1, 6, 3, generator=generator) for _ in range(2))
    (wanted,) = representation(feat[:, :4], embed[:, :4], {}).values()
    mask = torch.arange(6)[None] < 4
    (found,) = representation(feat, embed, {"mask": mask}).values()
    torch.testing.assert_close(found[:, :4] if found.ndim else found, wanted)


@pytest.mark.parametrize("make", [Barlow, InfoNCE])
def test_embeddings_get_no_gradients(make):
    torch.manual_seed(0)
    representation = make(3, 2, make_encoder=lambda: None)
    representation.projection.initialize(torch.Generator().manual_seed(0))
    feat, embed = (torch.randn(4, 5, n, requires_grad=True) for n in (3, 2))
    (loss,) = representation(feat, embed, {}).values()
    gradients = torch.autograd.grad(loss.mean(), [feat, embed], allow_unused=True)
    assert gradients[0].abs().sum() > 0
    assert gradients[1] is None


def test_sinkhorn_balances_prototypes(monkeypatch):
    # one iteration by hand: divide columns by their sums, then rows by their sums
    weights = torch.tensor([[4.0, 1.0], [4.0, 3.0]])
    columns = torch.tensor([[1 / 2, 1 / 4], [1 / 2, 3 / 4]])
    expected = columns / columns.sum(1, keepdim=True)
    monkeypatch.setattr(prototypes, "SINKHORN_ITERATIONS", 1)
    torch.testing.assert_close(sinkhorn(0.05 * weights.log()), expected)
    monkeypatch.setattr(prototypes, "SINKHORN_ITERATIONS", 3)
    assigned = sinkhorn(0.05 * torch.randn(64, 4, generator=torch.manual_seed(0)))
    torch.testing.assert_close(assigned.sum(1), torch.ones(64))
    torch.testing.assert_close(
        assigned.sum(0), torch.full((4,), 16.0), rtol=0.05, atol=0
    )


def test_views_are_shifted_equally_over_time():
    image = torch.zeros(2, 3, 8, 8, 1, dtype=torch.uint8)
    image[:, :, 4, 4] = 100
    offset = torch.tensor([[1.0, 0.0], [0.0, -0.5]])  # (x, y), of sampling positions
    shifted = shift_images(image, offset)
    assert shifted[0, :, 4, 3, 0].tolist() == [100] * 3
    assert shifted[1, :, 4:6, 4, 0].tolist() == [[50, 50]] * 3
    assert torch.equal(shift_images(image, torch.zeros(2, 2)), image)


class SlowEncoder(nn.Module):
    """Returns embeddings that are in the batch."""

    imgkeys = ("image",)

    def forward(self, batch, dtype):
        return batch["slow"]


def test_prototype_losses_are_those_of_the_formulas_without_the_first_step():
    rng = np.random.default_rng(0)
    size, length, features, width = 2, 4, 5, 6
    shape = (2 * size, length)  # both views of a sequence are next to each other
    feat, embed, slow = (rng.normal(size=(*shape, n)) for n in (features, width, width))
    representation = Prototypes(features, width, SlowEncoder)
    weights = {
        name: rng.normal(size=module.weight.shape)
        for name, module in representation.named_children()
        if name != "slow_encoder"
    }
    for name, weight in weights.items():
        module = getattr(representation, name)
        module.weight.data.copy_(torch.tensor(weight))
    batch = {"slow": torch.tensor(slow).float(), prototypes.SHIFT: torch.zeros(4, 2)}
    inputs = torch.tensor(feat).float(), torch.tensor(embed).float()
    losses = representation(*inputs, batch)

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    vectors = unit(weights["prototypes"])

    def scores(x, name):
        projected = x[:, 1:] @ weights[name].T
        return unit(projected) @ vectors.T, np.linalg.norm(projected, axis=-1)

    targets = np.exp(scores(slow, "slow_from_embed")[0] / 0.05)
    for view in (targets[::2], targets[1::2]):
        for _ in range(3):
            view /= view.sum((0, 1))
            view /= view.sum(2, keepdims=True)
    (from_embed, embed_norm) = scores(embed, "from_embed")
    (from_feat, feat_norm) = scores(feat, "from_features")

    def cross_entropy(target, x):
        log = x / 0.1 - np.log(np.exp(x / 0.1).sum(2, keepdims=True))
        return -(target * log).sum(2).mean()

    other = targets.reshape(size, 2, length - 1, -1)[:, ::-1].reshape(targets.shape)
    expected = {
        "proto_swav": cross_entropy(other, from_embed),
        "proto_temp": cross_entropy(targets, from_feat),
        "proto_norm": np.mean((embed_norm - 1) ** 2 + (feat_norm - 1) ** 2),
    }
    assert {k: x.mean().item() for k, x in losses.items()} == pytest.approx(
        expected, rel=1e-4
    )
    assert all((x[:, 0] == 0).all() and (x[:, 1:] > 0).all() for x in losses.values())
