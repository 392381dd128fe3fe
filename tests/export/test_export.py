"""`reverie export`: exported policies act as their agents do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from player_helpers import Toy, make_player
from torch import nn

from reverie.api import UserError
from reverie.capabilities import ExportStep
from reverie.cli.main import main
from reverie.envs.wrappers import resize as resize_array
from reverie.export import export, runner, verify
from reverie.export.env_step import resize
from reverie.export.export import export_policy, format_report
from reverie.export.load_torch import load_torch
from reverie.export.runner import Policy
from reverie.export.steps import FlatStep, GivenNoise, RecordedNoise
from reverie.run.player import Player
from reverie.spaces import Space

IMAGE = spaces.Box(0, 255, (64, 64, 3), np.uint8)
NESTED_OBS = spaces.Dict(
    camera=spaces.Box(0, 255, (60, 50), np.uint8),
    arm=spaces.Box(-1, 1, (3,), np.float64),
)
NESTED_ACT = spaces.Dict(
    a=spaces.Tuple((spaces.Discrete(2, start=3), spaces.Box(0.1, 0.7, (2,), float))),
    b=spaces.MultiDiscrete([3, 5]),
)
SCALED = spaces.Box(np.float32([10, -0.1]), np.float32([30, 0.3]))
DREAMERV3_TORCH = {
    "dreamer.world": "dreamerv3_torch",
    "dreamer.actor_critic": "dreamerv3_torch",
    "dreamer.optimizers": "separate",
    "dreamer.repval_loss": False,
}
AGENTS: dict[str, tuple[Toy, dict[str, Any]]] = {
    "dreamer": (Toy(), {}),
    "dreamer, continuous": (Toy(act=SCALED), {}),
    "dreamer, nested": (Toy(NESTED_OBS, NESTED_ACT), {"env.resize": (48, 48)}),
    "dreamerv3_torch": (Toy(act=SCALED), DREAMERV3_TORCH),
    "dreamerv3_torch, discrete": (Toy(), DREAMERV3_TORCH),
    "plan2explore": (Toy(), {"explore.policy": "plan2explore"}),
    "vta": (Toy(), {"dreamer.world": "vta"}),
    "iris": (Toy(IMAGE), {"agent": "iris"}),
    "bc": (Toy(act=SCALED), {"agent": "bc"}),
    "bc, recurrent": (
        Toy(),
        {"agent": "bc", "bc.length": 2, "bc.head.recurrent": 8},
    ),
}


def player_of(tmp_path: Path, name: str) -> Player:
    toy, settings = AGENTS[name]
    return make_player(tmp_path, toy, compile="none", **settings)


def run_in_torch(monkeypatch: Any) -> None:
    """Let the runner execute the step in PyTorch, without a conversion to a file."""
    steps: dict[str, FlatStep] = {}

    def write_step(step: FlatStep, folder: Path, name: str, format: str) -> Any:
        steps[name] = step
        names = {"input_names": step.input_names, "output_names": step.output_names}
        (folder / f"{name}.onnx").touch()
        return {"file": f"{name}.onnx", **names}

    def load(path: Path, info: Any) -> Any:
        step = steps[path.stem]

        def run(feed: Any) -> Any:
            with torch.no_grad():
                outputs = step(*(torch.tensor(feed[k]) for k in info["input_names"]))
            pairs = zip(info["output_names"], outputs, strict=True)
            return {name: value.numpy() for name, value in pairs}

        return run

    monkeypatch.setattr(export, "write_step", write_step)
    monkeypatch.setattr("reverie.export.runner.load_onnx", load)
    monkeypatch.setattr(verify, "STEPS", 8)
    monkeypatch.setattr(verify, "REPEATS", 2)
    monkeypatch.setattr(verify, "RESET_RATE", 0.3)


@pytest.mark.parametrize(
    ("name", "greedy"),
    [*((name, True) for name in AGENTS), ("dreamer, nested", False), ("iris", False)],
)
def test_step_and_runner_act_as_the_agent(tmp_path, monkeypatch, name, greedy):
    """The comparison raises if the step is not the policy of the agent."""
    run_in_torch(monkeypatch)
    player = player_of(tmp_path, name)
    exported = export_policy(player, tmp_path / "out", "onnx", greedy)
    assert exported.comparisons["policy"] == verify.Comparison(0.0, 0, 8)
    policy, space = Policy(tmp_path / "out"), AGENTS[name][0].action_space
    obs, _ = AGENTS[name][0].reset(seed=0)
    assert space.contains(policy.act(obs))


@pytest.mark.parametrize("name", ["dreamer", "dreamerv3_torch", "vta", "iris"])
def test_steps_of_the_world_model(tmp_path, monkeypatch, name):
    run_in_torch(monkeypatch)
    player = player_of(tmp_path, name)
    exported = export_policy(player, tmp_path / "out", with_world=True)
    assert set(exported.comparisons) == {"policy", "observe", "imagine", "decode"}
    assert all(x.error == 0 for x in exported.comparisons.values())
    info = json.loads((tmp_path / "out" / "policy.json").read_text())
    assert {"reward", "cont"} <= set(info["world"]["imagine"]["output_names"])


@pytest.mark.extended
def test_onnx_and_torch_files_act_as_the_agent(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "STEPS", 20)
    player = player_of(tmp_path, "bc, recurrent")
    for format, suffix in (("onnx", "onnx"), ("torch", "pt2")):
        exported = export_policy(player, tmp_path / format, format)
        assert exported.comparisons["policy"].error < verify.TOLERANCE
        names = {f"policy.{suffix}", "policy.json", "run_policy.py"}
        names |= {"load_torch.py"} if format == "torch" else set()
        assert {path.name for path in (tmp_path / format).iterdir()} == names
        assert "20 recurrent steps, largest difference" in format_report(exported)
        load = load_torch if format == "torch" else None
        single = Policy(tmp_path / format, load=load)
        batch = Policy(tmp_path / format, batch=7, load=load)
        obs = np.zeros(3, np.float32)
        assert single.act(obs) in (0, 1, 2)
        assert batch.act(np.stack([obs] * 7)).shape == (7,)


@pytest.mark.extended
def test_onnx_files_of_dreamer_have_any_batch_size(tmp_path, monkeypatch):
    """Other agents are exported by the slow tests."""
    monkeypatch.setattr(verify, "STEPS", 10)
    player = player_of(tmp_path, "dreamer, continuous")
    exported = export_policy(player, tmp_path / "out", "onnx", with_world=True)
    assert set(exported.comparisons) == {"policy", "observe", "imagine", "decode"}
    for batch in (1, 2, 5):
        policy = Policy(tmp_path / "out", batch=batch)
        assert policy.act(np.zeros((batch, 3), np.float32)).shape == (batch, 2)


@pytest.mark.slow
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("name", AGENTS)
def test_onnx_files_of_all_agents(tmp_path, name, greedy):
    player = player_of(tmp_path, name)
    world = name in ("dreamer", "dreamerv3_torch", "vta", "iris")
    exported = export_policy(player, tmp_path / "out", "onnx", greedy, world)
    assert all(x.error < verify.TOLERANCE for x in exported.comparisons.values())


def test_runner_resets_episodes_and_samples_its_own_noise(tmp_path, monkeypatch):
    run_in_torch(monkeypatch)
    player = player_of(tmp_path, "dreamer, continuous")
    export_policy(player, tmp_path / "out", greedy=False)
    obs, states = np.ones((2, 3), np.float32), []
    for _ in range(2):
        policy = Policy(tmp_path / "out", batch=2, seed=1)
        first = policy.act(obs)
        policy.act(obs)
        policy.reset(np.array([True, False]))
        second = policy.act(obs)
        states.append(np.concatenate([first, second]))
    np.testing.assert_array_equal(*states)
    policy.reset()
    again, new = policy, Policy(tmp_path / "out", batch=2)
    noise = policy.arrays("noise", lambda x: getattr(policy.rng, x["sampler"]))
    np.testing.assert_array_equal(again.act(obs, noise), new.act(obs, noise))


def test_runner_has_40_lines_and_needs_only_numpy_and_onnxruntime():
    source = Path(runner.__file__).read_text()
    assert len([line for line in source.splitlines() if line.strip()]) <= 40
    imports = re.findall(r"^ *(?:import|from) (\w+)", source, re.M)
    assert set(imports) == {"json", "pathlib", "typing", "numpy", "onnxruntime"}


def test_wrong_weights_are_found(tmp_path, monkeypatch):
    run_in_torch(monkeypatch)
    player = player_of(tmp_path, "dreamer")
    compare = verify.compare

    def disturb(step, feed, noise, reference, exported):
        exported = {**exported, "next.state.deter": exported["next.state.deter"] + 0.01}
        return compare(step, feed, noise, reference, exported)

    monkeypatch.setattr(verify, "compare", disturb)
    message = r"'policy' differs .* 1\.0e-02 in the output 'next\.state\.deter'"
    with pytest.raises(UserError, match=message):
        export_policy(player, tmp_path / "new" / "out")
    assert not (tmp_path / "new" / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "policy.json").write_text("of another export")
    with pytest.raises(UserError, match=message):
        export_policy(player, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["policy.json"]
    assert (tmp_path / "out" / "policy.json").read_text() == "of another export"


@pytest.mark.parametrize(
    ("value", "expected", "error"),
    [
        *((np.nan, 1.0, np.inf), (1.0, np.nan, np.inf), (np.inf, 1.0, np.inf)),
        *((np.nan, np.nan, 0.0), (-np.inf, -np.inf, 0.0), (np.inf, -np.inf, np.inf)),
    ],
)
def test_numbers_that_are_not_finite_are_compared(value, expected, error):
    space = Space(np.float32, (2,))
    step = FlatStep(ExportStep(Half(), {"x": space}, lambda batch: ()))
    feed, noise = {"x": space.zeros(verify.BATCH)}, RecordedNoise(0)
    verify.run_step(step, feed, noise)
    noise.noise[0].fill_(0.9)
    zeros = np.zeros(verify.BATCH)
    arrays = [{"a": zeros, "b": zeros + x} for x in (expected, value)]
    found = verify.compare(step, feed, noise, *arrays)
    assert found.error == error
    assert not found.tied.any()
    none = verify.StepComparison(0.0, np.zeros(verify.BATCH, bool), "a")
    result = verify.Comparison().add(none).add(found)
    assert (result.error, result.output) == (error, "b" if error else "")


def test_another_exported_policy_is_found(tmp_path, monkeypatch):
    run_in_torch(monkeypatch)
    player = player_of(tmp_path, "dreamer, continuous")
    agent: Any = player.agent
    sampled = agent.export_policy(False)
    monkeypatch.setattr(agent, "export_policy", lambda greedy: sampled)
    with pytest.raises(RuntimeError, match="differ in action"):
        export_policy(player, tmp_path / "out")


class Half(nn.Module):
    """Samples one of two classes with the same probability."""

    def forward(self, inputs: Any, state: Any, rng: Any) -> Any:
        return {"index": rng.categorical(inputs["x"] * 0 + 0.5)}, state


def test_only_differences_at_ties_are_accepted():
    space = Space(np.float32, (2,))
    step = FlatStep(ExportStep(Half(), {"x": space}, lambda batch: ()))
    feed, noise = {"x": space.zeros(verify.BATCH)}, RecordedNoise(0)
    verify.run_step(step, feed, noise)
    noise.noise[0].copy_(torch.tensor([[0.9], [0.5000001], [0.9], [0.9]]))
    reference = verify.run_step(step, feed, GivenNoise(noise.noise))
    assert reference["index"].tolist() == [1, 1, 1, 1]
    error, tied, *_ = verify.compare(
        step, feed, noise, reference, {"index": np.array([1, 0, 1, 1])}
    )
    assert error == 0
    assert tied.tolist() == [False, True, False, False]
    error, tied, *_ = verify.compare(
        step, feed, noise, reference, {"index": np.array([1, 1, 0, 1])}
    )
    assert error == 1
    assert not tied.any()


class Cancel(nn.Module):
    """Adds numbers of 1e8 that cancel, and a number that is not changed by them."""

    def forward(self, inputs: Any, state: Any, rng: Any) -> Any:
        large = 1e8 * inputs["x"][:, 1] * 1.1 - 1.1e8 * inputs["x"][:, 1]
        return {"sum": large, "well": inputs["x"][:, 0] * 2}, state


def test_differences_within_rounding_errors_are_accepted():
    space = Space(np.float32, (2,))
    step = FlatStep(ExportStep(Cancel(), {"x": space}, lambda batch: ()))
    feed = {"x": np.ones((verify.BATCH, 2), np.float32)}
    reference = verify.run_step(step, feed, noise := RecordedNoise(0))
    exported = {**reference, "sum": reference["sum"] + [0, 8, 0, 0]}
    found = verify.compare(step, feed, noise, reference, exported)
    assert (found.error, found.rounding) == (0, 8)
    result = verify.Comparison().add(found)
    report = export.format_report(
        export.Exported([], {"policy": result}, dict.fromkeys(("exported", "agent"), 1))
    )
    assert "differences up to 8.0e+00 within the rounding errors" in report
    exported = {**exported, "well": reference["well"] + np.float32(1e-3)}
    found = verify.compare(step, feed, noise, reference, exported)
    assert (round(found.error, 5), found.output, found.rounding) == (5e-4, "well", 8)
    exported = {**reference, "sum": reference["sum"] + 1e4}
    found = verify.compare(step, feed, noise, reference, exported)
    assert (found.error, found.output, found.rounding) == (1e4, "sum", 0)


def test_agent_without_steps_is_refused(tmp_path):
    player = make_player(tmp_path, Toy(), agent="random")
    with pytest.raises(UserError, match="'random' cannot be exported"):
        export_policy(player, tmp_path)
    player = player_of(tmp_path, "bc")
    with pytest.raises(UserError, match="no world model to export"):
        export_policy(player, tmp_path, with_world=True)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"onnxscript.*\n  Fix: pip install"):
        export_policy(player_of(tmp_path, "bc"), tmp_path)


@pytest.mark.parametrize("method", ["nearest", "bilinear"])
@pytest.mark.parametrize("size", [(16, 16), (64, 24), (40, 30), (41, 90)])
def test_images_are_resized_as_in_training(method, size):
    image = np.random.default_rng(0).integers(0, 256, (2, 40, 30, 3), np.uint8)
    expected = np.stack([resize_array(x, size, method) for x in image])
    np.testing.assert_array_equal(resize(torch.tensor(image), size, method), expected)


def test_default_folders(tmp_path, monkeypatch):
    folders: list[Path] = []
    monkeypatch.setattr("reverie.run.python.load", lambda *args, **settings: None)
    monkeypatch.setattr(
        export, "export_policy", lambda _, out, *more: folders.append(out)
    )
    monkeypatch.setattr(export, "format_report", str)
    for name in (str(tmp_path), "some/agent.reverie", "hf://user/name@v1"):
        assert main(["export", name]) == 0
    assert folders == [tmp_path / "export", Path("some/export"), Path("export")]


def test_command_exports_a_run(tmp_path, monkeypatch, capsys):
    run_in_torch(monkeypatch)
    run = str(tmp_path / "run")
    flags = "--configs debug --task catch --run.steps 40 --run.report_every 0"
    assert main(["train", *flags.split(), "--logdir", run]) == 0
    assert main(["export", run]) == 0
    assert "policy: 8 recurrent steps" in capsys.readouterr().out
    assert (tmp_path / "run" / "export" / "run_policy.py").is_file()
    assert main(["export", run, "--out", str(tmp_path / "own"), "--sample"]) == 0
    info = json.loads((tmp_path / "own" / "policy.json").read_text())
    assert not info["greedy"]
    assert info["verified"]["policy"] == {
        **{"error": 0.0, "ties": 0, "steps": 8, "rounding": 0.0}
    }
    assert main(["export"]) == 2
    assert "Fix: reverie export LOGDIR" in capsys.readouterr().err
