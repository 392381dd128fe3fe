"""The KL divergence with a closed-form gradient equals that of `OneHot`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from reverie.spaces import Space
from reverie.worlds.rssm.config import RSSMConfig
from reverie.worlds.rssm.dynamics import RSSMDynamics
from reverie.worlds.rssm.fast_cpu import CpuRSSMDynamics


def make(**options: Any) -> RSSMDynamics:
    sizes: dict[str, Any] = {"deter": 8, "hidden": 8, "blocks": 2}
    config = RSSMConfig(**sizes, stoch=5, classes=4, **options)
    return RSSMDynamics(3, {"action": Space(np.int32, (), 0, 3)}, config)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("parts", [(0,), (1,), (0, 1), (0, 1, 2, 3)])
def test_terms_and_gradients_equal_the_plain_ones(batch, parts):
    dyn, generator = make(unimix=0.05), torch.Generator().manual_seed(0)
    shape = (2, *batch, 5, 4)
    logits = list((2 * torch.randn(shape, generator=generator)).unbind())
    logits = [x.requires_grad_() for x in logits]
    results = []
    for cls in (RSSMDynamics, CpuRSSMDynamics):
        dyn.__class__ = cls
        terms = dyn.kl_terms(*logits)
        generator.manual_seed(1)
        loss = sum(
            (torch.randn(terms[i].shape, generator=generator) * terms[i]).sum()
            for i in parts
        )
        grads = torch.autograd.grad(loss, logits, materialize_grads=True)
        results.append((tuple(terms), grads))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("unimix", "dtype"), [(0.0, "float32"), (0.01, "bfloat16")])
def test_other_settings_use_the_plain_code(unimix, dtype):
    dyn = make(unimix=unimix)
    post, prior = torch.randn(2, 3, 5, 4).to(getattr(torch, dtype)).unbind()
    plain = dyn.kl_terms(post, prior)
    dyn.__class__ = CpuRSSMDynamics
    for a, b in zip(dyn.kl_terms(post, prior), plain, strict=True):
        assert torch.equal(a, b)
