"""Evaluation of offline runs: in an environment and on held-out episodes."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from offline_helpers import SIDE

from reverie.api import UserError
from reverie.cli import main as cli
from reverie.datasets.episode_format import find_problems
from reverie.datasets.episodes import open_episodes
from reverie.datasets.feed import EpisodeFeed
from reverie.datasets.images import ImageConfig, ImageCrop
from reverie.datasets.split import Subset
from reverie.envs.suites.reach import Reach, ReachConfig
from reverie.envs.vector.vec_env import make_vec_env
from reverie.evaluation.episodes import evaluate, play_episodes, wilson_interval
from reverie.evaluation.held_out import (
    HeldOutConfig,
    episode_losses,
    evaluate_held_out,
    open_loop_errors,
    to_metrics,
)
from reverie.evaluation.recorders import FailureRecorder, VideoRecorder
from reverie.evaluation.rollout_ensembles import predict
from reverie.run.config import Config
from reverie.run.factory import make_agent
from reverie.run.load import open_run
from reverie.run.offline.datasets import saved_image_crop
from reverie.spaces import STEP_KEYS, Space
from reverie.storage.run_spaces import read_spaces

CPU = torch.device("cpu")
REACH = [("task", "reach"), ("env.reach.size", (SIDE, SIDE))]


def successes(result):
    return [episode["success"] > 0 for episode in result.episodes]


def test_a_clone_is_evaluated_on_images_cropped_as_in_training(clone):
    result = evaluate(clone, 3, REACH)
    summary = result.summary
    assert len(successes(result)) == 3
    assert (
        0
        <= summary["success_low"]
        <= summary["success"]
        <= summary["success_high"]
        <= 1
    )
    assert result.checkpoint == next((clone / "best").iterdir()).name


def test_the_command_prints_the_success_rate_and_writes_videos(clone, capsys):
    size = ["--env.reach.size", str(SIDE), str(SIDE)]
    words = ["eval", str(clone), "--episodes", "3", "--task", "reach", *size]
    assert cli.main([*words, "--videos", "1"]) == 0
    assert "reach: success" in capsys.readouterr().out
    data = json.loads((clone / "eval.json").read_text())
    assert (data["kind"], data["task"], data["seed"]) == ("episodes", "reach", 0)
    assert data["summary"]["count"] == len(data["episodes"]) == 3
    names = sorted(path.stem for path in (clone / "eval").iterdir())
    assert names[0].startswith("0000")
    failed = [name for name in names if "failed" in name]
    assert bool(failed) is not all(e["success"] > 0 for e in data["episodes"])
    assert cli.main([*words, "--videos", "some"]) == 2
    assert "--videos 0" in capsys.readouterr().err


def test_failed_episodes_are_saved_as_recordings(clone, tmp_path, capsys):
    flags = [*REACH, ("run.eval_envs", 3), ("env.reach.length", 5)]
    folder = clone / "eval" / "failures"
    result = evaluate(clone, 7, flags, failures=4)
    failed = successes(result).count(False)
    assert failed > 1  # it is hardly trained
    reader = open_episodes(folder)
    assert len(reader.names()) == len(result.files) == min(4, failed)
    for name in reader.names():
        episode = reader.read(name)
        assert not find_problems(episode, reader.obs_space, reader.act_space)
        assert episode["is_last"].sum() == episode["is_last"][-1] == 1
        assert set(episode) == {"image", "proprio", "action", *STEP_KEYS}
        assert episode["image"].shape[1:] == (SIDE, SIDE, 3)  # not cropped
        moved = np.clip(episode["proprio"] + 0.15 * episode["action"], -1, 1)
        np.testing.assert_allclose(moved[:-1], episode["proprio"][1:], atol=1e-5)
        assert not episode["action"][-1].any()
    sheet, video = str(tmp_path / "sheet.png"), str(tmp_path / "video.gif")
    assert cli.main(["data", "inspect", str(folder), "--out", sheet]) == 0
    assert cli.main(["data", "view", str(folder), "--out", video]) == 0
    assert successes(evaluate(clone, 2, flags, failures=1)).count(False)
    assert len(open_episodes(folder).names()) == 1  # the others were deleted
    assert not evaluate(clone, 2, flags, failures=0).files


def test_all_episodes_are_kept_as_a_dataset_to_train_on(clone, tmp_path, capsys):
    size = ["--env.reach.size", str(SIDE), str(SIDE)]
    words = ["eval", str(clone), "--episodes", "6", "--task", "reach", *size]
    assert cli.main([*words, "--keep-episodes", "--failures", "0"]) == 0
    folder = clone / "eval" / "episodes"
    assert f"All 6 episodes: {folder}" in capsys.readouterr().out
    played = json.loads((clone / "eval.json").read_text())["episodes"]
    reader = open_episodes(folder)
    kept = [reader.read(name) for name in reader.names()]
    assert all(not find_problems(x, reader.obs_space, reader.act_space) for x in kept)
    assert sorted((float(x["reward"].sum()), len(x["reward"]) - 1) for x in kept) == [
        (pytest.approx(score, abs=1e-4), length)
        for score, length in sorted((x["score"], x["length"]) for x in played)
    ]
    run = str(tmp_path / "run")
    settings = f"""--configs debug --offline.data {folder} --run.steps 1 --device cpu
        --logger.outputs jsonl --offline.split 0.3 --offline.keys proprio
        --logdir {run}"""
    assert cli.main(["bc", *settings.split()]) == 0
    sheet = str(tmp_path / "episodes.png")
    assert cli.main(["data", "inspect", str(folder), "--out", sheet]) == 0
    assert evaluate(clone, 2, REACH, keep_episodes=True).summary["count"] == 2
    assert len(open_episodes(folder).names()) == 2  # the others were deleted


def test_episodes_limits_the_held_out_recordings(world, capsys):
    assert cli.main(["eval", str(world), "--episodes", "1"]) == 0
    assert ": 1 held-out episodes" in capsys.readouterr().out
    assert len(json.loads((world / "eval.json").read_text())["episodes"]) == 1
    assert cli.main(["eval", str(world), "--episodes", "0"]) == 2
    assert "--episodes 1" in capsys.readouterr().err
    assert cli.main(["eval", str(world), "--keep-episodes"]) == 2
    assert "no episodes to record" in capsys.readouterr().err


def test_without_failures_no_folder_is_created(tmp_path):
    spaces = {"proprio": Space(np.float32, (2,))}, {"action": Space(np.float32, (2,))}
    recorder = FailureRecorder(tmp_path / "failures", *spaces, 1, 3)
    row = {"proprio": np.zeros((1, 2), np.float32), "reward": np.zeros(1, np.float32)}
    row |= {key: np.zeros(1, bool) for key in STEP_KEYS[1:]}
    for success in (1.0, None):
        recorder.add(row, {"action": np.zeros((1, 2), np.float32)})
        recorder.end(0, success)
    assert not recorder.paths
    assert not list(tmp_path.iterdir())


def test_videos_need_images(tmp_path):
    with pytest.raises(UserError, match="has no images"):
        VideoRecorder(tmp_path, {"proprio": Space(np.float32, (2,))}, 1, 1, 15)


def test_an_environment_with_other_observations_is_refused(clone):
    with pytest.raises(UserError, match=r"image: trained on \(16, 16, 3\)"):
        evaluate(clone, 1, [("task", "reach")])


def test_a_run_is_evaluated_on_held_out_episodes(world, clone, capsys):
    assert cli.main(["eval", str(world)]) == 0
    out = capsys.readouterr().out
    assert "open-loop error image" in out
    assert "ensembles proprio" in out
    assert "(calibrated: 50 %)" in out
    data = json.loads((world / "eval.json").read_text())
    assert (data["kind"], data["task"]) == ("recordings", "recordings")
    assert [row["name"] for row in data["episodes"]]
    assert {"rows", "image", "rew"} <= data["episodes"][0].keys()
    assert len(data["summary"]["openloop"]["image"]["model"]) == 3
    ensembles = data["summary"]["ensemble"]["proprio"]
    assert len(ensembles["rmse"]) == len(ensembles["spread"]) == 4
    assert len(ensembles["coverage"][0]) == 2
    names = {path.name for path in (world / "eval").iterdir()}
    assert {"image.png", "proprio.png", "ensemble_proprio.png"} <= names
    assert any(name.startswith("openloop_image.") for name in names)
    assert {path.rpartition("/")[2] for path in data["files"]} == names
    assert cli.main(["eval", str(clone)]) == 0
    assert "loss action" in capsys.readouterr().out


def open_feed(data, **changes):
    return EpisodeFeed(open_episodes(data), {}, CPU, **changes)


class Oracle:
    """The true dynamics of `reach`; with `late`, it uses the previous action."""

    def __init__(self, late=False):
        self.obs_space = {"proprio": Space(np.float32, (2,))}
        self.act_space = {"action": Space(np.float32, (2,))}
        self.predicted_keys = ["proprio"]
        self.late = late

    def seed(self, seed):
        pass

    def begin(self, context):
        # the actions between the context rows are known, not the last one
        return context["proprio"][:, -1], context["action"][:, -2]

    def step(self, state, action):
        position, previous = state
        taken = previous if self.late else action["action"]
        position = np.clip(position + 0.15 * taken, -1, 1)
        row = {"proprio": position.astype(np.float32)}
        return (position, action["action"]), row


@pytest.mark.parametrize("late", [False, True])
def test_predictions_use_the_recorded_actions_of_the_right_rows(data, late):
    feed = open_feed(data)
    batch = next(feed.episodes(4))
    arrays = {k: v.numpy() for k, v in batch.items() if k != "episode"}
    predicted = predict(Oracle(late), arrays, 2, 3)["proprio"]
    error = np.abs(predicted - arrays["proprio"][:, 2:5])[arrays["mask"][:, 2:5]].max()
    assert bool(error < 1e-5) is not late
    feed.close()


def test_losses_do_not_depend_on_padding(data, world):
    agent = open_run(world).load_agent(read_spaces(world))
    images = ImageCrop(ImageConfig((14, 14)), open_episodes(data).obs_space)
    feed = open_feed(data)
    (batch,) = list(feed.episodes(1, limit=1))
    batch = images.center_crop(batch)
    rows = int(batch["mask"].sum())
    padded = {
        k: torch.cat([v, v[:, -1:].repeat_interleave(7, 1)], 1)
        for k, v in batch.items()
        if v.ndim > 1
    }
    padded["is_first"][:, 1:] = False
    padded["mask"][:, rows:] = False
    alone, longer = (agent.episode_losses(b) for b in (batch, padded))
    for key, loss in alone[0].items():
        torch.testing.assert_close(longer[0][key][:, :rows], loss)
        assert longer[0][key].shape[1] == rows + 7
    assert longer[1].sum() == rows
    feed.close()


class RowNumbers:
    """Returns the number of a row as its loss, and a huge loss for padding."""

    def episode_losses(self, batch):
        rows = torch.arange(batch["mask"].shape[1]).float()
        loss = torch.where(batch["mask"], rows, 1e9)
        return {"row": loss}, batch["mask"]


def test_losses_of_episodes_are_means_over_their_rows(data):
    feed = open_feed(data)
    images = ImageCrop(ImageConfig(), open_episodes(data).obs_space)
    table = list(episode_losses(RowNumbers(), feed, images, HeldOutConfig(batch=5)))
    assert [episode.name for episode in table] == open_episodes(data).names()
    for episode in table:
        assert episode.losses["row"] == pytest.approx((episode.rows - 1) / 2)
    feed.close()


def test_held_out_episodes_that_cannot_be_read_are_an_error(data, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(data, folder)
    first = open_episodes(folder).names()[0]
    (path,) = folder.glob(f"{first}-*")
    path.write_bytes(path.read_bytes()[:300])
    reader = open_episodes(folder)
    feed = open_feed(data, held_out=Subset(reader, [first]))
    images = ImageCrop(ImageConfig(), reader.obs_space)
    message = r"None of the held-out episodes of .* can be used"
    with (
        pytest.warns(RuntimeWarning, match=f"{first} .*skipped"),
        pytest.raises(UserError, match=message),
    ):
        list(episode_losses(RowNumbers(), feed, images, HeldOutConfig()))
    with pytest.raises(UserError, match=message):
        open_loop_errors(Oracle(), feed, images, HeldOutConfig())
    feed.close()


def test_the_number_of_episodes_and_rows_can_be_limited(data, world):
    agent = open_run(world).load_agent(read_spaces(world))
    feed = open_feed(data)
    config = HeldOutConfig(episodes=3, length=4, context=2, horizon=10, batch=2)
    crop = saved_image_crop(open_run(world).checkpoint)
    table = list(episode_losses(agent, feed, crop, config))
    assert [episode.rows for episode in table] == [4, 4, 4]
    metrics = to_metrics(evaluate_held_out(agent, feed, crop, config))
    assert metrics["openloop/image"].ndim == 4  # a video
    assert "openloop/image/model_at_1" in metrics
    assert "openloop/image/model_at_5" not in metrics
    feed.close()


def test_the_interval_of_the_success_rate_is_wilsons():
    low, high = wilson_interval(9, 10)
    assert (low, high) == pytest.approx((0.5958, 0.9821), abs=1e-3)
    assert wilson_interval(0, 5)[0] == 0
    assert wilson_interval(5, 5)[1] == 1


def test_success_at_any_step_counts():
    class Env(Reach):
        def _obs(self, first=False):
            obs = super()._obs(first)
            obs["log/success"] = np.float32(self._steps == 1)
            return obs

    config = Config(agent="random")
    envs = make_vec_env(lambda i: Env(ReachConfig(length=4), i), 2, config.env.vector)
    agent = make_agent(config, envs, CPU, "float32")
    played = play_episodes(agent, envs, 3)
    assert [episode.success for episode in played] == [1.0] * 3
    envs.close()
