"""Import and export of checkpoints of the original DreamerV3."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from reverie.agents.dreamer.agent import Dreamer, DreamerConfig
from reverie.agents.options import BuildOptions
from reverie.api import UserError
from reverie.convert.dreamerv3.config import config_from_original
from reverie.convert.dreamerv3.weights import (
    from_original,
    import_state,
    original_name,
    read_checkpoint,
    to_original,
)
from reverie.spaces import Space

F32, BOOL, U8 = (np.dtype(x) for x in ("float32", "bool", "uint8"))
OBS = {
    "image": Space(U8, (12, 16, 1)),
    "pos/x.y": Space(F32, (3,)),
    "keys": Space(np.dtype("int32"), (), 0, 4),
    "reward": Space(F32),
    "is_first": Space(BOOL),
    "is_last": Space(BOOL),
    "is_terminal": Space(BOOL),
}
ACT = {"action": Space(np.dtype("int32"), (), 0, 4), "arm": Space(F32, (2,), -1, 1)}
OPTIONS = {
    "batch_size": 2,
    "dyn": {
        "typ": "rssm",
        "rssm": {"deter": 16, "hidden": 8, "stoch": 4, "classes": 3, "blocks": 4},
    },
    "enc": {"simple": {"depth": 8, "mults": [1, 2], "units": 8, "winit": "x"}},
    "dec.simple.depth": 8,
    "dec.simple.mults": [1, 2],
    "dec.simple.units": 8,
    "rewhead.units": 8,
    "conhead.units": 8,
    "policy.units": 8,
    "policy.unimix": 0.01,
    "value.units": 8,
    "opt.momentum": True,
}


def make(seed=0) -> Dreamer:
    config = config_from_original(OPTIONS)
    device = torch.device("cpu")
    return Dreamer(OBS, ACT, config, BuildOptions(device, seed=seed))


def test_names():
    assert original_name("dyn", "dynin0.weight") == "dyn/dynin0/kernel"
    assert original_name("dyn", "dynin0norm.scale") == "dyn/dynin0norm/scale"
    name = "vec.pos/x%2ey.pred.bias"
    assert original_name("dec", name) == "dec/vec/pos/x.y/pred/bias"


def test_export_and_import_are_exact():
    arrays = to_original(make(1).state_dict())
    for moment in (1, 2):
        for key in [k for k in arrays if k.startswith(f"opt/state/{moment}/1/")]:
            arrays[key] = np.random.default_rng(0).random(arrays[key].shape, np.float32)
    assert arrays["enc/cnn0/kernel"].shape == (5, 5, 1, 8)
    assert arrays["enc/mlp0/kernel"].shape == (3 + 4, 8)
    agent = make(2)
    agent.load_state_dict(from_original(arrays, agent.state_dict()))
    again = to_original(agent.state_dict())
    assert again.keys() == arrays.keys()
    for key, value in arrays.items():
        assert again[key].dtype == value.dtype, key
        np.testing.assert_array_equal(again[key], value, err_msg=key)


def test_without_optimizer_entries_the_optimizer_is_unchanged():
    arrays = to_original(make(1).state_dict())
    arrays = {k: v for k, v in arrays.items() if not k.startswith("opt/")}
    state = make(2).state_dict()
    assert from_original(arrays, state)["opt"] is state["opt"]


def test_missing_extra_and_misshapen_parameters_are_errors():
    template = make().state_dict()
    arrays = to_original(template)
    short = {k: v for k, v in arrays.items() if k != "dyn/obs0/bias"}
    with pytest.raises(UserError, match="dyn/obs0/bias"):
        from_original(short, template)
    with pytest.raises(UserError, match="no parameter 'dyn/extra'"):
        from_original({**arrays, "dyn/extra": np.zeros(3)}, template)
    with pytest.raises(UserError, match=r"\(9,\)"):
        from_original({**arrays, "dyn/obs0/bias": np.zeros(9, np.float32)}, template)


def test_config():
    config = config_from_original(OPTIONS)
    assert config.rssm.deter == 16
    assert config.enc.mults == (1, 2)
    assert config.policy.unimix == 0  # has no effect in the original
    cosine = {"opt": {"schedule": "cosine", "lr": 0.01, "anneal": 5000}}
    assert config_from_original(cosine).opt.floor == pytest.approx(0.001)
    assert config_from_original({}) == DreamerConfig()
    with pytest.raises(UserError, match=r"dyn\.rssm\.size|rssm\.size"):
        config_from_original({"dyn.rssm.size": 3})


@pytest.mark.parametrize("protocol", range(6))
def test_checkpoint_files_are_read(tmp_path, protocol):
    arrays = to_original(make(1).state_dict())
    data = {"params": arrays, "counters": {"updates": 3, "batches": 3, "actions": 9}}
    path = tmp_path / "agent.pkl"
    path.write_bytes(pickle.dumps(data, protocol=protocol))
    read = read_checkpoint(path)
    assert read["counters"]["updates"] == 3
    agent = make(2)
    template = agent.state_dict()
    agent.load_state_dict(from_original(read["params"], template))
    again = to_original(agent.state_dict())
    np.testing.assert_array_equal(again["dyn/obs0/bias"], arrays["dyn/obs0/bias"])
    # a decoder of another size does not matter, because only `dyn` is loaded
    other = {**template, "dec": {"other": torch.zeros(3)}}
    agent.load_weights(import_state(path, other, "dyn"), "dyn")
    again = to_original(agent.state_dict())
    np.testing.assert_array_equal(again["dyn/obs0/bias"], arrays["dyn/obs0/bias"])


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_malicious_pickle_is_not_executed(tmp_path):
    marker = str(tmp_path / "ran")
    path = tmp_path / "agent.pkl"
    path.write_bytes(pickle.dumps({"params": {"a": Malicious(marker)}}))
    with pytest.raises(UserError, match="mkdir"):
        read_checkpoint(path)
    assert not Path(marker).exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({"params": {"a": "text"}}),
        pickle.dumps({"params": {"a": np.array([{}], dtype=object)}}),
    ],
)
def test_other_files_are_errors(tmp_path, content):
    path = tmp_path / "agent.pkl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"agent\.pkl"):
        read_checkpoint(path)


def test_a_torch_file_is_an_error(tmp_path):
    torch.save({"tokenizer.weight": torch.ones(1)}, tmp_path / "last.pt")
    with pytest.raises(UserError, match=r"Fix: use agent\.pkl"):
        read_checkpoint(tmp_path / "last.pt")
