"""The lines that `train` prints before the first step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reverie.cli.main import main
from reverie.run.summary import describe_unbounded_actions
from reverie.spaces import Space


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (
            "debug",
            [
                "  10 agent steps of 1 frame each, in 2 environments",
                "  one update trains on 8 x 10 steps and is due every 10 agent steps",
            ],
        ),
        (
            "iris_tiny --iris.schedule.first_steps 70",
            [
                "  3 epochs, at most 10 agent steps of 1 frame each, in 2 environments",
                "  updates start after 70 actions",
            ],
        ),
    ],
)
def test_summary_says_when_updates_are_due(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, lines: list[str]
) -> None:
    common = "--task catch --run.envs 2 --run.steps 10 --run.report_every 0"
    argv = ["train", "--configs", *flags.split(), *common.split()]
    assert main([*argv, "--logdir", str(tmp_path / "run")]) == 0
    output = capsys.readouterr().err.splitlines()
    assert set(lines) <= set(output)
    assert not any("warning: entries" in x for x in output)


def test_actions_without_finite_bounds_are_named() -> None:
    space = {
        "arm": Space(np.dtype(np.float32), (2,), np.float32(-1), np.float32(np.inf)),
        "grip": Space(np.dtype(np.float32), (2,), -1, 1),
        "key": Space(np.dtype(np.int32), (), 0, 3),
    }
    text = describe_unbounded_actions(space)
    assert "the action 'arm' have no finite bounds" in text
    assert "Fix: set finite bounds in the action space" in text
    assert describe_unbounded_actions({k: space[k] for k in ("grip", "key")}) == ""
