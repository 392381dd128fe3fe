"""Ranges of hyperparameters."""

from __future__ import annotations

import pytest
import yaml
from sweep_helpers import choices

from reverie.sweep.search_space import CategoricalRange, NumericRange, parse_range


def test_range_is_integer_if_the_setting_is():
    data = {"low": 0, "high": "1e1"}
    assert parse_range("x", data, float) == NumericRange(0.0, 10.0)
    assert parse_range("x", data, int) == NumericRange(0.0, 10.0, integer=True)
    assert parse_range("x", data, int | None) == NumericRange(0.0, 10.0, integer=True)


@pytest.mark.parametrize(
    ("range_", "values"),
    [
        (NumericRange(0.0, 1.0, count=3), [0.0, 0.5, 1.0]),
        (NumericRange(0.0, 1.0, step=0.4), [0.0, 0.4, 0.8]),
        (NumericRange(1.0, 9.0, integer=True, step=4.0), [1, 5, 9]),
        (NumericRange(1.0, 64.0, integer=True, log=True, count=4), [1, 4, 16, 64]),
        (NumericRange(1.0, 2.0, integer=True, count=5), [1, 2]),
        (NumericRange(2.0, 8.0, count=1), [2.0]),
        (choices("a", "b"), ["a", "b"]),
    ],
)
def test_grid_values(range_, values):
    found = range_.grid("x")
    assert found == (values if "a" in values else pytest.approx(values))


def test_range_to_yaml_and_back():
    for range_ in (
        NumericRange(0.0, 1.0, step=0.5),
        NumericRange(1e-5, 1e-2, log=True, count=3),
        CategoricalRange((("1", "2"), ("a b",))),
    ):
        assert parse_range(
            "x", yaml.safe_load(yaml.safe_dump(range_.to_yaml())), float
        ) == (range_)


def test_choices_can_be_lists():
    range_ = parse_range("crop", [[64, 64], "78 78"], tuple)
    assert range_.to_arguments(range_.grid("crop")[0]) == ["64", "64"]
    assert range_.to_arguments("78 78") == ["78 78"]
