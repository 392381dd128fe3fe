"""Δ-IRIS: errors for invalid settings and spaces."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import yaml
from iris_helpers import (
    FLAGS,
    make_agent,
    make_env,
    observations,
    settings,
)

from reverie.agents.iris.agent import Iris
from reverie.agents.options import BuildOptions
from reverie.api import UserError
from reverie.run.config import resolve
from reverie.spaces import Space
from reverie.worlds.iris.world import IrisWorld

WITHOUT_FLAG = {
    "training.tokenizer.opt.lr",
    "training.tokenizer.opt.eps",
    "tokenizer.action_planes",
}
"""Settings of networks and optimizers, whose errors do not name a flag."""


def test_continuous_actions_are_an_error():
    act = {"action": Space(np.dtype(np.float32), (2,), -1, 1)}
    with pytest.raises(UserError, match=r"(?s)continuous.*Fix:"):
        make_agent(act_space=act)


def test_several_actions_are_an_error():
    choice = Space(np.dtype(np.int32), (), 0, 3)
    with pytest.raises(UserError, match="single discrete action"):
        make_agent(act_space={"action": choice, "switch": choice})
    with pytest.raises(UserError, match=r"is discrete with shape \(2,\)"):
        make_agent(act_space={"action": Space(np.dtype(np.int32), (2,), 0, 3)})


def test_selecting_the_image():
    image = make_env().obs_space["image"]
    vector = {"vector": Space(np.dtype(np.float32), (3,)), **FLAGS}
    with pytest.raises(UserError, match="environment has none"):
        make_agent(obs_space=vector)
    two = {"left": image, "right": image, **FLAGS}
    with pytest.raises(UserError, match="left, right"):
        make_agent(obs_space=two)
    assert (
        make_agent(settings(**{"iris.image": "right"}), obs_space=two).image_key
        == "right"
    )
    up = settings(**{"iris.image": "up"})
    with pytest.raises(UserError, match=r"(?s)'up'.*Fix: --iris.image left or right"):
        make_agent(up, obs_space=two)
    with pytest.raises(UserError, match=r"(?s)'up'.*Fix: choose an environment"):
        make_agent(up, obs_space=vector)
    assert make_agent(obs_space={**two, "image": image}).image_key == "image"


def test_errors_for_image_sizes_suggest_sizes_that_work():
    crafter, tiny = resolve(["iris_crafter"]).iris, settings()
    for config, side, message in (
        (crafter, 60, "--env.resize 64 64 .*, or .* multiples of 16"),
        (crafter, 72, "multiples of 16"),  # 9 x 9 cannot be divided into 4 tokens
        (crafter, 80, "--offline.read.size 64 64.*, or set world_model.* 6"),
        (tiny, 6, "--env.resize 4 4 .*, or"),
    ):
        image = Space(np.dtype(np.uint8), (side, side, 3))
        with pytest.raises(UserError, match=rf"(?s)Images of.*Fix: .*{message}"):
            make_agent(config, obs_space={"image": image, **FLAGS})


@pytest.mark.parametrize("shape", [(80, 80), (48, 48), (64, 96)])
def test_suggested_settings_for_an_image_size_work(shape):
    image = Space(np.dtype(np.uint8), (*shape, 1))
    spaces = {"image": image, **FLAGS}
    with pytest.raises(UserError) as error:
        make_agent(resolve(["iris_crafter"]).iris, obs_space=spaces)
    suggested = re.findall(r"(world_model[\w.]+) to (\d+)", str(error.value))
    assert len(suggested) == 2
    flags = [(f"iris.{name}", value) for name, value in suggested]
    config = resolve(["iris_crafter"], flags=flags)
    with torch.device("meta"):
        IrisWorld(
            image,
            3,
            tokenizer=config.iris.tokenizer,
            dynamics=config.iris.world_model,
        )


def test_errors_for_large_images_suggest_a_preset_that_works():
    image = {"image": Space(np.dtype(np.uint8), (84, 84, 3)), **FLAGS}
    with pytest.raises(UserError, match="--configs iris_small") as caught:
        make_agent(obs_space=image)
    assert "resize 4 4" not in str(caught.value)  # which is too small
    config = resolve(["iris_small"])
    height, width = config.env.resize
    image["image"] = Space(np.dtype(np.uint8), (height, width, 3))
    agent = make_agent(config.iris, obs_space=image)
    obs = observations(np.zeros((2, height, width, 3), np.uint8), first=True)
    _, action, _ = agent.policy(agent.initial(2), obs)
    assert action["action"].shape == (2,)


def test_the_documented_settings_for_larger_images_work():
    flags = {"iris.world_model.frame.latent": 4}
    flags["iris.world_model.transformer.width"] = 576
    config = resolve(["iris_crafter"], flags=flags).iris
    image = Space(np.dtype(np.uint8), (96, 96, 3))
    agent = make_agent(config, obs_space={"image": image, **FLAGS})
    assert agent.world.dynamics.frame_norm is not None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("actor_critic.horizon", 20, "context of the transformer, 5"),
        ("training.world_model.length", 11, "context of the transformer, 5"),
        ("training.tokenizer.length", 1, "at least 2"),
        ("training.world_model.length", 1, "at least 2"),
        ("acting.temperature", 0.0, "above zero"),
        ("acting.eval_temperature", 0.0, "above zero"),
        ("acting.epsilon", 1.5, "probability"),
        ("acting.eval_epsilon", 2.0, "probability"),
        ("training.tokenizer.accumulate", 0, "at least 1"),
        ("training.world_model.accumulate", 0, "at least 1"),
        ("training.actor_critic.batch", 0, "at least 1"),
        ("actor_critic.width", 0, "at least 1"),
        ("actor_critic.burn_in", -1, "at least 0"),
        ("actor_critic.horizon", 0, "at least 1"),
        ("schedule.steps", 0, "at least 1"),
        ("schedule.first_steps", -1, "at least 0"),
        ("training.tokenizer.first_steps", -1, "at least 0"),
        ("training.world_model.start_after", -1, "at least 0"),
        ("training.actor_critic.steps", -1, "at least 0"),
        ("training.tokenizer.alpha", -1.0, "at least 0"),
        ("training.actor_critic.alpha", float("nan"), "at least 0"),
        ("training.actor_critic.alpha", float("inf"), "must be finite"),
        ("training.tokenizer.opt.lr", float("nan"), "negative"),
        ("training.tokenizer.opt.eps", 0.0, "positive"),
        ("acting.temperature", float("nan"), "above zero"),
        ("tokenizer.action_planes", -1, "negative"),
        ("actor_critic.discount", 1.5, "from 0 to 1"),
        ("actor_critic.lam", float("nan"), "from 0 to 1"),
        ("actor_critic.target_rate", -0.1, "from 0 to 1"),
    ],
)
def test_errors_for_invalid_settings_suggest_valid_ones(name, value, message):
    flags = {f"iris.{name}": value}
    with pytest.raises(UserError, match=message) as caught:
        settings(**flags)
    fix = str(caught.value).partition("Fix: ")[2]
    suggested = dict(re.findall(r"--(iris\.[\w.]+) ([-\w.]+)", fix))
    if name in WITHOUT_FLAG:
        assert not suggested
        return
    assert suggested
    fixed = {key: yaml.safe_load(text) for key, text in suggested.items()}
    settings(**{**flags, **fixed})


def test_float16_is_an_error():
    env = make_env()
    with pytest.raises(UserError, match="float16"):
        Iris(
            env.obs_space,
            env.act_space,
            settings(),
            BuildOptions(torch.device("cpu"), precision="float16"),
        )
