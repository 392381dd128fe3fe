"""Plan2Explore of dreamerv3-torch: options, weights and optimizers."""

from __future__ import annotations

import pytest
import torch
from dreamerv3_torch_networks import make_options, make_state, with_copies
from dreamerv3_torch_reference import make_optimizers

from reverie.agents.dreamer.agent import Dreamer
from reverie.agents.options import BuildOptions
from reverie.api import UserError
from reverie.convert.dreamerv3_torch.checkpoint import read_weights
from reverie.convert.dreamerv3_torch.config import convert_options
from reverie.convert.dreamerv3_torch.weights import import_state
from reverie.envs.suites.catch import Catch
from reverie.run.config import resolve
from reverie.run.used_settings import check_exploration

LRS = (1e-4, 3e-5, 3e-5)
MODELS, UNITS, DETER, STOCH, ACTIONS = 3, 5, 16, 12, 3
FEAT = DETER + STOCH
BEHAVIOR = "_expl_behavior._behavior."


def explorer(inputs=FEAT, outputs=STOCH, seed=2):
    """Random tensors of an ensemble with one hidden layer, by their original names."""
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "layers.NoName_linear0.weight": (UNITS, inputs),
        "layers.NoName_norm0.weight": (UNITS,),
        "layers.NoName_norm0.bias": (UNITS,),
        "mean_layer.weight": (outputs, UNITS),
        "mean_layer.bias": (outputs,),
    }
    return {
        f"_expl_behavior._networks.{k}.{name}": torch.randn(shape, generator=g)
        for k in range(MODELS)
        for name, shape in shapes.items()
    }


def task_state(seed=0):
    return make_state(make_options(), {"image": (12, 12, 3)}, ACTIONS, seed)


def whole_state(**sizes):
    """The state of an agent with Plan2Explore, without copies."""
    task, other = task_state(), task_state(seed=1)
    behavior = {
        name.replace("_task_behavior.", BEHAVIOR): value
        for name, value in other.items()
        if name.startswith("_task_behavior.")
    }
    behavior[f"{BEHAVIOR}ema_vals"] = torch.tensor([-2.0, 3.0])
    return task | explorer(**sizes) | behavior


def write(path, state, compiled=False):
    """Write a checkpoint with all copies, as the original does."""
    task = {k: v for k, v in state.items() if not k.startswith("_expl_behavior.")}
    names = {
        k: v
        for k, v in with_copies(task, compiled).items()
        if not k.startswith("_expl_behavior.")
    }
    middle = "._orig_mod." if compiled else "."
    for name, value in task.items():
        if name.startswith("_wm."):
            copy = f"{BEHAVIOR}_world_model{middle}{name.removeprefix('_wm.')}"
            names[copy] = value
    own = {k: v for k, v in state.items() if k.startswith("_expl_behavior.")}
    names |= own
    prefix = f"{BEHAVIOR}actor."
    names |= {
        "_expl_behavior.actor." + k.removeprefix(prefix): v
        for k, v in own.items()
        if k.startswith(prefix)
    }
    optimizers = make_optimizers(task, LRS, compiled=compiled)
    generator = torch.Generator().manual_seed(5)
    for path_, part in (
        ("_expl_behavior._expl_opt._opt", "_expl_behavior._networks."),
        ("_expl_behavior._behavior._actor_opt._opt", f"{BEHAVIOR}actor."),
        ("_expl_behavior._behavior._value_opt._opt", f"{BEHAVIOR}value."),
    ):
        tensors = [v for k, v in own.items() if k.startswith(part)]
        entries = {
            i: {
                "step": torch.tensor(7.0),
                "exp_avg": torch.randn(x.shape, generator=generator),
                "exp_avg_sq": torch.rand(x.shape, generator=generator),
            }
            for i, x in enumerate(tensors)
        }
        optimizers[path_] = {"state": entries, "param_groups": []}
    torch.save({"agent_state_dict": names, "optims_state_dict": optimizers}, path)
    return path, optimizers


def config_of(path, **flags):
    flags = {"run.from_checkpoint": str(path), "task": "catch", **flags}
    return resolve(flags={"dreamer.dreamerv3_torch.stoch": 4, **flags})


