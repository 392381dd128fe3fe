"""Exported episodes of one run fill the replay buffer of another."""

from __future__ import annotations

import json

import numpy as np

from reverie.cli.main import main

SMALL = (
    "--configs debug random --task catch --run.envs 2 --run.clock steps "
    "--run.log_every 20 --run.report_every 0 --logger.outputs jsonl"
)


def test_exported_episodes_fill_the_replay_of_another_run(tmp_path, capsys):
    first, folder = tmp_path / "first", tmp_path / "npz"
    train = ["train", *SMALL.split()]
    assert main([*train, "--logdir", str(first), "--run.steps", "120"]) == 0
    assert main(["data", "export", str(first), str(folder)]) == 0
    files = sorted(folder.glob("*.npz"))
    assert len(files) == 20  # 60 rows in each of two environments, six an episode
    with np.load(files[0], allow_pickle=False) as episode:
        # In that layout an action led to its row, so the first one is a dummy.
        assert not episode["action"][0].any()
        assert episode["action"][1:].sum(-1).tolist() == [1.0] * 5
        assert abs(episode["reward"][-1]) == 1

    assert main(["data", "export", str(first), str(folder)]) == 2
    assert "already contains episodes" in capsys.readouterr().err

    for source in (folder, first):  # NPZ files, and the replay buffer of a run
        logdir = tmp_path / f"from_{source.name}"
        flags = ["--run.episodes", str(source), "--run.steps", "20"]
        assert main([*train, "--logdir", str(logdir), *flags]) == 0
        assert "120 steps of the episodes" in capsys.readouterr().err
        lines = (logdir / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["replay/steps"] == 140


def test_a_run_without_a_complete_episode_is_an_error(tmp_path, capsys):
    run, folder = tmp_path / "run", tmp_path / "npz"
    words = ["train", *SMALL.split(), "--logdir", str(run), "--run.steps", "4"]
    assert main(words) == 0
    assert main(["data", "export", str(run), str(folder)]) == 2
    assert "no complete episode" in capsys.readouterr().err
    assert main(["data", "exprot", str(run)]) == 2
    assert "Did you mean 'export'" in capsys.readouterr().err
