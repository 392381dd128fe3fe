"""Updates of small agents on random global batches, on any number of ranks.

With `exact`, everything is computed in float64, so that differences in the order of
sums are far smaller than the errors that the tests look for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reverie.agents.options import DTYPES
from reverie.distributed import collective
from reverie.run.config import resolve
from reverie.run.factory import make_agent
from reverie.spaces import Space

BATCH = 5  # uneven on two and on three ranks
F32, BOOL, U8 = (np.dtype(x) for x in ("float32", "bool", "uint8"))
STEP_SPACES = {
    "reward": Space(F32),
    "is_first": Space(BOOL),
    "is_last": Space(BOOL),
    "is_terminal": Space(BOOL),
}
DISCRETE = {"action": Space(np.dtype("int32"), (), 0, 4)}
CONTINUOUS = {"action": Space(F32, (2,), -1, 1)}
IMAGE = {"image": Space(U8, (16, 16, 3))}
VECTOR = {"vector": Space(F32, (3,))}

SHORT = {
    "dreamer.batch_length": 4,
    "dreamer.imag_length": 2,
    "dreamer.enc.mults": [1, 2],
    "dreamer.dec.mults": [1, 2],
    "dreamer.dec.bspace": 0,
}
ONLY_ENCODER = {k: x for k, x in SHORT.items() if not k.startswith("dreamer.dec.")}

# by name: presets, flags, observation space and action space
CASES: dict[
    str, tuple[list[str], dict[str, Any], dict[str, Space], dict[str, Space]]
] = {
    "dreamer": (
        ["debug"],
        {
            **SHORT,
            "dreamer.replay_context": 0,
            "dreamer.priosignal": "model",
            "dreamer.rssm.free_nats": 0,
            # two-hot values are sums of terms up to 5e8, which amplify rounding errors
            "dreamer.(rewhead|value).output": "symlog_mse",
            "dreamer.opt.warmup": 0,
        },
        {**IMAGE, **VECTOR},
        DISCRETE,
    ),
    "explore": (
        ["standardize_batch", "debug"],
        {
            **SHORT,
            "dreamer.opt.warmup": 0,
            "explore.policy": "plan2explore",
        },
        {**IMAGE, **VECTOR},
        CONTINUOUS,
    ),
    "dreamerv3_torch": (
        ["dreamerv3_torch", "debug"],
        SHORT,
        {**IMAGE},
        CONTINUOUS,
    ),
    "harmony": (["debug"], {**SHORT, "dreamer.harmony": True}, {**IMAGE}, DISCRETE),
    "barlow": (
        ["debug"],
        {**ONLY_ENCODER, "dreamer.representation": "barlow"},
        {**IMAGE},
        DISCRETE,
    ),
    "infonce": (
        ["debug"],
        {**ONLY_ENCODER, "dreamer.representation": "infonce"},
        {**IMAGE},
        DISCRETE,
    ),
    "prototypes": (
        ["debug"],
        {**ONLY_ENCODER, "dreamer.representation": "prototypes"},
        {**IMAGE},
        DISCRETE,
    ),
    "vta_world": (
        ["debug"],
        {**SHORT, "dreamer.world": "vta"},
        {**IMAGE},
        DISCRETE,
    ),
    "iris": (["iris_tiny"], {}, {"image": Space(U8, (4, 4, 3))}, DISCRETE),
    "vta": (["debug"], {"agent": "vta"}, {**IMAGE}, CONTINUOUS),
    "bc": (
        ["debug"],
        {"agent": "bc", "bc.enc.mults": [1, 2]},
        {**IMAGE, **VECTOR},
        CONTINUOUS,
    ),
}
EPS = 0.1
"""Added to the RMS of gradients, so that gradients that are zero up to rounding (of a
bias before a norm) are not divided by their own size. With 1e-3, rounding errors of
float32 grow from 5e-7 to 3e-4 in 20 updates on CPUs without AVX-512."""
BATCH_SETTINGS = {
    "iris": "iris.training..*.batch",
    "vta": "vta.batch_size",
    "bc": "bc.batch_size",
}


class RandomFeed:
    """Feed of random global batches; each rank gets its own sequences of them."""

    def __init__(self, agent: Any, spaces: dict[str, Space], exact: bool) -> None:
        self.agent, self.spaces, self.exact = agent, spaces, exact
        self.calls = 0
        self.written: list[Tensor] = []

    def ready(self, name: str) -> bool:
        return True

    def __call__(
        self, name: str, out: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        self.calls += 1
        rng = np.random.default_rng(self.calls)
        window = self.agent.windows[name]
        shape = (window.batch, window.context + window.length)
        spaces = {**self.spaces, **self.agent.extras}
        batch = {k: torch.tensor(x.sample(rng, *shape)) for k, x in spaces.items()}
        for key in ("is_first", "is_last", "is_terminal"):
            batch[key] = torch.tensor(rng.random(shape) < 0.1)
        batch["mask"] = torch.tensor(rng.random(shape) < 0.8)
        batch["stepid"] = torch.arange(shape[0] * shape[1]).reshape(shape)
        batch["consec"] = torch.zeros(shape, dtype=torch.int64)
        if self.exact:
            batch = {
                k: x.double() if x.is_floating_point() else x for k, x in batch.items()
            }
        rows = collective.set_batch(window.batch)
        batch = {key: x[rows.start : rows.stop] for key, x in batch.items()}
        if out is None:
            return batch
        return {key: out[key].copy_(x) for key, x in batch.items()}

    def write_back(self, stepid: Tensor, extras: dict[str, Tensor]) -> None:
        self.written += [collective.all_gather(x) for x in extras.values()]

    def prioritize(self, stepid: Tensor, priority: Tensor) -> None:
        self.written.append(collective.all_gather(priority))

    def count_uses(self, name: str, on: bool) -> None:
        pass


@contextmanager
def in_float64() -> Iterator[None]:
    """Replace float32 by float64, also where the code names it."""
    before = torch.float32, Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.float32, Tensor.float = torch.float64, Tensor.double  # type: ignore[misc]
    DTYPES["float32"] = torch.float64
    try:
        yield
    finally:
        torch.float32, Tensor.float = before  # type: ignore[misc]
        DTYPES["float32"] = torch.float32
        torch.set_default_dtype(torch.float32)


def train(case: str, updates: int, exact: bool = True) -> dict[str, Any]:
    """Return metrics, what was written back, and the final state of the agent."""
    if not exact:
        return _train(case, updates, exact)
    with in_float64():
        return _train(case, updates, exact)


def _train(case: str, updates: int, exact: bool) -> dict[str, Any]:
    presets, flags, obs_space, act_space = CASES[case]
    batch = BATCH_SETTINGS.get(case, "dreamer.batch_size")
    config = resolve(presets, flags={**flags, batch: BATCH, ".*.opt.eps": EPS})
    spaces = SimpleNamespace(
        obs_space={**obs_space, **STEP_SPACES}, act_space=act_space
    )
    agent: Any = make_agent(config, spaces, torch.device("cpu"), "float32")
    feed = RandomFeed(agent, {**spaces.obs_space, **act_space}, exact)
    metrics = []
    for _ in range(updates):
        with collective.synchronized():
            metrics.append(collective.average_metrics(agent.train(feed)))
    with collective.synchronized():
        state = agent.state_dict()
    return {"metrics": metrics, "written": feed.written, "state": state}
