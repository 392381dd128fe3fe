"""Import of checkpoints of the original Δ-IRIS, with recorded weights."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from original_checkpoints import iris_state

from reverie.agents.iris.actor_critic import PixelActorCriticConfig
from reverie.agents.iris.agent import Iris
from reverie.agents.iris.config import IrisConfig
from reverie.agents.options import BuildOptions
from reverie.api import UserError
from reverie.convert.delta_iris.weights import (
    from_original,
    import_state,
    read_checkpoint,
)
from reverie.run.config import resolve
from reverie.run.factory import load_initial_weights
from reverie.spaces import STEP_KEYS, Space
from reverie.storage.torch_file import read_torch_file

sys.path.append(str(Path(__file__).parents[1] / "parity"))
from iris_world_recording import (
    as_bytes,
    frame_config,
    load,
    shapes_of,
    tiny_world,
    under,
)


def original() -> OrderedDict:
    """Return a state dict with the original names, including derived buffers."""
    found = iris_state()
    found["world_model.head_ends.indices"] = torch.arange(3)
    found["world_model.transformer.blocks.0.sa.mask"] = torch.ones(4, 4).tril()
    return found


def make_agent(**changes) -> Iris:
    world = tiny_world()
    recorded = load("actor_critic_two_hot_io")
    online = under(load("actor_critic_two_hot_params"), "model.")
    config = IrisConfig(
        tokenizer=world.tokenizer.config,
        world_model=world.dynamics.config,
        actor_critic=PixelActorCriticConfig(
            frame=frame_config(shapes_of(online), "cnn.0.encoder"),
            width=online["lstm.weight_hh"].shape[1],
            burn_in=recorded["in/observations"].shape[1] - 1,
            horizon=recorded["imagine/actions"].shape[1],
        ),
        training=replace(
            IrisConfig().training,
            world_model=replace(IrisConfig().training.world_model, length=4),
        ),
    )
    kinds = {key: Space(np.float32 if key == "reward" else bool) for key in STEP_KEYS}
    return Iris(
        {"image": Space(np.uint8, world.shape), **kinds},
        {"action": Space(np.int32, (), 0, world.actions)},
        replace(config, **changes),
        BuildOptions(torch.device("cpu")),
    )


@pytest.fixture
def file(tmp_path) -> Path:
    torch.save(original(), tmp_path / "last.pt")
    return tmp_path / "last.pt"


def test_an_imported_agent_has_the_recorded_outputs(file):
    agent = make_agent()
    state = from_original(read_checkpoint(file), agent.state_dict())
    assert agent.load_weights(state) == ["tokenizer", "world_model", "actor_critic"]
    recorded = load("actor_critic_two_hot_io")
    frames = torch.cat(
        [as_bytes(recorded["in/observations"]), as_bytes(recorded["frames"])], 1
    )
    for name in ("online", "target"):
        net = getattr(agent.actor_critic, name)
        with torch.no_grad():
            _, output = net(net.initial(len(frames)), frames)
        wanted = recorded[f"unroll/{name}/logits_actions"]
        np.testing.assert_allclose(output.policy, wanted, atol=1e-4)
    io = load("tokenizer_io")
    tokens = agent.world.tokenizer.tokenize(
        as_bytes(io["in/observations"]), torch.tensor(io["in/actions"])
    )
    np.testing.assert_array_equal(tokens, io["eval/tokens"])


def test_import_of_one_component(file):
    agent = make_agent()
    before = {k: v.clone() for k, v in agent.world.dynamics.state_dict().items()}
    state = from_original(read_checkpoint(file), agent.state_dict())
    assert agent.load_weights(state, "tokenizer") == ["tokenizer"]
    for key, value in agent.world.dynamics.state_dict().items():
        assert torch.equal(before[key], value)
    book = agent.world.tokenizer.quantizer.codebook
    wanted = load("tokenizer_params")["quantizer.codebook"]
    np.testing.assert_array_equal(book, wanted)


def test_components_missing_in_the_file_are_unchanged(tmp_path):
    some = {k: v for k, v in original().items() if k.startswith("tokenizer.")}
    torch.save(some, tmp_path / "last.pt")
    agent = make_agent()
    state = from_original(read_checkpoint(tmp_path / "last.pt"), agent.state_dict())
    assert state["world_model"] is not None
    agent.load_weights(state)


def test_a_run_starts_from_a_file_of_the_original(file):
    flags = {"run.from_checkpoint": str(file)}
    agent, whole = make_agent(), make_agent()
    message = load_initial_weights(whole, resolve(["iris_tiny"], flags=flags))
    assert (
        message
        == f"Loaded weights of tokenizer, world_model, actor_critic from {file}."
    )
    flags["run.from_components"] = "tokenizer"
    # other components may have another size
    actor = replace(agent.config.actor_critic, width=8)
    other = make_agent(actor_critic=actor)
    before = other.state_dict()["world_model"]["latent.weight"].clone()
    assert "Loaded weights of tokenizer from" in load_initial_weights(
        other, resolve(["iris_tiny"], flags=flags)
    )
    loaded, expected = other.state_dict(), whole.state_dict()
    for key, value in expected["tokenizer"].items():
        assert torch.equal(loaded["tokenizer"][key], value)
    assert torch.equal(loaded["world_model"]["latent.weight"], before)


def test_missing_components_are_an_error(tmp_path):
    kept = {k: v for k, v in original().items() if not k.startswith("actor_critic")}
    torch.save(kept, tmp_path / "last.pt")
    agent = make_agent()
    template = agent.state_dict()
    with pytest.raises(UserError, match=r"no actor_critic(.|\n)*'tokenizer"):
        import_state(tmp_path / "last.pt", template)
    state = import_state(tmp_path / "last.pt", template, "(")
    with pytest.raises(UserError, match="No component"):
        agent.load_weights(state, "(")


def test_other_sizes_are_an_error(file):
    other = make_agent(actor_critic=PixelActorCriticConfig(horizon=2, burn_in=2))
    with pytest.raises(UserError, match=r"(?s)Fix: use the settings"):
        from_original(read_checkpoint(file), other.state_dict())


def test_every_kind_of_tensor_is_read(tmp_path):
    tensors = {
        "half": torch.randn(3, 4).half(),
        "bfloat16": torch.randn(5).bfloat16(),
        "transposed": torch.randn(3, 4).T,
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "shared": torch.arange(6)[2:5],
    }
    torch.save(tensors, tmp_path / "x.pt")
    found = read_torch_file(tmp_path / "x.pt")
    for key, tensor in tensors.items():
        assert torch.equal(found[key], tensor.detach()), key
        assert found[key].dtype == tensor.dtype


class Malicious:
    def __reduce__(self):
        return os.system, ("echo run > /dev/null",)


def test_code_in_a_file_is_not_executed(tmp_path):
    torch.save({"tokenizer.x": torch.ones(1), "bad": Malicious()}, tmp_path / "last.pt")
    with pytest.raises(UserError, match=r"system, which is not allowed"):
        read_checkpoint(tmp_path / "last.pt")


@pytest.mark.parametrize("text", [b"", b"not a zip", b"PK\x03\x04 half"])
def test_other_files_are_errors(tmp_path, text):
    (tmp_path / "last.pt").write_bytes(text)
    with pytest.raises(UserError, match=r"(?s)Fix:"):
        read_checkpoint(tmp_path / "last.pt")


def test_a_truncated_file_is_an_error(file, tmp_path):
    (tmp_path / "cut.pt").write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(UserError, match=r"(?s)File is not a zip file.*Fix:"):
        read_checkpoint(tmp_path / "cut.pt")
    with pytest.raises(UserError, match="cannot be read"):
        read_checkpoint(tmp_path / "nothing.pt")


def test_a_changed_byte_is_an_error(tmp_path):
    torch.save({"tokenizer.x": torch.ones(1000)}, tmp_path / "last.pt")
    data = bytearray((tmp_path / "last.pt").read_bytes())
    data[data.index(torch.ones(100).numpy().tobytes())] ^= 1
    (tmp_path / "last.pt").write_bytes(data)
    with pytest.raises(UserError, match=r"(?s)Bad CRC-32.*Fix:"):
        read_checkpoint(tmp_path / "last.pt")


@pytest.mark.parametrize(
    "other", [{"weights": torch.ones(2)}, {0: torch.ones(2)}, torch.ones(2), [1], {}]
)
def test_files_of_other_agents_are_errors(tmp_path, other):
    torch.save(other, tmp_path / "last.pt")
    with pytest.raises(UserError, match="not a checkpoint of Δ-IRIS"):
        read_checkpoint(tmp_path / "last.pt")
