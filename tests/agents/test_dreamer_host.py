"""The faster parts for a CPU learn what the plain ones learn."""

from __future__ import annotations

import numpy as np
import torch
from test_dreamer import ACT, CPU, TINY

from reverie.agents.dreamer.agent import Dreamer
from reverie.kernels.conv import upsample_cpu
from reverie.kernels.conv.upsample_cpu import FusedUpsampleConv
from reverie.nets.conv import SameConv
from reverie.spaces import Space

IMAGE = {
    "image": Space(np.dtype(np.uint8), (16, 16, 3)),
    "reward": Space(np.dtype(np.float32)),
    **{f"is_{k}": Space(np.dtype(bool)) for k in ("first", "last", "terminal")},
}


def test_losses_are_those_of_the_plain_agent(monkeypatch):
    monkeypatch.setattr(upsample_cpu, "MIN_PIXELS", 0)
    plain, quick = (
        Dreamer(IMAGE, ACT, TINY, device=CPU, precision="float32", compile=mode)
        for mode in ("none", "step")
    )
    kinds = {type(part) for part in quick.world.modules() if isinstance(part, SameConv)}
    assert kinds == {FusedUpsampleConv}
    rows, length = TINY.batch_size, TINY.batch_length + TINY.replay_context
    rng = np.random.default_rng(0)
    spaces = {**IMAGE, **ACT, **plain.extras}
    data = {k: torch.from_numpy(s.sample(rng, rows, length)) for k, s in spaces.items()}
    data["consec"] = torch.zeros(rows, length, dtype=torch.int64)
    for _ in range(2):
        one, two = plain.learn(data).metrics, quick.learn(data).metrics
        for key, value in one.items():
            if key.startswith("loss/"):
                torch.testing.assert_close(two[key], value, rtol=1e-4, atol=1e-4)
