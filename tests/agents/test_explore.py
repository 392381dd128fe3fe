from __future__ import annotations

import math

import pytest
import torch

from reverie.agents.explore import ExploreConfig, disagreement, jensen_shannon
from reverie.api import UserError
from reverie.run.used_settings import resolve_for_command


def test_disagreement_is_the_mean_unbiased_deviation():
    # three members, two outputs: deviations 1 and 2
    predictions = torch.tensor([[[0.0, 2.0]], [[1.0, 4.0]], [[2.0, 6.0]]])
    torch.testing.assert_close(disagreement(predictions), torch.tensor([1.5]))


def test_disagreement_of_equal_members_is_zero():
    predictions = torch.randn(2, 3).expand(4, 2, 3)
    assert torch.equal(disagreement(predictions), torch.zeros(2))


def test_jensen_shannon_of_two_distributions():
    probs = torch.tensor([[[0.5, 0.5]], [[0.9, 0.1]]])
    mixture = [0.7, 0.3]
    entropy = -sum(p * math.log(p) for p in mixture)
    parts = [-math.log(0.5), -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))]
    expected = entropy - sum(parts) / 2
    divergence = jensen_shannon(probs.log())
    assert divergence.shape == (1,)
    assert float(divergence) == pytest.approx(expected, rel=1e-5)


def test_jensen_shannon_is_bounded():
    certain = 100.0 * torch.eye(5)  # five members, each certain of another class
    assert float(jensen_shannon(certain)) == pytest.approx(math.log(5), rel=1e-5)
    same = torch.randn(3, generator=torch.manual_seed(0)).expand(5, 3)
    assert float(jensen_shannon(same)) == pytest.approx(0, abs=1e-6)


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
        ({"agent": "random", "explore.policy": "random"}, "--explore.policy none"),
        ({"agent": "bc", "explore.policy": "plan2explore"}, "--explore.policy none"),
        ({"dreamer.behaviour": False}, "--dreamer.behaviour True"),
    ],
)
def test_invalid_settings_are_refused(flags, message):
    with pytest.raises(UserError, match="Fix:") as error:
        resolve_for_command("train", ["plan2explore"], flags=flags)
    assert message in str(error.value)
