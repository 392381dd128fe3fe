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
