"""AMSGrad in two passes does what the plain one does."""

from __future__ import annotations

import pytest
import torch
from test_fast_optimizer import DEVICE, parameters

from reverie.nets.optim.amsgrad import AMSGrad, AMSGradConfig

pytest.importorskip("triton")

from reverie.kernels.optim.amsgrad import FusedAMSGrad

CONFIGS = {
    "default": AMSGradConfig(lr=1e-2),
    "unlimited": AMSGradConfig(lr=1e-2, clip=0.0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_updates_equal_those_of_the_plain_one(name):
    plain, fused = parameters(), parameters()
    ours, theirs = FusedAMSGrad(fused, CONFIGS[name]), AMSGrad(plain, CONFIGS[name])
    generator = torch.Generator().manual_seed(1)
    for turn in range(5):
        size = (1e-3, 1.0, 1e2, 1.0, 1e-2)[turn]  # the largest is remembered
        grads = [size * torch.randn(x.shape, generator=generator) for x in ours.tensors]
        grads = [grad.to(DEVICE) for grad in grads]
        if turn == 3:  # an update that must change nothing
            grads[1] = grads[1] * torch.nan
        loss = torch.ones((), device=DEVICE)
        _, expected = theirs.apply(loss, [grad.clone() for grad in grads])
        _, metrics = ours.apply(loss, grads)
        for key in fused:
            torch.testing.assert_close(fused[key], plain[key], rtol=1e-5, atol=1e-6)
        assert metrics.keys() == expected.keys()
        for key in metrics:
            torch.testing.assert_close(
                metrics[key], expected[key], rtol=1e-5, atol=1e-8, equal_nan=True
            )
        assert ours.nonfinite() == theirs.nonfinite()
    for key, moments in ours.moments.items():
        for mine, his in zip(moments, theirs.moments[key], strict=True):
            torch.testing.assert_close(mine, his, rtol=1e-4, atol=1e-8)


def test_a_gradient_may_lie_otherwise_in_memory_than_its_parameter():
    found = []
    for kind in (AMSGrad, FusedAMSGrad):
        weight = torch.zeros(4, 3, 2, 2, device=DEVICE)
        weight = weight.to(memory_format=torch.channels_last)
        opt = kind({"weight": weight}, AMSGradConfig(lr=0.1, clip=0))
        grad = torch.arange(48.0, device=DEVICE).reshape(4, 3, 2, 2) - 20
        opt.apply(torch.ones((), device=DEVICE), [grad])
        found.append(opt.moments["mean"][0])
    torch.testing.assert_close(*found)
