"""Evaluation on held-out episodes: alignment of actions, padding and statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie.agents.dreamer.agent import Dreamer
from reverie.agents.options import BuildOptions
from reverie.agents.world_model_env import LatentWorldModelEnv
from reverie.api import UserError
from reverie.datasets.action_units import check_same_actions
from reverie.datasets.episodes import open_episodes
from reverie.datasets.feed import EpisodeFeed
from reverie.datasets.images import ImageConfig, ImageCrop
from reverie.evaluation.held_out import (
    HeldOutConfig,
    evaluate_held_out,
    open_loop_errors,
    to_metrics,
)
from reverie.evaluation.recordings import eval_recordings
from reverie.evaluation.rollout_ensembles import RolloutEnsembleConfig
from reverie.run import checkpoint
from reverie.run.config import resolve
from reverie.run.load import open_run
from reverie.run.offline.datasets import OfflineEpisodes
from reverie.run.offline.train import offline
from reverie.spaces import Space, step_spaces
from reverie.storage.episodes import write_episode

SIDE = 16
SPACES = {
    "image": Space(np.uint8, (SIDE, SIDE, 3), 0, 256),
    "place": Space(np.float32, (2,)),
}
ACTION = {"action": Space(np.float32, (2,), -1, 1)}
SMALL = {
    "dreamer.enc.mults": (1, 1),
    "dreamer.dec.mults": (1, 1),
    "dreamer.enc.depth": 8,
    "dreamer.dec.depth": 8,
    "dreamer.batch_size": 2,
    "dreamer.batch_length": 4,
}


def agent_state(run):
    """Return the state of the agent in the newest checkpoint."""
    return checkpoint.read_part(checkpoint.find_checkpoint(run), "agent")


def episode(steps, seed=0):
    """Return a moving point with its position and random images."""
    rng = np.random.default_rng(seed)
    rows = steps + 1
    action = rng.uniform(-1, 1, (rows, 2)).astype(np.float32)
    action[-1] = 0
    place = np.concatenate([np.zeros((1, 2)), 0.1 * np.cumsum(action[:-1], 0)])
    flags = np.arange(rows)
    return {
        "image": rng.integers(0, 256, (rows, SIDE, SIDE, 3), np.uint8),
        "place": place.astype(np.float32),
        "action": action,
        "reward": np.zeros(rows, np.float32),
        "is_first": flags == 0,
        "is_last": flags == steps,
        "is_terminal": flags == steps,
    }


@pytest.fixture
def folder(tmp_path):
    for i, steps in enumerate((6, 9, 4, 7)):
        write_episode(tmp_path / "data", f"demo_{i}", episode(steps, seed=i))
    return tmp_path / "data"


@pytest.fixture(scope="module")
def dreamer():
    config = resolve(["debug", "offline"], flags=SMALL).dreamer
    device = torch.device("cpu")
    return Dreamer({**SPACES, **step_spaces()}, ACTION, config, BuildOptions(device))


def batch_of(*episodes):
    keys = episodes[0]
    rows = {k: torch.as_tensor(np.stack([e[k] for e in episodes])) for k in keys}
    return rows | {"mask": torch.ones(rows["reward"].shape, dtype=torch.bool)}


def test_losses_of_a_row_depend_on_the_action_that_led_to_it(dreamer):
    """An action changes the losses of the row it leads to, and of no earlier row."""
    batch = batch_of(episode(7))
    before, _ = dreamer.episode_losses(batch)
    batch["action"][:, 3] += 0.5
    after, _ = dreamer.episode_losses(batch)
    for name in ("place", "image"):
        apart = (before[name] - after[name]).abs()[0]
        assert (apart[:4] == 0).all(), name
        assert apart[4] > 0, name


def test_the_action_of_the_last_context_row_is_not_part_of_the_context(dreamer):
    rows = {key: value[:, :5].numpy() for key, value in batch_of(episode(7)).items()}
    other = rows | {"action": rows["action"].copy()}
    other["action"][:, -1] = 0.9
    earlier = rows | {"action": rows["action"].copy()}
    earlier["action"][:, -2] = 0.9
    states = []
    for context in (rows, other, earlier):
        env = LatentWorldModelEnv(
            dreamer.world, SPACES, ACTION, torch.device("cpu"), seed=1
        )
        states.append(env.begin(context).deter)
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


class ConstantModel:
    """A world model with constant predictions."""

    predicted_keys = property(lambda self: list(SPACES))
    obs_space = SPACES
    act_space = ACTION

    def seed(self, seed):
        pass

    def begin(self, context):
        return len(context["place"])

    def step(self, count, action):
        black = np.zeros((count, SIDE, SIDE, 3), np.uint8)
        return count, {"place": np.full((count, 2), 5, np.float32), "image": black}


def test_errors_by_horizon_do_not_include_padding(folder):
    feed = EpisodeFeed(open_episodes(folder), {})
    images = ImageCrop(ImageConfig(), SPACES)
    config = HeldOutConfig(batch=4, context=3, horizon=6, video=False)
    errors, _ = open_loop_errors(ConstantModel(), feed, images, config)
    episodes = [open_episodes(folder).read(f"demo_{i}") for i in range(4)]
    everything = np.concatenate([e["place"] for e in episodes]).astype(np.float64)
    for ahead in range(6):
        long = [e["place"] for e in episodes if len(e["place"]) > 3 + ahead]
        guesses = {"model": 5.0, "mean": everything.mean(0)}
        for name, guess in guesses.items():
            wanted = np.mean([np.square(x[3 + ahead] - guess).mean() for x in long])
            found = np.nanmean(getattr(errors["place"], name)[:, ahead])
            assert found == pytest.approx(wanted, rel=1e-5), (name, ahead)
        copied = np.mean([np.square(x[3 + ahead] - x[2]).mean() for x in long])
        found = np.nanmean(errors["place"].copy[:, ahead])
        assert found == pytest.approx(copied, rel=1e-4)
        assert (~np.isnan(errors["place"].model[:, ahead])).sum() == len(long)
    bright = np.square(episodes[0]["image"][3] / 255.0).mean()
    assert errors["image"].model[0, 0] == pytest.approx(bright)
    feed.close()


def test_statistics_of_cropped_training_images_are_saved_and_used(folder, tmp_path):
    """Checks the world model, behavior cloning with its encoder, and the policy."""
    crop = (12, 12)
    quick = {"device": "cpu", "logger.outputs": "jsonl", "run.steps": 1}
    flags = {
        **SMALL,
        **quick,
        "offline.data": str(folder),
        "offline.split": 0.25,
        "offline.eval.ensemble.samples": 0,
        "offline.images.crop": crop,
        "logdir": str(tmp_path / "world"),
    }
    names = ["debug", "offline", "standardize"]
    world = offline(resolve(names, flags=flags))
    small = {"bc.head.units": 8, "bc.batch_size": 2, "offline.epochs": 0}
    flags |= {**small, "bc.run": str(world), "logdir": str(tmp_path / "clone")}
    clone = offline(resolve(["debug", "offline", "bc"], flags=flags))

    reader = open_episodes(folder)
    held_out = {row["name"] for row in eval_recordings(world).episodes}
    frames = [
        reader.read(name)["image"][:, 2:14, 2:14] / 255
        for name in reader.names()
        if name not in held_out
    ]
    mean = np.concatenate(frames).mean(0)
    kept = agent_state(world)["enc"]
    (key,) = [k for k in kept if k.endswith("image.mean")]
    np.testing.assert_allclose(kept[key].numpy(), mean, atol=1e-6)
    weights = agent_state(clone)["feature_extractor"]
    assert torch.equal(weights[f"encoder.{key}"], kept[key])

    space = {"obs_space": {**SPACES, **step_spaces()}, "act_space": ACTION}
    spaces = type("Spaces", (), space)
    agent = open_run(clone).load_policy(spaces)
    standard = agent.agent.feature_extractor.encoder.standardizers["image"]
    assert torch.equal(standard.get_buffer("mean"), kept[key])
    row = {k: np.asarray(v[:1]) for k, v in episode(3).items() if k != "action"}
    seen = torch.as_tensor(agent.crop.center_crop(row)["image"]).float() / 255
    assert standard(seen).abs().max() > 0.1  # not standardized by its own statistics
    _, chosen, _ = agent.policy(agent.initial(1), row, "eval")
    row["image"] = row["image"][:, 2:14, 2:14]  # cropped as in training
    _, wanted, _ = agent.agent.policy(agent.initial(1), row, "eval")
    np.testing.assert_array_equal(chosen["action"], wanted["action"])


def test_the_best_checkpoint_is_the_one_with_the_lowest_loss(
    folder, tmp_path, monkeypatch
):
    losses = iter([3.0, 1.0, 2.0, 2.5])
    evaluate = lambda *_: {"loss": next(losses)}  # noqa: E731
    monkeypatch.setattr(OfflineEpisodes, "evaluate", evaluate)
    flags = {
        "device": "cpu",
        "logger.outputs": "jsonl",
        "run.steps": 3,
        "run.report_every": 1,
        "offline.data": str(folder),
        "offline.epochs": 0,
        "bc.enc.mults": (1, 1),
        "bc.enc.units": 8,
        "bc.head.units": 8,
        "bc.batch_size": 2,
        "logdir": str(tmp_path / "run"),
    }
    run = offline(resolve(["offline", "bc"], flags=flags))
    (best,) = (run / "best").iterdir()
    loop = checkpoint.read_part(best, "loop")
    assert (loop["clock"]["step"], loop["best_loss"]) == (2, 1.0)


def test_the_best_checkpoint_is_selected_by_the_sum_of_scaled_losses(
    folder, dreamer, monkeypatch
):
    scales = {"first": 1.0, "second": 0.25, "shown": 0.0}

    def losses(batch):
        ones = torch.ones(batch["mask"].shape)
        values = {"first": 2 * ones, "second": 4 * ones, "shown": torch.nan * ones}
        return values, batch["mask"]

    monkeypatch.setattr(dreamer, "episode_losses", losses)
    monkeypatch.setattr(dreamer, "episode_loss_scale", scales.__getitem__)
    feed = EpisodeFeed(open_episodes(folder), {})
    images = ImageCrop(ImageConfig(), SPACES)
    config = HeldOutConfig(video=False, ensemble=RolloutEnsembleConfig(samples=0))
    metrics = to_metrics(evaluate_held_out(dreamer, feed, images, config))
    assert metrics["loss"] == pytest.approx(2 + 0.25 * 4)
    assert metrics["loss/second"] == pytest.approx(4)  # not scaled
    feed.close()


def test_an_environment_with_other_actions_is_refused():
    arms = [{"action": Space(np.float32, (n,), -1, 1)} for n in (7, 8)]
    with pytest.raises(UserError, match=r"action \(7,\), .* are action \(8,\)"):
        check_same_actions(
            "data", arms[0], "robosuite_Lift", arms[1], check_range=False
        )
    check_same_actions("data", arms[0], "robosuite_Lift", arms[0], check_range=False)


def test_the_maximum_length_is_zero_or_at_least_two():
    for length in (0, 2):
        assert HeldOutConfig(length=length).length == length
    with pytest.raises(ValueError, match="or at least 2"):
        HeldOutConfig(length=1)
