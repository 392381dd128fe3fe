"""The file `spaces.json`, written and damaged."""

from __future__ import annotations

import json

import numpy as np
import pytest

from reverie.api import UserError
from reverie.spaces import Space
from reverie.storage.run_spaces import read_spaces, write_spaces

OBS = {"image": Space(np.uint8, (4, 4, 3)), "vector": Space(np.float32, 3, -1, 1)}
ACT = {"action": Space(np.int32, (), 0, 3)}


def test_spaces_are_read_as_written(tmp_path):
    write_spaces(tmp_path, OBS, ACT)
    assert read_spaces(tmp_path) == (OBS, ACT)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "O"),
        ("dtype", "V1000000"),
        ("dtype", "U9"),
        ("dtype", 3),
        ("dtype", {}),
        ("shape", [1 << 20, 1 << 20]),
        ("shape", [1 << 13, 1 << 13]),  # bounds of 1 GiB
        ("shape", [-1]),
        ("shape", 5),
        ("shape", ["x"]),
        ("low", {}),
        ("low", [[1], [2]]),
    ],
)
def test_damaged_spaces_are_errors(tmp_path, field, value):
    write_spaces(tmp_path, OBS, ACT)
    path = tmp_path / "spaces.json"
    data = json.loads(path.read_text())
    data["obs"][1][1][field] = value
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"spaces\.json cannot be read"):
        read_spaces(tmp_path)


@pytest.mark.parametrize("text", ["[]", '{"obs": 1}', "[" * 100_000, "", '{"obs": {}}'])
def test_other_files_are_errors(tmp_path, text):
    (tmp_path / "spaces.json").write_text(text)
    with pytest.raises(UserError, match=r"spaces\.json cannot be read"):
        read_spaces(tmp_path)


def test_all_spaces_together_and_nested_sources_are_limited(tmp_path):
    write_spaces(tmp_path, OBS, ACT)
    path = tmp_path / "spaces.json"
    large = {"dtype": "uint8", "shape": [1 << 12, 1 << 12], "low": 0, "high": 256}
    source = {"path": [], "is_int": False}
    nested = {**large, "source": {**source, "space": large}}
    for obs in (
        [[f"image{index}", large] for index in range(3)],
        [["image", {**large, "source": {**source, "space": nested}}]],
        [["image", {**large, "native": [0, 1]}], ["other", large]],
    ):
        data = json.loads(path.read_text())
        path.write_text(json.dumps({**data, "obs": obs}))
        with pytest.raises(UserError, match="has the shape"):
            read_spaces(tmp_path)
