"""Updates with collectives in a CUDA graph, in a process group of one rank (NCCL)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from updates import BATCH, BATCH_SETTINGS, CASES, EPS, STEP_SPACES, RandomFeed

from reverie.distributed import collective
from reverie.kernels.graphs.runner import WARM_UP
from reverie.run.config import resolve
from reverie.run.factory import make_agent
from reverie.run.ranks import make_leader, run_on_one_rank

pytestmark = pytest.mark.gpu
UPDATES = WARM_UP + 3


class DeviceFeed(RandomFeed):
    """Random batches on a GPU."""

    def __call__(self, name, out=None):
        batch = super().__call__(name)
        return {key: x.cuda() for key, x in batch.items()}


def train_on_gpu(case: str, in_group: bool) -> tuple[list[dict], list]:
    """Return the losses of some updates, and the captured graphs of collectives."""
    presets, flags, obs_space, act_space = CASES[case]
    batch = BATCH_SETTINGS.get(case, "dreamer.batch_size")
    config = resolve(presets, flags={**flags, batch: BATCH, ".*.opt.eps": EPS})
    spaces = SimpleNamespace(
        obs_space={**obs_space, **STEP_SPACES}, act_space=act_space
    )
    device = torch.device("cuda")
    agent = make_agent(config, spaces, device, "float32")
    feed = DeviceFeed(agent, {**spaces.obs_space, **act_space}, exact=False)
    leader = make_leader(config, agent, spaces, device, "float32")
    assert (leader is not None) == in_group
    metrics = []
    for _ in range(UPDATES):
        output = leader.train(feed) if leader else agent.train(feed)
        metrics.append({k: float(x) for k, x in output.items() if "loss" in k})
    if leader:
        leader.close()
    return metrics, list(collective.captured_graphs)


@pytest.mark.parametrize("case", ["dreamer", "infonce", "vta", "iris", "bc"])
def test_updates_with_collectives_in_a_graph_equal_plain_ones(case, capfd):
    expected, graphs = train_on_gpu(case, in_group=False)
    assert not graphs
    actual, graphs = run_on_one_rank(lambda: train_on_gpu(case, in_group=True))
    assert graphs
    assert "cannot be captured" not in capfd.readouterr().err
    for own, other in zip(actual, expected, strict=True):
        assert own == pytest.approx(other, rel=1e-2, abs=1e-3)
