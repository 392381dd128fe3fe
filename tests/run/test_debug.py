"""The preset `debug` makes the networks of every agent small."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from reverie.agents import AGENTS
from reverie.capabilities import HasParameterCount
from reverie.cli.main import main
from reverie.run.config import resolve
from reverie.run.device import pick_device
from reverie.run.factory import make_agent
from reverie.spaces import STEP_KEYS, Space

FEW = 500_000
"""Most parameters of an agent with `debug`."""
COMMANDS = {
    "dreamer": "--task dummy_disc",
    "dreamer with vta": "--configs vta --task dummy_disc",
    "iris": "--agent iris --task catch",
    "vta": "--configs vta_balls",
    "random": "--agent random --task dummy_disc",
}


@dataclasses.dataclass
class Spaces:
    obs_space: dict[str, Space]
    act_space: dict[str, Space]


@pytest.mark.parametrize("agent", [name for name in AGENTS if name != "random"])
def test_debug_makes_the_networks_of_every_agent_small(agent):
    flags = {key: Space(np.dtype(bool)) for key in STEP_KEYS if key != "reward"}
    image = Space(np.dtype(np.uint8), (64, 64, 3))
    obs = {"image": image, "reward": Space(np.dtype(np.float32)), **flags}
    spaces = Spaces(obs, {"action": Space(np.dtype(np.int32), (), 0, 3)})
    config = resolve(["debug"], flags={"agent": agent, "task": "dummy_disc"})
    made = make_agent(config, spaces, pick_device("cpu"), "float32")
    assert isinstance(made, HasParameterCount)
    assert made.parameter_count() < FEW


@pytest.mark.extended_except("dreamer", "random")
@pytest.mark.parametrize("name", COMMANDS)
def test_debug_runs_train_in_seconds(name, tmp_path):
    words = f"train {COMMANDS[name]}".split()
    words = [*words, "--configs", "debug", "--run.steps", "100"]
    words += [
        "--run.clock",
        "steps",
        "--run.report_every",
        "50",
        "--logger.outputs",
        "jsonl",
    ]
    assert main([*words, "--logdir", str(tmp_path / "run")]) == 0
