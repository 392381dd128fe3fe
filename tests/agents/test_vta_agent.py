"""The VTA agent: training, reports and checkpoints, and its feed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie.agents.options import BuildOptions
from reverie.agents.vta.agent import VTAAgent, VTAAgentConfig
from reverie.api import Agent, UserError
from reverie.datasets.sequences import SequenceConfig
from reverie.datasets.sequences.feed import SequenceFeed
from reverie.datasets.synthetic.balls import BouncingBalls
from reverie.spaces import EVENT
from reverie.worlds.vta.config import VTAConfig

CPU = torch.device("cpu")
VTA = VTAConfig(context=2, length=6, belief=8, state=3, layers=1)
CONFIG = VTAAgentConfig(batch_size=4, world=VTA)


def make(config=CONFIG, seed=0, precision="float32"):
    settings = SequenceConfig(chunk=8, refresh=0, evaluation=6)
    source = BouncingBalls(settings, config.sequence_window, 0)
    agent = VTAAgent(
        source.obs_space, {}, config, BuildOptions(CPU, precision=precision, seed=seed)
    )
    return agent, SequenceFeed(source, CPU)


def weights(agent):
    return {k: v.clone() for k, v in agent.state_dict()["world"].items()}


def test_its_policy_raises_an_error():
    agent, feed = make()
    assert isinstance(agent, Agent)
    assert agent.initial(3) == ()
    with pytest.raises(UserError, match="cannot act"):
        agent.policy((), {})
    feed.close()


def test_training_lowers_the_loss_and_counts_the_updates():
    agent, feed = make()
    history = [agent.train(feed) for _ in range(12)]
    losses = [float(metrics["opt/loss"]) for metrics in history]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    tensors = [x for x in history[-1].values() if isinstance(x, torch.Tensor)]
    assert not any(x.requires_grad for x in tensors)
    assert float(agent.world.updates) == 12
    feed.close()


def test_training_batches_have_no_events():
    _, feed = make()
    assert EVENT not in feed("train")
    assert EVENT in feed("report")
    assert EVENT in feed("labelled")
    feed.close()


def test_a_prefetching_feed_returns_the_same_batches():
    settings = SequenceConfig(chunk=8, refresh=3, evaluation=6)
    plain, prefetching = (
        SequenceFeed(
            BouncingBalls(settings, CONFIG.sequence_window, 0), CPU, prefetch=prefetch
        )
        for prefetch in (False, True)
    )
    for _ in range(7):
        assert torch.equal(plain("train")["image"], prefetching("train")["image"])
    prefetching.step = plain.step = 2
    out = {"image": torch.zeros_like(plain("train")["image"])}
    plain.step = 2
    assert torch.equal(plain("train", out)["image"], prefetching("train")["image"])
    assert plain.served == prefetching.served + 4 * 10  # one batch was discarded
    plain.close()
    prefetching.close()


def test_nonfinite_frames_are_an_error():
    class Broken(BouncingBalls):
        def batch(self, step):
            batch = super().batch(step)
            return {"image": np.where(batch["image"] > 0, np.nan, 0.0)}

    source = Broken(SequenceConfig(chunk=8), CONFIG.sequence_window, 0)
    feed = SequenceFeed(source, CPU)
    with pytest.raises(UserError, match="NaN"):
        feed("train")
    feed.close()


def test_reports_compare_boundaries_with_baselines_and_change_nothing():
    agent, feed = make()
    agent.train(feed)
    before = weights(agent)
    report = agent.report(feed)
    for key, value in weights(agent).items():
        assert torch.equal(value, before[key])
    assert {"boundaries/exact/f1", "boundaries/near/f1"} <= report.keys()
    assert {"calibration/brier", "segments/count"} <= report.keys()
    for name in ("all", "none", "periodic", "same_rate", "pixels"):
        assert f"baselines/{name}/exact/f1" in report
    assert np.isfinite(float(report["loss"]))
    for key in ("boundaries", "imagined", "imagined_segments"):
        assert report[key].dtype == np.uint8
    feed.close()


def test_reports_without_events_have_segment_statistics_only():
    agent, feed = make()

    get = feed._get
    feed._get = lambda name: {k: v for k, v in get(name).items() if k != EVENT}
    report = agent.report(feed)
    assert "segments/count" in report
    assert "boundaries/exact/f1" not in report
    feed.close()


def test_a_nonfinite_batch_is_skipped_without_changes():
    agent, feed = make()
    agent.train(feed)
    before = weights(agent)
    get = feed._get
    feed._get = lambda _: {"image": torch.full((4, 10, 3, 32, 32), float("nan"))}
    metrics = agent.train(feed)
    feed._get = get
    for key, value in weights(agent).items():
        assert torch.equal(value, before[key]), key
    assert int(metrics["opt/consecutive_skips"]) == 1
    assert "loss/image" in agent.nonfinite()
    assert any(name.startswith("grad/") for name in agent.nonfinite())
    assert int(agent.train(feed)["opt/consecutive_skips"]) == 0
    feed.close()


def test_a_restored_agent_continues_identically():
    first, feed = make()
    first.train(feed)
    second, other = make(seed=1)
    second.load_state_dict(first.state_dict())
    other.step = feed.step
    one, two = first.train(feed), second.train(other)
    assert float(one["opt/loss"]) == float(two["opt/loss"])
    for key, value in weights(first).items():
        assert torch.equal(value, weights(second)[key]), key
    feed.close()
    other.close()


def test_weights_of_another_size_or_component_are_an_error():
    agent, feed = make()
    bigger = VTAAgentConfig(
        batch_size=4, world=VTAConfig(context=2, length=6, belief=16)
    )
    other, other_feed = make(bigger)
    with pytest.raises(UserError, match="this agent expects shape"):
        agent.load_weights(other.state_dict())
    with pytest.raises(UserError, match=r"No component matches .*\n.* some of world\."):
        agent.load_weights(other.state_dict(), "enc")
    with pytest.raises(UserError, match=r"No component matches .*\n.* some of world\."):
        agent.load_weights(other.state_dict(), "(")
    feed.close()
    other_feed.close()


def test_an_unknown_precision_is_an_error():
    with pytest.raises(UserError, match="no precision"):
        make(precision="float8")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_updates_as_graphs_train_like_plain_ones(precision):
    from reverie.kernels.scan.gru import FastGRU

    config = VTAAgentConfig(16, world=VTAConfig(belief=32))
    curves = []
    for dtype, compile in (("float32", "none"), (precision, "graph")):
        source = BouncingBalls(
            SequenceConfig(chunk=64, refresh=0), config.sequence_window, 0
        )
        cuda = torch.device("cuda")
        feed = SequenceFeed(source, cuda)
        agent = VTAAgent(
            source.obs_space,
            {},
            config,
            BuildOptions(cuda, precision=dtype, compile=compile),
        )
        curves.append([float(agent.train(feed)["opt/loss"]) for _ in range(30)])
        feed.close()
    assert isinstance(agent.world.encoders, FastGRU)
    np.testing.assert_allclose(curves[1], curves[0], rtol=0.03)
    assert curves[1][-1] < 0.8 * curves[1][0]


def test_a_batch_size_of_zero_is_an_error():
    with pytest.raises(UserError, match="at least 1"):
        VTAAgentConfig(batch_size=0)
