from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from reverie.nets.blocks import initialize
from reverie.nets.ensemble import EPS, Ensemble, EnsembleConfig


def make(models=3, inputs=5, outputs=4, layers=2, units=6) -> Ensemble:
    ensemble = Ensemble(inputs, outputs, models, layers, units, "silu")
    initialize(ensemble, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    for parameter in ensemble.parameters():  # initial scales and biases are all equal
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return ensemble


def member(ensemble: Ensemble, index: int, x: torch.Tensor) -> torch.Tensor:
    """One member as a plain MLP."""
    for layer in ensemble.hidden:
        x = F.linear(x, layer.weight[index])
        x = F.layer_norm(
            x, x.shape[-1:], layer.scale[index], layer.shift[index], eps=EPS
        )
        x = F.silu(x)
    return F.linear(x, ensemble.out.weight[index], ensemble.out.bias[index])


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_outputs_and_gradients_equal_those_of_a_loop_over_members(layers):
    ensemble = make(layers=layers)
    x = torch.randn(2, 7, 5, generator=torch.manual_seed(2), requires_grad=True)
    outputs = ensemble(x)
    loop = torch.stack([member(ensemble, i, x) for i in range(3)])
    assert outputs.shape == (3, 2, 7, 4)
    torch.testing.assert_close(outputs, loop)
    leaves = [x, *ensemble.parameters()]
    weights = torch.randn(outputs.shape, generator=torch.manual_seed(3))
    for one, two in zip(
        torch.autograd.grad((outputs * weights).sum(), leaves),
        torch.autograd.grad((loop * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, two)


def test_members_have_different_initial_weights_of_the_right_size():
    ensemble = Ensemble(300, 20, 3, 1, 100, "silu")
    initialize(ensemble, torch.Generator().manual_seed(0))
    weight = ensemble.hidden[0].weight
    assert not torch.equal(weight[0], weight[1])
    assert float(weight.detach().std()) == pytest.approx((2 / 400) ** 0.5, rel=0.02)
    limit = (3 / 60) ** 0.5  # uniform, from the mean of 100 inputs and 20 outputs
    assert float(ensemble.out.weight.detach().abs().max()) <= limit


def test_hidden_layers_compute_in_the_dtype_of_the_inputs():
    ensemble = make()
    x = torch.randn(4, 5, generator=torch.manual_seed(2))
    low = ensemble(x.bfloat16())
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, ensemble(x), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("settings", [{"models": 1}, {"units": 0}, {"std": 0.0}])
def test_invalid_sizes_are_refused(settings):
    with pytest.raises(ValueError, match=r"must be|must not"):
        EnsembleConfig(**settings)
