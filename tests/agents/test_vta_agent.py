"""The vta: what it learns from, what it never sees, and what it keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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
        source.obs_space, {}, config, device=CPU, precision=precision, seed=seed
    )
    return agent, SequenceFeed(source, CPU)


def weights(agent):
    return {k: v.clone() for k, v in agent.state_dict()["world"].items()}


def test_it_is_an_agent_that_does_not_act():
    agent, feed = make()
    assert isinstance(agent, Agent)
    assert agent.initial(3) == ()
    with pytest.raises(UserError, match="cannot act"):
        agent.policy((), {})
    feed.close()


def test_training_lowers_the_loss_and_counts_the_updates():
    agent, feed = make()
    found = [agent.train(feed) for _ in range(12)]
    losses = [float(metrics["opt/loss"]) for metrics in found]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    kept = [x for x in found[-1].values() if isinstance(x, torch.Tensor)]
    assert not any(x.requires_grad for x in kept)  # or they would keep the batch
    assert float(agent.world.age) == 12
    feed.close()


def test_true_events_never_come_with_a_training_batch():
    _, feed = make()
    assert EVENT not in feed("train")
    assert EVENT in feed("report")
    assert EVENT in feed("labelled")
    feed.close()


def test_a_feed_that_fetches_ahead_serves_the_same_batches():
    settings = SequenceConfig(chunk=8, refresh=3, evaluation=6)
    plain, ahead = (
        SequenceFeed(BouncingBalls(settings, CONFIG.window, 0), CPU, prefetch=prefetch)
        for prefetch in (False, True)
    )
    for _ in range(7):
        assert torch.equal(plain("train")["image"], ahead("train")["image"])
    ahead.step = plain.step = 2
    place = {"image": torch.zeros_like(plain("train")["image"])}
    plain.step = 2
    assert torch.equal(plain("train", place)["image"], ahead("train")["image"])
    assert plain.served == ahead.served + 4 * 10  # one batch was thrown away
    plain.close()
    ahead.close()


def test_frames_that_are_not_finite_are_refused():
    class Broken(BouncingBalls):
        def batch(self, step):
            rows = super().batch(step)
            return {"image": np.where(rows["image"] > 0, np.nan, 0.0)}

    source = Broken(SequenceConfig(chunk=8), CONFIG.window, 0)
    feed = SequenceFeed(source, CPU)
    with pytest.raises(UserError, match="NaN"):
        feed("train")
    feed.close()


def test_a_report_shows_boundaries_beside_baselines_and_changes_nothing():
    agent, feed = make()
    agent.train(feed)
    before = weights(agent)
    found = agent.report(feed)
    for key, value in weights(agent).items():
        assert torch.equal(value, before[key])
    assert {"boundaries/exact/f1", "boundaries/near/f1"} <= found.keys()
    assert {"calibration/brier", "segments/count"} <= found.keys()
    for name in ("all", "none", "periodic", "same_rate", "pixels"):
        assert f"baselines/{name}/exact/f1" in found
    assert np.isfinite(float(found["loss"]))
    for picture in ("boundaries", "dream", "jumps"):
        assert found[picture].dtype == np.uint8
    feed.close()


def test_a_report_without_events_only_counts_segments():
    agent, feed = make()

    get = feed._get
    feed._get = lambda name: {k: v for k, v in get(name).items() if k != EVENT}
    found = agent.report(feed)
    assert "segments/count" in found
    assert "boundaries/exact/f1" not in found
    feed.close()


def test_an_update_that_is_not_finite_leaves_nothing_behind():
    agent, feed = make()
    agent.train(feed)
    before = weights(agent)
    get = feed._get
    feed._get = lambda _: {"image": torch.full((4, 10, 3, 32, 32), float("nan"))}
    metrics = agent.train(feed)
    feed._get = get
    for key, value in weights(agent).items():
        assert torch.equal(value, before[key]), key
    assert int(metrics["opt/nonfinite_in_row"]) == 1
    assert "loss/image" in agent.nonfinite()
    assert any(name.startswith("grad/") for name in agent.nonfinite())
    assert int(agent.train(feed)["opt/nonfinite_in_row"]) == 0
    feed.close()


def test_a_restored_watcher_goes_on_as_the_first_would_have():
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


def test_weights_of_another_size_or_component_are_refused():
    agent, feed = make()
    bigger = VTAAgentConfig(
        batch_size=4, world=VTAConfig(context=2, length=6, belief=16)
    )
    other, its_feed = make(bigger)
    with pytest.raises(UserError, match="this agent wants"):
        agent.load_weights(other.state_dict())
    with pytest.raises(UserError, match=r"No component matches .*\n.* some of world\."):
        agent.load_weights(other.state_dict(), "enc")
    with pytest.raises(UserError, match=r"No component matches .*\n.* some of world\."):
        agent.load_weights(other.state_dict(), "(")
    feed.close()
    its_feed.close()


@pytest.mark.parametrize(
    ("config", "precision", "complaint"),
    [
        (CONFIG, "float8", "no precision"),
    ],
)
def test_unknown_worlds_and_precisions_are_refused(config, precision, complaint):
    with pytest.raises(UserError, match=complaint):
        make(config, precision=precision)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_updates_recorded_with_fast_parts_learn_as_plain_ones_do(precision):
    from reverie.kernels.scan.gru import FastGRU

    config = VTAAgentConfig(16, world=VTAConfig(belief=32))
    curves = []
    for kind, way in (("float32", "none"), (precision, "graph")):
        source = BouncingBalls(
            SequenceConfig(chunk=64, refresh=0), config.sequence_window, 0
        )
        cuda = torch.device("cuda")
        feed = SequenceFeed(source, cuda)
        agent = VTAAgent(
            source.obs_space, {}, config, device=cuda, precision=kind, compile=way
        )
        curves.append([float(agent.train(feed)["opt/loss"]) for _ in range(30)])
        feed.close()
    assert isinstance(agent.world.readers, FastGRU)
    np.testing.assert_allclose(curves[1], curves[0], rtol=0.03)
    assert curves[1][-1] < 0.8 * curves[1][0]


def test_no_batch_is_refused():
    with pytest.raises(UserError, match="at least 1"):
        VTAAgentConfig(batch_size=0)
