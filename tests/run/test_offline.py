"""Runs on recordings: from a folder of episodes to a judged world and a clone."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from reverie.api import UserError
from reverie.cli import main as cli
from reverie.cli.train import command_config
from reverie.datasets.episode_format import find_problems
from reverie.datasets.episodes import open_episodes
from reverie.datasets.feed import EpisodeFeed
from reverie.datasets.images import ImageConfig, ImageCrop
from reverie.datasets.split import Subset
from reverie.envs.suites.reach import Reach, ReachConfig
from reverie.evaluation.episodes import (
    check_same_actions,
    evaluate,
    interval,
    load_agent,
    play_episodes,
)
from reverie.evaluation.failures import Failures
from reverie.evaluation.offline import LookConfig, judge_episodes, look, open_loop
from reverie.evaluation.open_loop import dream_on
from reverie.evaluation.recordings import in_words, judge_run
from reverie.evaluation.videos import Films
from reverie.recordings.demonstrate import successful_episodes
from reverie.run import checkpoint
from reverie.run.config import Config, resolve
from reverie.run.folder import read_config
from reverie.run.offline import in_updates, offline, same_place, settle
from reverie.run.offline_data import (
    OfflineConfig,
    Recordings,
    images_of,
    same_actions,
)
from reverie.run.sequences import Watch
from reverie.spaces import FLAGS, Space
from reverie.storage.episodes import write_episode

CPU = torch.device("cpu")
SIDE = 16
TINY = {
    "device": "cpu",
    "logger.outputs": "jsonl",
    "run.steps": 4,
    "run.log_every": 2,
    "run.report_every": 2,
    "run.save_every": 2,
    "dreamer.batch_size": 3,
    "dreamer.batch_length": 5,
    "dreamer.enc.mults": (1, 1),
    "dreamer.dec.mults": (1, 1),
    "dreamer.enc.depth": 8,
    "dreamer.dec.depth": 8,
    "bc.enc.mults": (1, 1),
    "bc.enc.depth": 2,
    "bc.enc.units": 8,
    "bc.head.units": 8,
    "bc.head.layers": 1,
    "bc.batch_size": 4,
    "offline.passes": 0,
    "offline.look.context": 2,
    "offline.look.horizon": 3,
    "offline.look.batch": 2,
    "offline.look.fan.samples": 3,
    "offline.look.fan.horizon": 4,
}


def agent_state(run):
    """Return the state of the agent in the newest checkpoint."""
    return checkpoint.read_part(checkpoint.find_checkpoint(run), "agent")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    env = Reach(ReachConfig(size=(SIDE, SIDE)))
    found = zip(range(12), successful_episodes(env, "reach", 0, 0.0), strict=False)
    for i, episode in found:
        kept = {k: v for k, v in episode.items() if k[:4] != "log/"}
        write_episode(folder, f"demo_{i}", kept)
    return folder


def settings(data, logdir, *names, **flags):
    where = {"offline.data": str(data), "logdir": str(logdir)}
    return resolve(["debug", "offline", *names], flags={**TINY, **where, **flags})


def lines(path, key):
    rows = [json.loads(x) for x in (path / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]


@pytest.fixture(scope="module")
def world(data, tmp_path_factory):
    flags = {"offline.images.crop": (14, 14)}
    return offline(settings(data, tmp_path_factory.mktemp("world") / "run", **flags))


def test_a_world_is_learnt_and_judged_without_an_environment(world):
    for key in ("image", "proprio", "rew", "con", "dyn", "rep"):
        assert np.isfinite(lines(world, f"report/loss/{key}")).all()
    for name in ("model", "copy", "mean"):
        assert lines(world, f"report/openloop/image/{name}_at_1")
        assert lines(world, f"report/openloop/proprio/{name}")
    for name in ("rmse", "spread", "coverage", "copy_rmse"):
        assert np.isfinite(lines(world, f"report/fan/proprio/{name}")).all()
    assert min(lines(world, "report/fan/proprio/spread")) > 0  # each by its own chance
    assert not lines(world, "train/loss/policy")
    (best,) = (world / "best").iterdir()
    kept = checkpoint.read_part(best, "loop")["lowest"]
    assert kept == pytest.approx(min(lines(world, "report/loss")), rel=1e-5)


def test_the_actor_may_learn_along(data, tmp_path):
    flags = {"dreamer.behaviour": "True", "run.steps": 2}
    path = offline(settings(data, tmp_path / "run", **flags))
    assert lines(path, "train/loss/policy")


def test_a_run_in_two_parts_ends_where_one_in_a_single_part_does(data, world, tmp_path):
    flags = {"offline.images.crop": (14, 14)}
    offline(settings(data, tmp_path / "run", **flags, **{"run.steps": 2}))
    path = offline(settings(data, tmp_path / "run", **flags))
    ours, theirs = (agent_state(p) for p in (path, world))
    for key, value in theirs["enc"].items():
        assert torch.equal(ours["enc"][key], value), key


@pytest.fixture(scope="module")
def clone(data, world, tmp_path_factory):
    flags = {"bc.run": str(world)}
    path = tmp_path_factory.mktemp("clone") / "run"
    return offline(settings(data, path, "bc", **flags))


def test_a_clone_takes_over_what_the_world_knows(world, clone):
    config = read_config(clone)
    assert config.bc.run_agent == "dreamer"
    assert config.dreamer == read_config(world).dreamer
    assert config.offline.images.crop == (14, 14)
    theirs = agent_state(world)["enc"]
    mine = agent_state(clone)
    for key, value in theirs.items():
        assert torch.equal(mine["feature_extractor"][f"encoder.{key}"], value)
    assert mine["keys"] == ["image", "proprio"]


def test_a_clone_is_measured_with_the_images_it_was_trained_on(clone):
    result = evaluate(clone, 3, [("task", "reach"), ("env.reach.size", (SIDE, SIDE))])
    assert len(result["successes"]) == 3
    assert (
        0 <= result["success_low"] <= result["success"] <= result["success_high"] <= 1
    )
    assert result["checkpoint"] == next((clone / "best").iterdir()).name


def test_the_command_says_how_often_a_clone_succeeds(clone, capsys):
    size = ["--env.reach.size", str(SIDE), str(SIDE)]
    words = ["eval", str(clone), "--episodes", "3", "--task", "reach", *size]
    assert cli.main([*words, "--videos", "1"]) == 0
    assert "reach: success" in capsys.readouterr().out
    found = json.loads((clone / "eval.json").read_text())["successes"]
    names = sorted(path.stem for path in (clone / "eval").iterdir())
    assert names[0].startswith("0000")
    assert any("failed" in name for name in names) is not all(found)
    assert cli.main([*words, "--videos", "some"]) == 2
    assert "--videos 0" in capsys.readouterr().err


def test_episodes_that_failed_are_kept_as_recordings(clone, tmp_path, capsys):
    size = ("env.reach.size", (SIDE, SIDE))
    flags = [("task", "reach"), size, ("run.eval_envs", 3), ("env.reach.length", 5)]
    folder = clone / "eval" / "failures"
    result = evaluate(clone, 7, flags, failures=4)
    failed = result["successes"].count(False)
    assert failed > 1  # it has hardly learnt
    reader = open_episodes(folder)
    assert len(reader.names()) == len(result["files"]) == min(4, failed)
    for name in reader.names():
        episode = reader.read(name)
        assert not find_problems(episode, reader.obs_space, reader.act_space)
        assert episode["is_last"].sum() == episode["is_last"][-1] == 1
        assert set(episode) == {"image", "proprio", "action", *FLAGS}
        assert episode["image"].shape[1:] == (SIDE, SIDE, 3)  # as it was, not cut
        moved = np.clip(episode["proprio"] + 0.15 * episode["action"], -1, 1)
        np.testing.assert_allclose(moved[:-1], episode["proprio"][1:], atol=1e-5)
        assert not episode["action"][-1].any()
    sheet, film = str(tmp_path / "sheet.png"), str(tmp_path / "film.gif")
    assert cli.main(["data", "inspect", str(folder), "--out", sheet]) == 0
    assert cli.main(["data", "view", str(folder), "--out", film]) == 0
    assert evaluate(clone, 2, flags, failures=1)["successes"].count(False)
    assert len(open_episodes(folder).names()) == 1  # others made room
    assert "files" not in evaluate(clone, 2, flags, failures=0)


def test_an_agent_that_never_fails_leaves_no_failures(tmp_path):
    spaces = {"proprio": Space(np.float32, (2,))}, {"action": Space(np.float32, (2,))}
    kept = Failures(tmp_path / "failures", *spaces, 1, 3)
    row = {"proprio": np.zeros((1, 2), np.float32), "reward": np.zeros(1, np.float32)}
    row |= {key: np.zeros(1, bool) for key in FLAGS[1:]}
    for success in (1.0, None):
        kept.add(row, {"action": np.zeros((1, 2), np.float32)})
        kept.end(0, success)
    assert not kept.paths
    assert not list(tmp_path.iterdir())


def test_what_shows_no_images_is_not_filmed(tmp_path):
    with pytest.raises(UserError, match="no images to film"):
        Films(tmp_path, {"proprio": Space(np.float32, (2,))}, 1, 1)


def test_an_environment_that_looks_different_is_refused(clone):
    with pytest.raises(UserError, match=r"image: trained on \(16, 16, 3\)"):
        evaluate(clone, 1, [("task", "reach")])


def test_an_environment_with_other_actions_is_refused():
    two, three = ({"action": Space(np.float32, (n,))} for n in (2, 3))
    with pytest.raises(UserError, match=r"action \(2,\), lift takes action \(3,\)"):
        check_same_actions(two, three, "lift")
    check_same_actions(two, two, "lift")


def test_a_crop_other_than_the_world_had_is_refused(data, world, tmp_path):
    flags = {"bc.run": str(world), "offline.images.crop": (12, 12)}
    with pytest.raises(UserError, match="was trained on images of"):
        settle(settings(data, tmp_path / "run", "bc", **flags))


def test_keys_in_another_order_than_the_world_has_are_refused(data, world, tmp_path):
    flags = {"bc.run": str(world), "bc.keys": ("proprio", "image")}
    with pytest.raises(UserError, match="its order is image, proprio"):
        offline(settings(data, tmp_path / "run", "bc", **flags))


def test_recordings_with_other_actions_are_refused(data, world, tmp_path):
    folder = tmp_path / "arm"
    env = Reach(ReachConfig(size=(SIDE, SIDE)))
    for i, episode in zip(
        range(3), successful_episodes(env, "reach", 0, 0.0), strict=False
    ):
        kept = {k: v for k, v in episode.items() if k != "log/success"}
        kept["action"] = np.repeat(kept["action"], 3, -1)
        write_episode(folder, f"demo_{i}", kept)
    other = r"action \(2,\), those of .* are action \(6,\)"
    with pytest.raises(UserError, match=other):
        offline(settings(folder, tmp_path / "run", "bc", **{"bc.run": str(world)}))
    with pytest.raises(UserError, match=other):
        offline(settings(data, tmp_path / "run", **{"offline.eval_data": str(folder)}))


def test_weights_for_other_keys_are_refused_with_the_difference(data, world, tmp_path):
    flags = {"offline.keys": "proprio", "run.from_checkpoint": str(world)}
    with pytest.raises(UserError, match=r"image: trained on \(.*\), missing in"):
        offline(settings(data, tmp_path / "run", **flags))


def test_an_agent_that_cannot_learn_from_recordings_is_refused(data, tmp_path):
    with pytest.raises(UserError, match="learns nothing from recordings"):
        offline(settings(data, tmp_path / "run", agent="random"))


def test_a_clone_has_no_world_to_look_through(data, world, clone, tmp_path):
    with pytest.raises(UserError, match=f"no world to look .*\n.*--bc.run {world}"):
        offline(settings(data, tmp_path / "run", "bc", **{"bc.run": str(clone)}))


def test_recordings_without_a_key_the_world_sees_are_refused(world, tmp_path):
    folder = tmp_path / "blind"
    env = Reach(ReachConfig(size=(SIDE, SIDE)))
    for i, episode in zip(
        range(3), successful_episodes(env, "reach", 0, 0.0), strict=False
    ):
        kept = {k: v for k, v in episode.items() if k not in ("image", "log/success")}
        write_episode(folder, f"demo_{i}", kept)
    with pytest.raises(UserError, match="has no image"):
        offline(settings(folder, tmp_path / "run", "bc", **{"bc.run": str(world)}))


def test_vectors_alone_are_enough(data, tmp_path):
    flags = {"offline.keys": ("proprio",), "run.steps": 2}
    path = offline(settings(data, tmp_path / "run", **flags))
    assert lines(path, "report/openloop/proprio/model")
    assert not lines(path, "report/openloop/image/model")


def test_keys_that_are_seen_but_not_drawn_are_not_judged(data, tmp_path):
    flags = {"dreamer.dec.mlp_keys": "none", "run.steps": 1}
    path = offline(settings(data, tmp_path / "run", **flags))
    assert lines(path, "report/openloop/image/model")
    assert not lines(path, "report/openloop/proprio/model")


def test_a_clone_does_not_learn_from_acting(tmp_path, capsys):
    logdir = ["--logdir", str(tmp_path / "run"), "--device", "cpu"]
    flags = ["--agent", "bc", "--run.envs", "1", "--bc.enc.mults", "1", "1"]
    assert cli.main(["train", "--task", "catch", *flags, *logdir]) == 2
    assert "reverie bc --offline.data PATH" in capsys.readouterr().err


def test_a_run_without_progress_ends_early(data, tmp_path):
    flags = {"run.steps": 50, "run.report_every": 1, "offline.patience": 2}
    path = offline(
        settings(data, tmp_path / "run", "bc", **flags, **{"bc.opt.lr": 0.0})
    )
    assert lines(path, "train/opt/updates")[-1] == 3


def test_nothing_to_learn_from_is_a_sentence(tmp_path, capsys):
    assert cli.main(["offline", "--logdir", str(tmp_path / "run")]) == 2
    assert "--offline.data PATH" in capsys.readouterr().err
    missing = ["--offline.data", str(tmp_path / "none")]
    assert cli.main(["bc", *missing, "--logdir", str(tmp_path / "run")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_run_is_resumed_by_the_command_that_began_it(world, tmp_path, capsys):
    assert cli.main(["train", "--logdir", str(world)]) == 2
    assert f"Fix: reverie offline --logdir {world}" in capsys.readouterr().err
    assert cli.main(["offline", "--logdir", str(world)]) == 0
    acting = ["--configs", "debug", "random", "--task", "catch", "--run.steps", "8"]
    assert cli.main(["train", *acting, "--logdir", str(tmp_path / "acted")]) == 0
    assert cli.main(["offline", "--logdir", str(tmp_path / "acted")]) == 2
    assert "Fix: reverie train --logdir" in capsys.readouterr().err


def test_recordings_are_split_by_seed_by_masks_or_not_at_all(data):
    whole = Recordings(OfflineConfig(str(data), split=0.0), 0)
    assert whole.training.names() == whole.judging.names()
    half = Recordings(OfflineConfig(str(data), split=0.5), 0)
    assert not set(half.training.names()) & set(half.judging.names())
    assert len(half.judging.names()) == 6
    two = Recordings(OfflineConfig(str(data), eval_data=str(data)), 0)
    assert len(two.judging.names()) == len(two.training.names()) == 12
    two.close()


def test_a_run_is_judged_by_what_was_set_aside(world, clone, capsys):
    assert cli.main(["eval", str(world)]) == 0
    said = capsys.readouterr().out
    assert "foreseen image" in said
    assert "fans of proprio" in said
    found = json.loads((world / "judgement.json").read_text())
    assert [row["name"] for row in found["episodes"]]
    assert {"rows", "image", "rew"} <= found["episodes"][0].keys()
    assert len(found["openloop"]["image"]["model"]) == 3
    fans = found["fans"]["proprio"]
    assert len(fans["rmse"]) == len(fans["spread"]) == 4
    assert len(fans["coverage"][0]) == 2
    names = {path.name for path in (world / "judgement").iterdir()}
    assert {"image.png", "proprio.png", "fan_proprio.png"} <= names
    assert any(name.startswith("openloop_image.") for name in names)
    assert cli.main(["eval", str(clone)]) == 0
    assert "loss action" in capsys.readouterr().out


def catch_recordings(folder):
    from reverie.envs.suites.catch import Catch, CatchConfig

    env, rng = Catch(CatchConfig(rows=4, cols=4, size=(4, 4))), np.random.default_rng(0)
    for i in range(6):
        rows, obs = [], env.reset(i)
        while True:
            last = bool(obs["is_last"])
            space = env.act_space["action"]
            action = space.zeros() if last else space.sample(rng)
            rows.append({**obs, "action": action})
            if last:
                break
            obs = env.step({"action": action})
        keys = [key for key in rows[0] if key[:4] != "log/"]
        episode = {k: np.stack([np.asarray(row[k]) for row in rows]) for k in keys}
        write_episode(folder, f"demo_{i}", episode)


def test_blocks_that_count_epochs_count_updates_without_an_environment(tmp_path):
    words = ["--configs", "iris_crafter", "--offline.data", "somewhere"]
    for command in ("offline", "bc"):
        run = command_config(command, [*words, "--run.save_every", "7"]).run
        assert (run.clock, run.log_every, run.save_every) == ("steps", 1000, 7)
    catch_recordings(tmp_path / "data")
    flags = {"logdir": str(tmp_path / "run"), "offline.data": str(tmp_path / "data")}
    with pytest.raises(UserError, match=r"no phases .*\n  Fix"):
        offline(resolve(["offline", "iris_tiny"], flags=flags))


def test_kinds_of_actions_that_nobody_learnt_are_refused():
    few, many = ({"action": Space(np.int32, (), 0, count)} for count in (3, 5))
    same_actions("world", many, "data", few)
    with pytest.raises(UserError, match=r"from 0 to 2, those of data .* 0 to 4"):
        same_actions("world", few, "data", many)


def test_recordings_are_the_same_however_their_path_is_spelt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert same_place("data", "./data")
    assert same_place("data", str(tmp_path / "data"))
    assert not same_place("data", "other")
    assert not same_place("minari:data", "data")


def test_the_tokenizer_and_the_world_of_iris_learn_through_the_same_loop(tmp_path):
    catch_recordings(tmp_path / "data")
    flags = {
        **TINY,
        "logdir": str(tmp_path / "run"),
        "offline.data": str(tmp_path / "data"),
        "offline.split": 0.5,
        "offline.look.context": 1,
        "run.steps": 2,
        "iris.training.world_model.batch": 4,
        "iris.training.tokenizer.batch": 4,
    }
    path = offline(resolve(["iris_tiny", "offline"], flags=flags))
    assert lines(path, "train/loss/tokenizer/l1")
    assert lines(path, "train/loss/world_model/latents")
    assert not [
        k for k in (path / "metrics.jsonl").read_text().split('"') if "actor" in k
    ]
    assert lines(path, "report/openloop/image/model")
    judged = judge_run(path)
    assert "3 episodes set aside" in in_words(judged)
    assert {"tokenizer/l2", "world_model/rewards"} <= judged["losses"].keys()
    flags |= {"bc.run": str(path), "logdir": str(tmp_path / "clone")}
    clone = offline(resolve(["iris_tiny", "offline", "bc"], flags=flags))
    mine = agent_state(clone)
    assert mine["keys"] == ["image"]
    theirs = agent_state(path)["world_model"]
    for key, value in theirs.items():
        assert torch.equal(value, mine["feature_extractor"][f"encoder.dynamics.{key}"])


def test_a_clone_looks_through_a_file_of_dreamerv3_torch(data, tmp_path):
    cnn, mlp = "_wm._orig_mod.encoder._cnn.layers", "_wm._orig_mod.encoder._mlp.layers"
    state = {
        f"{cnn}.0.weight": torch.rand(4, 3, 4, 4),
        f"{cnn}.1.norm.weight": torch.rand(4),
        f"{cnn}.1.norm.bias": torch.rand(4),
        f"{mlp}.Encoder_linear0.weight": torch.rand(6, 2),
        f"{mlp}.Encoder_norm0.weight": torch.rand(6),
        f"{mlp}.Encoder_norm0.bias": torch.rand(6),
    }
    torch.save({"agent_state_dict": state}, tmp_path / "latest.pt")
    flags = {"bc.run": str(tmp_path / "latest.pt"), "run.steps": 2}
    path = offline(settings(data, tmp_path / "run", "bc", **flags))
    mine = agent_state(path)["feature_extractor"]
    assert torch.equal(mine["encoder.convs.0.weight"], state[f"{cnn}.0.weight"])
    size = ("env.reach.size", (SIDE, SIDE))
    assert "success" in evaluate(path, 1, [("task", "reach"), size])


def test_passes_are_counted_in_updates(data):
    flags = {**TINY, "offline.passes": 3, "offline.report_passes": 2}
    flags |= {"bc.batch_size": 10, "offline.data": str(data)}
    config = resolve(["offline", "bc"], flags=flags)
    assert in_updates(config, 45).run.steps == 4  # `run.steps` ends it
    free = resolve(["offline", "bc"], flags={**flags, "run.steps": 1e9})
    assert in_updates(free, 45).run.steps == 3 * 4
    assert in_updates(free, 45).run.report_every == 2  # as `run.report_every` says
    rare = resolve(["offline", "bc"], flags={**flags, "run.report_every": 1e9})
    assert in_updates(rare, 45).run.report_every == 2 * 4
    assert in_updates(rare, 5).run.steps == 3
    world = resolve(["offline"], flags=flags)
    with pytest.raises(UserError, match="does not count passes"):
        in_updates(world, 45)
    rows = Recordings(OfflineConfig(str(data), split=0.0), 0).steps
    lengths = [open_episodes(data).rows(name) for name in open_episodes(data).names()]
    assert rows == sum(lengths) - 12


@pytest.mark.parametrize(
    ("name", "lr", "split", "passes"),
    [
        ("bc", 1e-4, 0.1, 20),
        ("bc_can_PH", 5e-4, 0.1, 1000),
        ("bc_lift_PH", 3e-4, 0.2, 1000),
    ],
)
def test_presets_have_the_published_settings(name, lr, split, passes):
    config = resolve(["offline", "bc", name])
    assert (config.agent, config.bc.batch_size) == ("bc", 256)
    assert (config.bc.opt.lr, config.bc.opt.wd, config.bc.opt.clip) == (lr, 0, 100)
    assert (config.offline.split, config.offline.passes) == (split, passes)
    head = config.bc.head
    assert (head.kind, head.layers, head.units, head.loss) == ("mlp", 4, 1024, "mse")
    assert config.offline.images.crop == ((78, 78) if name != "bc" else (0, 0))
    robomimic = resolve(["offline", "robomimic"])
    assert "aux_" in robomimic.dreamer.enc.mlp_keys
    assert "aux_" not in robomimic.dreamer.dec.mlp_keys
    assert robomimic.offline.images.crop == (78, 78)
    assert not robomimic.dreamer.behaviour
    lift = resolve(["robosuite_lift"])
    assert (lift.task, lift.run.envs, lift.run.steps) == ("robosuite_Lift", 1, 50_000)
    assert lift.run.train_ratio == 512


def test_the_world_and_the_clone_of_lift_see_what_is_demonstrated():
    shown = resolve(["lift"]).env.robosuite
    assert shown.cameras == ("agentview", "robot0_eye_in_hand")
    assert (shown.object, shown.horizon, shown.end_on_success) == (False, 100, True)
    world = resolve(["offline", "offline_lift"])
    clone = resolve(["offline", "bc", "bc_lift"])
    for config in (world, clone):
        assert (config.task, config.env.robosuite) == ("robosuite_Lift", shown)
    assert (world.agent, clone.agent) == ("dreamer", "bc")
    assert world.offline.images.crop == (78, 78)
    assert clone.bc.head.kind == "mixture"  # a cube can be turned either way


def test_runs_on_recordings_have_nothing_from_a_task():
    """A block of settings belongs to the task it is named after."""
    plain, learnt = Config(), resolve(["offline"])
    assert learnt.task == "recordings"
    assert learnt.dreamer.rssm == plain.dreamer.rssm
    assert learnt.dreamer.enc == plain.dreamer.enc
    assert learnt.dreamer.opt == plain.dreamer.opt
    assert resolve(["offline", "bc"]).bc.enc == plain.bc.enc


# What is measured


def feed_of(data, **changes):
    return EpisodeFeed(open_episodes(data), {}, CPU, **changes)


class Oracle:
    """A world that knows how the hand moves; `late` acts one action behind."""

    def __init__(self, late=False):
        self.obs_space = {"proprio": Space(np.float32, (2,))}
        self.act_space = {"action": Space(np.float32, (2,))}
        self.predicted_keys = ["proprio"]
        self.late = late

    def seed(self, seed):
        pass

    def begin(self, context):
        # a world that follows rows knows the actions between them, not the last one
        return context["proprio"][:, -1], context["action"][:, -2]

    def step(self, state, action):
        place, before = state
        taken = before if self.late else action["action"]
        place = np.clip(place + 0.15 * taken, -1, 1)
        return (place, action["action"]), {"proprio": place.astype(np.float32)}


@pytest.mark.parametrize("late", [False, True])
def test_only_the_right_actions_foresee_what_came(data, late):
    feed = feed_of(data)
    batch = next(feed.episodes(4))
    arrays = {k: v.numpy() for k, v in batch.items() if k != "episode"}
    drawn = dream_on(Oracle(late), arrays, 2, 3)["proprio"]
    error = np.abs(drawn - arrays["proprio"][:, 2:5])[arrays["mask"][:, 2:5]].max()
    assert bool(error < 1e-5) is not late
    feed.close()


def test_padding_counts_nowhere(data, world):
    """Losses of an episode are the same alone and beside a longer one."""
    config = read_config(world)
    agent = load_agent(
        config, checkpoint.find_checkpoint(world), Reach(ReachConfig((SIDE, SIDE)))
    )
    images = ImageCrop(ImageConfig((14, 14)), open_episodes(data).obs_space)
    feed = feed_of(data)
    (batch,) = list(feed.episodes(1, limit=1))
    batch = images.center_crop(batch)
    rows = int(batch["mask"].sum())
    more = {
        k: torch.cat([v, v[:, -1:].repeat_interleave(7, 1)], 1)
        for k, v in batch.items()
        if v.ndim > 1
    }
    more["is_first"][:, 1:] = False
    more["mask"][:, rows:] = False
    one, other = (agent.episode_losses(b) for b in (batch, more))
    for key, loss in one[0].items():
        longer = other[0][key]
        torch.testing.assert_close(longer[:, :rows], loss)
        assert longer.shape[1] == rows + 7
    assert other[1].sum() == rows
    feed.close()


class Counting:
    """Judges every row by its number, and padding as horrible."""

    def episode_losses(self, batch):
        rows = torch.arange(batch["mask"].shape[1]).float()
        loss = torch.where(batch["mask"], rows, 1e9)
        return {"row": loss}, batch["mask"]


def test_means_are_over_real_rows_and_the_table_names_episodes(data):
    feed = feed_of(data)
    images = ImageCrop(ImageConfig(), open_episodes(data).obs_space)
    table = list(judge_episodes(Counting(), feed, images, LookConfig(batch=5)))
    assert [name for name, _, _ in table] == open_episodes(data).names()
    for _, losses, count in table:
        assert losses["row"] == pytest.approx((count - 1) / 2)
    feed.close()


def test_if_nothing_set_aside_can_be_read_a_sentence_says_so(data, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(data, folder)
    first = open_episodes(folder).names()[0]
    (path,) = folder.glob(f"{first}-*")
    path.write_bytes(path.read_bytes()[:300])
    reader = open_episodes(folder)
    feed = feed_of(data, held_out=Subset(reader, [first]))
    images = ImageCrop(ImageConfig(), reader.obs_space)
    with (
        pytest.warns(RuntimeWarning, match=f"{first} .*skipped"),
        pytest.raises(UserError, match=r"None of the episodes of .* set aside"),
    ):
        list(judge_episodes(Counting(), feed, images, LookConfig()))
    with pytest.raises(UserError, match=r"None of the episodes of .* set aside"):
        open_loop(Oracle(), feed, images, LookConfig())
    feed.close()


def test_few_episodes_and_rows_may_be_asked_for(data, world):
    config = read_config(world)
    agent = load_agent(
        config, checkpoint.find_checkpoint(world), Reach(ReachConfig((SIDE, SIDE)))
    )
    feed = feed_of(data)
    images = images_of(checkpoint.find_checkpoint(world))
    asked = LookConfig(episodes=3, length=4, context=2, horizon=10, batch=2)
    table = list(judge_episodes(agent.agent, feed, images, asked))
    assert [count for _, _, count in table] == [4, 4, 4]
    found = look(agent.agent, feed, images, asked)
    assert found["openloop/image"].ndim == 4  # a video
    assert "openloop/image/model_at_1" in found
    assert "openloop/image/model_at_5" not in found
    feed.close()


def test_the_interval_of_a_rate_is_wilsons():
    low, high = interval(9, 10)
    assert (low, high) == pytest.approx((0.5958, 0.9821), abs=1e-3)
    assert interval(0, 5)[0] == 0
    assert interval(5, 5)[1] == 1


def test_success_counts_whenever_it_came():
    class Env(Reach):
        def _obs(self, first=False):
            obs = super()._obs(first)
            obs["log/success"] = np.float32(self._steps == 1)
            return obs

    from reverie.envs.vector.vec_env import make_vec_env
    from reverie.run.factory import make_agent

    config = Config(agent="random")
    pool = make_vec_env(lambda i: Env(ReachConfig(length=4), i), 2, config.env.vector)
    agent = make_agent(config, pool, CPU, "float32")
    assert [p.success for p in play_episodes(agent, pool, 3)] == [1.0] * 3
    pool.close()


def test_the_material_is_kept_with_the_run(world):
    images = images_of(checkpoint.find_checkpoint(world))
    assert images.config.crop == (14, 14)
    assert sorted(images.input_space) == ["image", "proprio"]


def test_weights_may_come_from_another_run(data, world, tmp_path):
    flags = {"offline.images.crop": (14, 14), "run.from_checkpoint": str(world)}
    config = settings(data, tmp_path / "run", **flags)
    with Watch(config, Recordings(config.offline, config.seed)) as run:
        run.start()
        mine = run.agent.world.enc.state_dict()
    theirs = agent_state(world)["enc"]
    assert all(torch.equal(value, mine[key]) for key, value in theirs.items())
