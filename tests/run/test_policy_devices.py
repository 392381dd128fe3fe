"""Acting on another device than training: here, with a copy of the agent on the CPU."""

from __future__ import annotations

import pytest
import torch
from state_helpers import assert_same
from test_resume import read_state, settings

from reverie.agents.options import BuildOptions
from reverie.agents.random import RandomAgent, RandomConfig
from reverie.api import UserError
from reverie.run import device
from reverie.run.policy_copy import PolicyCopy
from reverie.run.train import train
from reverie.run.used_settings import resolve_for_command


@pytest.mark.extended
def test_a_copy_of_the_policy_acts_as_the_agent_itself(tmp_path):
    plain = settings(tmp_path / "plain", 120, "catch", "ram")
    expected = read_state(train(plain))
    more = {"run.policy_devices": ["cpu"]}
    train(settings(tmp_path / "split", 70, "catch", "ram", **more))
    split = settings(tmp_path / "split", 120, "catch", "ram", **more)
    actual = read_state(train(split))  # resumed
    for state in (expected["agent"], actual["agent"]):
        del state["rng"]["policy"]  # that of the copy is used instead
    assert_same(actual["agent"], expected["agent"])
    assert_same(actual["collector"], expected["collector"])


class OneWeight(RandomAgent):
    """An agent whose actions are its only weight."""

    def __init__(self):
        options = BuildOptions(torch.device("cpu"), "float32")
        super().__init__({}, {}, RandomConfig(), options)
        self.weight = torch.zeros(())

    def policy_weights(self):
        return {"policy": {"weight": self.weight}}

    def load_policy_weights(self, state):
        self.weight.copy_(state["policy"]["weight"])

    def policy(self, carry, obs, mode="train"):
        return carry, {"weight": float(self.weight)}, {}


def test_with_overlap_actions_do_not_wait_for_updates():
    agent, updates = OneWeight(), 0
    copies = [
        PolicyCopy(agent, OneWeight(), lambda: updates, overlap)
        for overlap in (False, True)
    ]
    actions = []
    for count in (0, 1, 0, 1, 2, 1):
        for _ in range(count):
            for copy in copies:
                copy.before_update()
            agent.weight += 1
            updates += 1
        actions.append([copy.policy((), {})[1]["weight"] for copy in copies])
    # the weights before the first update since the last action
    assert actions == [[0, 0], [1, 0], [1, 0], [2, 1], [4, 2], [5, 4]]


def test_devices_that_do_not_exist_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="finds no CUDA GPU"):
        device.pick_device("auto", [0])
    with pytest.raises(UserError, match="number of GPUs is 0"):
        device.pick_policy_device(["1"])
    with pytest.raises(UserError, match="one GPU index or cpu"):
        device.pick_policy_device(["0", "1"])
    flags = {"actors.count": 2, "run.policy_devices": ["cpu"]}
    with pytest.raises(UserError, match="actors act on the CPU"):
        resolve_for_command("train", flags=flags)


def test_ranks_train_on_the_given_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert device.pick_device("auto", [0, 3]) == torch.device("cuda", 3)
    assert device.pick_policy_device(["2"]) == torch.device("cuda", 2)
    with pytest.raises(UserError, match="each of the 2 processes"):
        device.pick_device("auto", [3])
    with pytest.raises(UserError, match="number of GPUs is 4"):
        device.pick_device("auto", [3, 4])
