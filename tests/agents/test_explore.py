from __future__ import annotations

import math

import pytest
import torch

from reverie.agents.explore import ExploreConfig, disagreement, token_disagreement
from reverie.api import UserError
from reverie.run.used_settings import resolve_for_command


def test_disagreement_is_the_mean_unbiased_deviation():
    # three members, two outputs: deviations 1 and 2
    predictions = torch.tensor([[[0.0, 2.0]], [[1.0, 4.0]], [[2.0, 6.0]]])
    torch.testing.assert_close(disagreement(predictions), torch.tensor([1.5]))


def test_disagreement_of_equal_members_is_zero():
    predictions = torch.randn(2, 3).expand(4, 2, 3)
    assert torch.equal(disagreement(predictions), torch.zeros(2))


def test_token_disagreement_is_the_mean_jensen_shannon_divergence():
    # two heads, two tokens: one with distributions 3/4, 1/4 and 1/4, 3/4, one equal
    probs = torch.tensor([[[0.75, 0.25], [0.5, 0.5]], [[0.25, 0.75], [0.5, 0.5]]])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    expected = (math.log(2) - entropy) / 2
    actual = token_disagreement(torch.log(probs)[:, None] + 3.0)
    torch.testing.assert_close(actual, torch.tensor([expected]))


def test_token_disagreement_of_heads_that_exclude_each_other():
    logits = 1000 * torch.eye(4)[:, None, None]  # four heads, each with its own code
    torch.testing.assert_close(
        token_disagreement(logits), torch.full((1,), math.log(4))
    )


@pytest.mark.parametrize(
    ("until", "active"), [(0, [True, True, True]), (10, [True, False, False])]
)
def test_the_steps_in_which_the_policy_acts(until, active):
    config = ExploreConfig("plan2explore", until)
    assert [config.is_active(step) for step in (9, 10, 11)] == active
    assert not ExploreConfig().is_active(0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"explore.offset": -1}, "explore.offset must be at least 0"),
        ({"explore.offset": 0, "explore.action_conditioned": True}, "offset of at lea"),
        ({"explore.intrinsic": 0}, "must not both be zero"),
        ({"explore.heads.models": 1}, "models must be at least 2"),
        ({"explore.ensemble.units": 0}, "units at least 1"),
        ({"explore.ensemble.std": 0}, "std must be above zero"),
        ({"agent": "iris", "iris.behaviour": False}, "--iris.behaviour True"),
        ({"agent": "random", "explore.policy": "random"}, "--explore.policy none"),
        ({"agent": "bc", "explore.policy": "plan2explore"}, "--explore.policy none"),
        ({"dreamer.behaviour": False}, "--dreamer.behaviour True"),
    ],
)
def test_invalid_settings_are_refused(flags, message):
    with pytest.raises(UserError, match="Fix:") as error:
        resolve_for_command("train", ["plan2explore"], flags=flags)
    assert message in str(error.value)
