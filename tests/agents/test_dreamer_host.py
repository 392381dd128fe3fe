"""On the CPU, fast module versions train like the plain ones."""

from __future__ import annotations

import numpy as np
import torch
from dreamer_helpers import ACT, CPU, TINY

from reverie.agents.dreamer.agent import Dreamer
from reverie.agents.options import BuildOptions
from reverie.kernels.conv import upsample_cpu
from reverie.kernels.conv.upsample_cpu import FusedUpsampleConv
from reverie.nets.conv import SameConv
from reverie.spaces import Space

IMAGE = {
    "image": Space(np.dtype(np.uint8), (16, 16, 3)),
    "reward": Space(np.dtype(np.float32)),
    **{f"is_{k}": Space(np.dtype(bool)) for k in ("first", "last", "terminal")},
}


def test_losses_match_the_plain_agent(monkeypatch):
    monkeypatch.setattr(upsample_cpu, "MIN_PIXELS", 0)
    plain, fast = (
        Dreamer(IMAGE, ACT, TINY, BuildOptions(CPU, compile=mode))
        for mode in ("none", "step")
    )
    kinds = {
        type(module) for module in fast.world.modules() if isinstance(module, SameConv)
    }
    assert kinds == {FusedUpsampleConv}
    count, length = TINY.batch_size, TINY.batch_length + TINY.replay_context
    rng = np.random.default_rng(0)
    spaces = {**IMAGE, **ACT, **plain.extras}
    data = {
        k: torch.from_numpy(s.sample(rng, count, length)) for k, s in spaces.items()
    }
    data["consec"] = torch.zeros(count, length, dtype=torch.int64)
    for _ in range(2):
        expected, actual = plain._update(data).metrics, fast._update(data).metrics
        for key, value in expected.items():
            if key.startswith("loss/"):
                torch.testing.assert_close(actual[key], value, rtol=1e-4, atol=1e-4)
