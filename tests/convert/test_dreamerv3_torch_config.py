"""Options of dreamerv3-torch as settings: hand-written values for each conversion."""

from __future__ import annotations

import pytest

from reverie.api import UserError
from reverie.convert.dreamerv3_torch.config import (
    PRESET,
    convert_options,
    is_config,
    merge_presets,
)
from reverie.run.config import resolve

OPTIONS = {
    "task": "dmc_walker_walk",
    "logdir": None,
    "steps": "4e4",
    "action_repeat": 2,
    "size": [64, 64],
    "seed": 3,
    "precision": 16,
    "dyn_deter": 24,
    "dyn_rec_depth": 1,
    "grad_heads": ["decoder", "reward", "cont"],
    "units": 12,
    "act": "SiLU",
    "norm": True,
    "encoder": {
        "mlp_keys": "position|velocity",
        "cnn_keys": "image",
        "act": "ELU",
        "norm": False,
        "minres": 4,
    },
    "decoder": {
        "mlp_keys": "$^",
        "minres": 16,
        "cnn_sigmoid": False,
        "vector_dist": "symlog_mse",
    },
    "actor": {"dist": "normal", "std": "0.3", "entropy": 1e-3},
    "critic": {"dist": "symlog_mse", "slow_target": True},
    "reward_head": {"dist": "symlog_disc", "loss_scale": 2.0},
    "imag_horizon": 15,
    "reward_EMA": False,
}


def test_options_become_a_config():
    converted = convert_options(OPTIONS)
    assert converted.unknown == []
    flags = [("task", "dummy_cont"), *converted.settings.items()]
    config = resolve([PRESET], flags=flags)
    assert (config.seed, config.precision, config.run.steps) == (3, "float16", 20_000)
    dreamer = config.dreamer
    assert dreamer.dreamerv3_torch.deter == 24
    assert (dreamer.dreamerv3_torch.act, dreamer.dreamerv3_torch.norm) == (
        "silu",
        "layer1em3",
    )
    for head in (dreamer.rewhead, dreamer.conhead, dreamer.policy, dreamer.value):
        assert (head.units, head.act, head.norm) == (12, "silu", "layer1em3")
    assert (dreamer.enc.act, dreamer.enc.norm) == ("elu", "none")
    assert (dreamer.dec.act, dreamer.dec.norm) == ("silu", "layer1em3")  # its preset
    assert (dreamer.enc.mults, dreamer.dec.mults) == ((1, 2, 4, 8), (1, 2))
    assert dreamer.dreamerv3_torch.image_output == "shifted"
    assert dreamer.dec.symlog
    assert dreamer.rewhead.output == "symlog_twohot"
    assert dreamer.value.output == "symlog_mse"
    assert dreamer.dreamerv3_torch_ac.normal.dist == "normal"
    assert dreamer.dreamerv3_torch_ac.normal.std == 0.3
    assert dreamer.imag_loss.actent == 1e-3
    assert dreamer.loss_scales.rew == 2.0
    assert dreamer.imag_length == 14  # 15 states
    assert dreamer.retnorm.impl == "none"
    assert dreamer.reward_grad


def test_keys_match_from_the_beginning_as_in_the_original():
    settings = convert_options(OPTIONS).settings
    assert settings["dreamer.enc.mlp_keys"] == "(?:position|velocity).*"
    assert settings["dreamer.enc.cnn_keys"] == "(?:image).*"
    assert settings["dreamer.dec.mlp_keys"] == "(?:$^).*"


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"reward_EMA": True}, "dreamer.retnorm.impl", "perc"),
        ({"precision": 32}, "precision", "float32"),
        ({"grad_heads": ["decoder", "cont"]}, "dreamer.reward_grad", False),
        ({"steps": 500}, "run.steps", 500),
        (
            {"size": [128, 128], "encoder.minres": 4},
            "dreamer.enc.mults",
            [1, 2, 4, 8, 16],
        ),
        ({"encoder.minres": 64}, "dreamer.enc.mults", [1]),
        (
            {"decoder.cnn_sigmoid": True},
            "dreamer.dreamerv3_torch.image_output",
            "sigmoid",
        ),
        ({"decoder.vector_dist": "mse"}, "dreamer.dec.symlog", False),
        ({"norm": False}, "dreamer.policy.norm", "none"),
    ],
)
def test_one_option(options, name, value):
    assert convert_options(options).settings[name] == value


@pytest.mark.parametrize("std", ["learned", "none", None])
def test_a_learned_deviation_sets_nothing(std):
    given = {"actor.dist": "onehot", "actor.std": std}
    assert not [x for x in convert_options(given).settings if ".normal." in x]


def test_options_that_are_not_known_are_returned():
    options = {"dyn_detre": 5, "log_every": 1e4, "expl_until": 0, "encoder.depth": 2}
    assert convert_options(options).unknown == ["dyn_detre", "encoder.depth"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt": "sgd"}, "opt: sgd .*\n  Fix: use adam"),
        ({"precision": 64}, "precision: 64 .*\n  Fix: use 32 or 16"),
        ({"actor": {"dist": "tanh"}}, "actor.dist: tanh"),
        ({"act": "Mish2"}, "act: Mish2 is not supported.\n  Fix: use one of .*silu"),
        ({"encoder.act": "Mish2"}, "encoder.act: Mish2"),
        ({"grad_heads": ["reward"]}, r"Fix: .*grad_heads: \[decoder, reward, cont\]"),
    ],
)
def test_unsupported_values_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        convert_options(options)


def test_presets_are_merged_over_the_defaults():
    data = {
        "defaults": {"dyn_deter": 512, "actor": {"layers": 2, "std": "learned"}},
        "small": {"dyn_deter": 8, "actor": {"layers": 1}},
        "comment": "not a preset",
    }
    assert is_config(data)
    merged = merge_presets(data, ["small"], "configs.yaml")
    assert merged == {"dyn_deter": 8, "actor.layers": 1, "actor.std": "learned"}
    assert merge_presets({"dyn_deter": 4}, [], "config.json") == {"dyn_deter": 4}
    for preset in ("smal", "comment"):
        with pytest.raises(
            UserError, match=f"no preset '{preset}'.*\n.*choose from small\\."
        ):
            merge_presets(data, [preset], "configs.yaml")
    assert not is_config({"dreamer": {"deter": 5}})
