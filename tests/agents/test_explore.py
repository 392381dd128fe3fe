from __future__ import annotations

import pytest
import torch

from reverie.agents.explore import ExploreConfig, disagreement
from reverie.api import UserError
from reverie.run.used_settings import resolve_for_command


def test_disagreement_is_the_mean_unbiased_deviation():
    # three members, two outputs: deviations 1 and 2
    predictions = torch.tensor([[[0.0, 2.0]], [[1.0, 4.0]], [[2.0, 6.0]]])
    torch.testing.assert_close(disagreement(predictions), torch.tensor([1.5]))


def test_disagreement_of_equal_members_is_zero():
    predictions = torch.randn(2, 3).expand(4, 2, 3)
    assert torch.equal(disagreement(predictions), torch.zeros(2))


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