def make_agent(config):
    env = Catch()
    options = BuildOptions(torch.device("cpu"), explore=config.explore)
    return Dreamer(env.obs_space, env.act_space, config.dreamer, options)


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_and_optimizers_are_imported(tmp_path, compiled):
    original = whole_state()
    path, optimizers = write(tmp_path / "latest.pt", original, compiled)
    assert read_weights(path).keys() == original.keys()
    config = config_of(path)
    check_exploration(config)
    explore = config.explore
    assert (explore.policy, explore.target) == ("plan2explore", "stoch")
    sizes = explore.ensemble
    assert (sizes.models, sizes.layers, sizes.units) == (MODELS, 1, UNITS)
    assert (sizes.output, explore.action_conditioned) == ("tanh", False)

    agent = make_agent(config)
    agent.load_state_dict(import_state(path, agent.state_dict()))
    states = torch.randn(2, 4, FEAT, generator=torch.manual_seed(0))
    predictions = agent.explorer.predict(states)
    for k in range(MODELS):
        part = f"_expl_behavior._networks.{k}."
        x = states @ original[f"{part}layers.NoName_linear0.weight"].T
        norm = (original[f"{part}layers.NoName_norm0.{x}"] for x in ("weight", "bias"))
        x = torch.nn.functional.layer_norm(x, (UNITS,), *norm, eps=1e-3)
        x = torch.nn.functional.silu(x)
        x = x @ original[f"{part}mean_layer.weight"].T
        x = torch.tanh(x + original[f"{part}mean_layer.bias"])
        torch.testing.assert_close(predictions[k], x)
    actor_critic = agent.explorer.actor_critic
    for module, name in ((actor_critic.pol, "actor"), (actor_critic.val, "value")):
        expected = original[f"{BEHAVIOR}{name}.mean_layer.bias"]
        assert torch.equal(module.head.state_dict()[_bias(module)], expected)
    norm = actor_critic.retnorm
    assert (float(norm.lo), float(norm.hi)) == (-2.0, 3.0)
    assert not torch.equal(
        agent.actor_critic.pol.state_dict()["mlp.layers.0.weight"],
        actor_critic.pol.state_dict()["mlp.layers.0.weight"],
    )

    opt = agent.explorer_update.opt["ensemble"].state_dict()
    assert float(opt["step"]) == 7
    saved = optimizers["_expl_behavior._expl_opt._opt"]["state"]
    biases = torch.stack([saved[5 * k + 4]["exp_avg"] for k in range(MODELS)])
    assert torch.equal(opt["mu"]["ensemble.out.bias"], biases)
    scales = torch.stack([saved[5 * k + 1]["exp_avg_sq"] for k in range(MODELS)])
    assert torch.equal(opt["nu"]["ensemble.hidden.0.scale"], scales)
    assert float(agent.explorer_update.opt["critic"].step) == 7
    assert float(agent.opt["critic"].step) == 5


def _bias(module):
    return next(k for k in module.head.state_dict() if k.endswith("bias"))


@pytest.mark.parametrize(
    ("sizes", "target", "conditioned"),
    [
        ({"outputs": DETER}, "deter", False),
        ({"outputs": FEAT}, "feat", False),
        ({"inputs": FEAT + ACTIONS}, "stoch", True),
    ],
)
def test_target_and_inputs_are_inferred(tmp_path, sizes, target, conditioned):
    path, _ = write(tmp_path / "latest.pt", whole_state(**sizes))
    explore = config_of(path).explore
    assert (explore.target, explore.action_conditioned) == (target, conditioned)


def test_an_ensemble_of_another_world_model_is_refused(tmp_path):
    path, _ = write(tmp_path / "latest.pt", whole_state(outputs=7))
    with pytest.raises(UserError, match="predicts 7 entries"):
        config_of(path)


def test_exploration_starts_with_new_weights_if_the_file_has_none(tmp_path):
    state = task_state()
    path = tmp_path / "latest.pt"
    content = {"agent_state_dict": with_copies(state)}
    torch.save(content | {"optims_state_dict": make_optimizers(state, LRS)}, path)
    assert config_of(path).explore.policy == "none"
    agent = make_agent(config_of(path, **{"explore.policy": "plan2explore"}))
    initial = agent.explorer.ensemble.out.weight.clone()
    agent.load_state_dict(import_state(path, agent.state_dict()))
    assert torch.equal(agent.explorer.ensemble.out.weight, initial)


def test_a_base_run_does_not_explore(tmp_path):
    path, _ = write(tmp_path / "latest.pt", whole_state())
    config = config_of(path, **{"dreamer.behaviour": False})
    assert config.explore.policy == "none"


def test_options_become_settings():
    options = {
        "expl_behavior": "Plan2Explore",
        "expl_until": 1000,
        "action_repeat": 2,
        "expl_extr_scale": 0.5,
        "expl_intr_scale": 2.0,
        "disag_target": "deter",
        "disag_log": False,
        "disag_models": 7,
        "disag_offset": 2,
        "disag_layers": 3,
        "disag_units": 40,
        "disag_action_cond": True,
        "act": "ELU",
    }
    converted = convert_options(options)
    assert converted.unknown == []
    explore = {k: v for k, v in converted.settings.items() if k.startswith("explore")}
    assert explore == {
        "explore.policy": "plan2explore",
        "explore.until": 500,
        "explore.extrinsic": 0.5,
        "explore.intrinsic": 2.0,
        "explore.target": "deter",
        "explore.log": False,
        "explore.ensemble.models": 7,
        "explore.offset": 2,
        "explore.ensemble.layers": 3,
        "explore.ensemble.units": 40,
        "explore.action_conditioned": True,
        "explore.ensemble.act": "elu",
    }


def test_the_default_of_the_original_leaves_the_policy_to_presets():
    assert "explore.policy" not in convert_options({"expl_behavior": "greedy"}).settings
    with pytest.raises(UserError, match="expl_behavior"):
        convert_options({"expl_behavior": "curious"})
