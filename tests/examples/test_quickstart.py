"""The notebook `examples/quickstart.ipynb`, with a shorter training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]


def test_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}
    for code in code_cells():
        short = re.sub(r"run__steps=[\d_]+", "run__steps=120", code)
        short = short.replace('"tiny"', '"debug"').replace("episodes=10", "episodes=1")
        exec(compile(short, NOTEBOOK.name, "exec", dont_inherit=True), names)
    assert (tmp_path / "logdir" / "quickstart" / "ckpt").is_dir()
    assert "mean score" in capsys.readouterr().out
    assert len(names["frames"]) > 2
    assert names["imagined"].obs["image"].shape[0] == 5
    assert np.asarray(names["dream"]).std() > 0


def test_notebook_is_small_and_has_no_outputs():
    assert NOTEBOOK.stat().st_size < 8192
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
