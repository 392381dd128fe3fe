"""Offline runs on recorded episodes: world models and behavior cloning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from offline_helpers import (
    SIDE,
    TINY,
    agent_state,
    metric,
    settings,
    write_catch,
    write_reach,
)

import reverie
from reverie.api import UserError
from reverie.cli import main as cli
from reverie.cli.train import command_config
from reverie.datasets.action_units import check_same_actions
from reverie.datasets.episodes import open_episodes
from reverie.datasets.statistics import compute_statistics, save_statistics
from reverie.evaluation.episodes import evaluate
from reverie.evaluation.recordings import describe, eval_recordings
from reverie.run import checkpoint
from reverie.run.config import Config, resolve
from reverie.run.folder import read_config
from reverie.run.offline.datasets import (
    OfflineConfig,
    OfflineEpisodes,
    saved_image_crop,
)
from reverie.run.offline.run import OfflineRun
from reverie.run.offline.setup import epochs_to_updates, is_same_data, with_base_run
from reverie.run.offline.train import offline
from reverie.spaces import Space


def test_a_world_model_is_trained_and_evaluated_without_an_environment(world):
    for key in ("image", "proprio", "rew", "con", "dyn", "rep"):
        assert np.isfinite(metric(world, f"report/loss/{key}")).all()
    for name in ("model", "copy", "mean"):
        assert metric(world, f"report/openloop/image/{name}_at_1")
        assert metric(world, f"report/openloop/proprio/{name}")
    for name in ("rmse", "spread", "coverage", "copy_rmse"):
        assert np.isfinite(metric(world, f"report/ensemble/proprio/{name}")).all()
    assert min(metric(world, "report/ensemble/proprio/spread")) > 0
    assert not metric(world, "train/loss/policy")
    (best,) = (world / "best").iterdir()
    saved = checkpoint.read_part(best, "loop")["best_loss"]
    assert saved == pytest.approx(min(metric(world, "report/loss")), rel=1e-5)


def test_the_actor_can_be_trained_too(data, tmp_path):
    flags = {"dreamer.behaviour": "True", "run.steps": 2}
    path = offline(settings(data, tmp_path / "run", **flags))
    assert metric(path, "train/loss/policy")


def test_a_resumed_run_equals_an_uninterrupted_one(data, world, tmp_path):
    flags = {"offline.images.crop": (14, 14)}
    offline(settings(data, tmp_path / "run", **flags, **{"run.steps": 2}))
    path = offline(settings(data, tmp_path / "run", **flags))
    resumed, uninterrupted = agent_state(path), agent_state(world)
    for key, value in uninterrupted["enc"].items():
        assert torch.equal(resumed["enc"][key], value), key


def test_a_clone_uses_settings_and_weights_of_its_base_run(world, clone):
    config = read_config(clone)
    assert config.bc.run_agent == "dreamer"
    assert config.dreamer == read_config(world).dreamer
    assert config.offline.images.crop == (14, 14)
    encoder = agent_state(world)["enc"]
    state = agent_state(clone)
    for key, value in encoder.items():
        assert torch.equal(state["feature_extractor"][f"encoder.{key}"], value)
    assert state["keys"] == ["image", "proprio"]


def test_a_loaded_clone_takes_uncropped_images(clone):
    agent = reverie.load(clone)
    image = np.zeros((SIDE, SIDE, 3), np.uint8)
    action = agent.act({"image": image, "proprio": np.zeros(2, np.float32)})
    assert action.shape == (2,)


def test_a_crop_that_differs_from_the_base_run_is_refused(data, world, tmp_path):
    flags = {"bc.run": str(world), "offline.images.crop": (12, 12)}
    with pytest.raises(UserError, match="was trained on images with the crop"):
        with_base_run(settings(data, tmp_path / "run", "bc", **flags))


def test_keys_in_another_order_than_the_base_run_are_refused(data, world, tmp_path):
    flags = {"bc.run": str(world), "bc.keys": ("proprio", "image")}
    with pytest.raises(UserError, match="it needs the order image, proprio"):
        offline(settings(data, tmp_path / "run", "bc", **flags))


def test_recordings_with_other_actions_are_refused(data, world, tmp_path):
    folder = tmp_path / "arm"
    write_reach(folder, 3, lambda e: {**e, "action": np.repeat(e["action"], 3, -1)})
    message = r"action \(2,\), those of .* are action \(6,\)"
    with pytest.raises(UserError, match=message):
        offline(settings(folder, tmp_path / "run", "bc", **{"bc.run": str(world)}))
    with pytest.raises(UserError, match=message):
        offline(settings(data, tmp_path / "run", **{"offline.eval_data": str(folder)}))


def test_initial_weights_for_other_keys_are_refused(data, world, tmp_path):
    flags = {"offline.keys": "proprio", "run.from_checkpoint": str(world)}
    with pytest.raises(UserError, match=r"image: trained on \(.*\), missing in"):
        offline(settings(data, tmp_path / "run", **flags))


def test_an_agent_that_cannot_train_on_recordings_is_refused(data, tmp_path):
    with pytest.raises(UserError, match="cannot be trained on recorded episodes"):
        offline(settings(data, tmp_path / "run", agent="random"))


def test_a_clone_cannot_be_a_base_run(data, world, clone, tmp_path):
    with pytest.raises(UserError, match=f"no world model.*\n.*--bc.run {world}"):
        offline(settings(data, tmp_path / "run", "bc", **{"bc.run": str(clone)}))


def test_recordings_without_a_key_of_the_base_run_are_refused(world, tmp_path):
    folder = tmp_path / "vectors"
    write_reach(folder, 3, lambda e: {k: v for k, v in e.items() if k != "image"})
    with pytest.raises(UserError, match="has no image"):
        offline(settings(folder, tmp_path / "run", "bc", **{"bc.run": str(world)}))


def test_vectors_without_images_can_be_used(data, tmp_path):
    flags = {"offline.keys": ("proprio",), "run.steps": 2}
    path = offline(settings(data, tmp_path / "run", **flags))
    assert metric(path, "report/openloop/proprio/model")
    assert not metric(path, "report/openloop/image/model")


def test_keys_that_are_not_reconstructed_are_not_evaluated(data, tmp_path):
    flags = {"dreamer.dec.mlp_keys": "none", "run.steps": 1}
    path = offline(settings(data, tmp_path / "run", **flags))
    assert metric(path, "report/openloop/image/model")
    assert not metric(path, "report/openloop/proprio/model")


def test_behavior_cloning_is_refused_in_an_environment(tmp_path, capsys):
    logdir = ["--logdir", str(tmp_path / "run"), "--device", "cpu"]
    flags = ["--agent", "bc", "--run.envs", "1", "--bc.enc.mults", "1", "1"]
    assert cli.main(["train", "--task", "catch", *flags, *logdir]) == 2
    assert "reverie bc --offline.data PATH" in capsys.readouterr().err


def test_a_run_without_improvement_stops_early(data, tmp_path):
    flags = {"run.steps": 50, "run.report_every": 1, "offline.patience": 2}
    path = offline(
        settings(data, tmp_path / "run", "bc", **flags, **{"bc.opt.lr": 0.0})
    )
    assert metric(path, "train/opt/updates")[-1] == 3


def test_missing_data_is_an_error(tmp_path, capsys):
    assert cli.main(["offline", "--logdir", str(tmp_path / "run")]) == 2
    assert "--offline.data PATH" in capsys.readouterr().err
    missing = ["--offline.data", str(tmp_path / "none")]
    assert cli.main(["bc", *missing, "--logdir", str(tmp_path / "run")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_run_is_resumed_by_the_command_that_started_it(world, tmp_path, capsys):
    assert cli.main(["train", "--logdir", str(world)]) == 2
    assert f"Fix: reverie offline --logdir {world}" in capsys.readouterr().err
    assert cli.main(["offline", "--logdir", str(world)]) == 0
    online = ["--configs", "debug", "random", "--task", "catch", "--run.steps", "8"]
    assert cli.main(["train", *online, "--logdir", str(tmp_path / "online")]) == 0
    assert cli.main(["offline", "--logdir", str(tmp_path / "online")]) == 2
    assert "Fix: reverie train --logdir" in capsys.readouterr().err


def test_episodes_are_split_at_random_or_by_eval_data_or_not_at_all(data):
    same = OfflineEpisodes(OfflineConfig(str(data), split=0.0), 0)
    assert same.training.names() == same.held_out.names()
    half = OfflineEpisodes(OfflineConfig(str(data), split=0.5), 0)
    assert not set(half.training.names()) & set(half.held_out.names())
    assert len(half.held_out.names()) == 6
    separate = OfflineEpisodes(OfflineConfig(str(data), eval_data=str(data)), 0)
    assert len(separate.held_out.names()) == len(separate.training.names()) == 12
    separate.close()


def test_epochs_of_collection_are_replaced_by_updates(tmp_path):
    words = ["--configs", "iris_crafter", "--offline.data", "somewhere"]
    for command in ("offline", "bc"):
        run = command_config(command, [*words, "--run.save_every", "7"]).run
        assert (run.clock, run.log_every, run.save_every) == ("steps", 1000, 7)
    write_catch(tmp_path / "data")
    flags = {"logdir": str(tmp_path / "run"), "offline.data": str(tmp_path / "data")}
    with pytest.raises(UserError, match=r"offline training has no epochs(.|\n)*Fix"):
        offline(resolve(["offline", "iris_tiny"], flags=flags))


def test_values_of_discrete_actions_that_were_not_trained_are_refused():
    few, many = ({"action": Space(np.int32, (), 0, count)} for count in (3, 5))
    check_same_actions("world", many, "data", few)
    with pytest.raises(UserError, match=r"from 0 to 2, those of data .* 0 to 4"):
        check_same_actions("world", few, "data", many)
    check_same_actions("world", few, "task", many, check_range=False)


def test_the_same_data_is_recognized_by_any_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_same_data("data", "./data")
    assert is_same_data("data", str(tmp_path / "data"))
    assert not is_same_data("data", "other")
    assert not is_same_data("minari:data", "data")


def test_iris_trains_on_recordings_and_can_be_a_base_run(tmp_path):
    write_catch(tmp_path / "data")
    flags = {
        **TINY,
        "logdir": str(tmp_path / "run"),
        "offline.data": str(tmp_path / "data"),
        "offline.split": 0.5,
        "offline.eval.context": 1,
        "run.steps": 2,
        "iris.training.world_model.batch": 4,
        "iris.training.tokenizer.batch": 4,
    }
    path = offline(resolve(["iris_tiny", "offline"], flags=flags))
    assert metric(path, "train/loss/tokenizer/l1")
    assert metric(path, "train/loss/world_model/latents")
    keys = (path / "metrics.jsonl").read_text().split('"')
    assert not [key for key in keys if "actor" in key]
    assert metric(path, "report/openloop/image/model")
    result = eval_recordings(path)
    assert "3 held-out episodes" in describe(result)
    assert {"tokenizer/l2", "world_model/rewards"} <= result.summary["loss"].keys()
    flags |= {"bc.run": str(path), "logdir": str(tmp_path / "clone")}
    clone = offline(resolve(["iris_tiny", "offline", "bc"], flags=flags))
    state = agent_state(clone)
    assert state["keys"] == ["image"]
    for key, value in agent_state(path)["world_model"].items():
        assert torch.equal(value, state["feature_extractor"][f"encoder.dynamics.{key}"])


def test_the_encoder_of_a_dreamerv3_torch_file_can_be_used(data, tmp_path):
    state = write_torch_file(tmp_path / "latest.pt")
    flags = {"bc.run": str(tmp_path / "latest.pt"), "run.steps": 2}
    flags["bc.dreamerv3_torch.images"] = "shift"
    path = offline(settings(data, tmp_path / "run", "bc", **flags))
    encoder = agent_state(path)["feature_extractor"]
    first = state["_wm._orig_mod.encoder._cnn.layers.0.weight"]
    assert torch.equal(encoder["encoder.convs.0.weight"], first)
    size = ("env.reach.size", (SIDE, SIDE))
    assert "success" in evaluate(path, 1, [("task", "reach"), size]).summary


def test_epochs_are_converted_to_updates(data):
    flags = {**TINY, "offline.epochs": 3, "offline.report_epochs": 2}
    flags |= {"bc.batch_size": 10, "offline.data": str(data)}
    config = resolve(["offline", "bc"], flags=flags)
    assert epochs_to_updates(config, 45).run.steps == 4  # limited by `run.steps`
    free = resolve(["offline", "bc"], flags={**flags, "run.steps": 1e9})
    assert epochs_to_updates(free, 45).run.steps == 3 * 4
    # limited by `run.report_every`
    assert epochs_to_updates(free, 45).run.report_every == 2
    rare = resolve(["offline", "bc"], flags={**flags, "run.report_every": 1e9})
    assert epochs_to_updates(rare, 45).run.report_every == 2 * 4
    assert epochs_to_updates(rare, 5).run.steps == 3
    world = resolve(["offline"], flags=flags)
    with pytest.raises(UserError, match="not counted in epochs"):
        epochs_to_updates(world, 45)
    steps = OfflineEpisodes(OfflineConfig(str(data), split=0.0), 0).env_steps
    lengths = [open_episodes(data).rows(name) for name in open_episodes(data).names()]
    assert steps == sum(lengths) - 12


def test_a_run_in_epochs_is_extended_with_more_epochs(data, tmp_path, capsys):
    def train(**more):
        flags = {"run.steps": 1000, "offline.epochs": 1, "bc.batch_size": 30, **more}
        offline(settings(data, tmp_path / "run", "bc", **flags))
        printed = capsys.readouterr().err
        step = checkpoint.Checkpoints(tmp_path / "run" / "ckpt").step
        assert read_config(tmp_path / "run").run.steps == flags["run.steps"]
        return step, printed

    step, printed = train()
    assert f"{step} updates (offline.epochs 1)" in printed
    assert train()[0] == step
    assert train(**{"offline.epochs": 2})[0] == 2 * step
    steps, printed = train(**{"offline.epochs": 4, "run.steps": 2 * step + 1})
    assert steps == 2 * step + 1
    assert f"{steps} updates, " in printed


@pytest.mark.parametrize(
    ("name", "lr", "split", "epochs"),
    [
        ("bc", 1e-4, 0.1, 20),
        ("bc_can_PH", 5e-4, 0.1, 1000),
        ("bc_lift_PH", 3e-4, 0.2, 1000),
    ],
)
def test_presets_have_the_published_settings(name, lr, split, epochs):
    config = resolve(["offline", "bc", name])
    assert (config.agent, config.bc.batch_size) == ("bc", 256)
    assert (config.bc.opt.lr, config.bc.opt.wd, config.bc.opt.clip) == (lr, 0, 100)
    assert (config.offline.split, config.offline.epochs) == (split, epochs)
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


def test_presets_of_lift_have_the_observations_of_its_demonstrations():
    env = resolve(["lift"]).env.robosuite
    assert env.cameras == ("agentview", "robot0_eye_in_hand")
    assert (env.object, env.horizon, env.end_on_success) == (False, 100, True)
    world = resolve(["offline", "offline_lift"])
    clone = resolve(["offline", "bc", "bc_lift"])
    for config in (world, clone):
        assert (config.task, config.env.robosuite) == ("robosuite_Lift", env)
    assert (world.agent, clone.agent) == ("dreamer", "bc")
    assert world.offline.images.crop == (78, 78)
    assert clone.bc.head.kind == "mixture"  # a cube can be turned either way


def test_offline_runs_have_no_settings_of_a_suite():
    defaults, config = Config(), resolve(["offline", "size200m"])
    assert config.task == "recordings"
    assert config.dreamer.rssm == defaults.dreamer.rssm
    assert config.dreamer.enc == defaults.dreamer.enc
    assert config.dreamer.opt == defaults.dreamer.opt
    assert resolve(["offline", "bc", "size200m"]).bc.enc == defaults.bc.enc


def test_the_image_crop_is_saved_with_the_run(world):
    images = saved_image_crop(checkpoint.find_checkpoint(world))
    assert images.config.crop == (14, 14)
    assert sorted(images.input_space) == ["image", "proprio"]


def test_initial_weights_of_another_run(data, world, tmp_path):
    flags = {"offline.images.crop": (14, 14), "run.from_checkpoint": str(world)}
    config = settings(data, tmp_path / "run", **flags)
    with OfflineRun(config, OfflineEpisodes(config.offline, config.seed)) as run:
        run.start()
        encoder = run.agent.world.enc.state_dict()
    for key, value in agent_state(world)["enc"].items():
        assert torch.equal(value, encoder[key])


def write_torch_file(path):
    """Write an encoder of dreamerv3-torch for the image and vector of `reach`."""
    cnn, mlp = "_wm._orig_mod.encoder._cnn.layers", "_wm._orig_mod.encoder._mlp.layers"
    state = {
        f"{cnn}.0.weight": torch.rand(4, 3, 4, 4),
        f"{cnn}.1.norm.weight": torch.rand(4),
        f"{cnn}.1.norm.bias": torch.rand(4),
        f"{mlp}.Encoder_linear0.weight": torch.rand(6, 2),
        f"{mlp}.Encoder_norm0.weight": torch.rand(6),
        f"{mlp}.Encoder_norm0.bias": torch.rand(6),
    }
    torch.save({"agent_state_dict": state}, path)
    return state


def test_the_images_of_a_dreamerv3_torch_file_can_be_standardized(data, tmp_path):
    write_torch_file(tmp_path / "latest.pt")
    flags = {"bc.run": str(tmp_path / "latest.pt"), "run.steps": 2}
    with pytest.raises(UserError, match=r"--bc.dreamerv3_torch.images shift"):
        offline(settings(data, tmp_path / "unknown", "bc", **flags))
    assert not (tmp_path / "unknown").exists()
    flags |= {"bc.dreamerv3_torch.images": "standardize", "offline.split": 0.0}
    found = []
    write_reach(tmp_path / "other", 4, lambda e: {**e, "image": e["image"] // 2})
    for path in (data, tmp_path / "other"):
        stats = compute_statistics(open_episodes(path))
        save_statistics(tmp_path / f"{path.name}.npz", stats)
        found.append(stats["image"])
    runs = {
        "same": {},
        "other": {"offline.stats": str(tmp_path / "other.npz")},
    }
    for (name, more), moments in zip(runs.items(), found, strict=True):
        run = offline(settings(data, tmp_path / name, "bc", **flags, **more))
        encoder = agent_state(run)["feature_extractor"]
        np.testing.assert_allclose(
            encoder["encoder.standardizers.image.mean"],
            moments.mean,
            rtol=1e-5,
            atol=1e-6,
        )
        np.testing.assert_allclose(
            encoder["encoder.standardizers.image.std"],
            moments.std,
            rtol=1e-5,
            atol=1e-6,
        )
    size = ("env.reach.size", (SIDE, SIDE))
    assert "success" in evaluate(run, 1, [("task", "reach"), size]).summary


@pytest.mark.extended
def test_statistics_in_a_file_are_cropped(data, tmp_path):
    save_statistics(tmp_path / "stats.npz", compute_statistics(open_episodes(data)))
    flags = {"offline.stats": str(tmp_path / "stats.npz"), "offline.split": 0.0}
    flags |= {"offline.images.crop": (14, 14)}
    run = offline(settings(data, tmp_path / "file", "standardize", **flags))
    flags["offline.stats"] = ""
    same = offline(settings(data, tmp_path / "data", "standardize", **flags))
    states = [agent_state(path)["enc"] for path in (run, same)]
    keys = [key for key in states[0] if key.endswith((".mean", ".std"))]
    assert len(keys) == 2
    for key in keys:
        torch.testing.assert_close(states[0][key], states[1][key])
    arrays = {"image:mean": np.zeros(3)}
    np.savez(tmp_path / "stats.npz", **arrays)
    flags["offline.stats"] = str(tmp_path / "stats.npz")
    with pytest.raises(UserError, match="has no statistics"):
        offline(settings(data, tmp_path / "wrong", "standardize", **flags))


def test_a_world_model_without_a_policy_is_not_evaluated_in_a_task(world):
    with pytest.raises(UserError, match=r"has no trained policy(.|\n)*behaviour True"):
        evaluate(world, 1, [("task", "reach"), ("env.reach.size", (SIDE, SIDE))])
    with pytest.raises(UserError, match="has no trained policy"):
        reverie.load(world)
