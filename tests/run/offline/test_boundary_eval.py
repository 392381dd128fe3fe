"""Evaluation and figures of segment boundaries."""

from __future__ import annotations

import errno
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sequence_helpers import vta_settings

from reverie.agents.vta.agent import VTAAgent
from reverie.api import UserError
from reverie.cli import main as cli
from reverie.datasets.synthetic.balls import write_balls
from reverie.evaluation import result as result_module
from reverie.evaluation.boundaries import (
    compare_boundaries,
    eval_boundaries,
    open_sequence_run,
)
from reverie.evaluation.draw import draw_boundaries
from reverie.render.video import can_write_mp4
from reverie.run.config import resolve
from reverie.run.train import train
from reverie.spaces import EVENT
from reverie.storage.os_errors import write_error


def test_boundaries_are_drawn(run, tmp_path):
    paths = draw_boundaries(run, 1, 3, tmp_path)
    video = "sequence_1.mp4" if can_write_mp4() else "sequence_1.gif"
    strips = {
        f"sequence_1{kind}.png" for kind in ("", "_imagined", "_imagined_segments")
    }
    assert {path.name for path in paths} == {video, *strips}
    assert all(path.stat().st_size for path in paths)
    assert cli.main(["draw", "boundaries", str(run), "--num-samples", "2"]) == 0
    assert (run / "eval" / "sequence_0_imagined_segments.png").exists()


def test_frames_events_and_boundaries_of_a_figure_are_aligned(
    run, tmp_path, monkeypatch
):
    drawn = {}

    def strip(truth, reconstruction, found, chance, events):
        drawn.update(truth=truth, found=found, chance=chance, events=events)
        return np.zeros((4, 4, 3), np.uint8)

    monkeypatch.setattr("reverie.evaluation.draw.boundary_strip", strip)
    draw_boundaries(run, 1, 3, tmp_path)
    opened = open_sequence_run(run, 3)
    data = {key: value[1:2] for key, value in opened.feed("report").items()}
    opened.feed.close()
    sizes = opened.run.config.vta.world
    context, length = sizes.context, sizes.length
    now = slice(context, context + length)
    np.testing.assert_array_equal(drawn["truth"], data["image"][:, now])
    np.testing.assert_array_equal(drawn["events"], data[EVENT][:, now])
    world = opened.agent.world.eval()
    rng = opened.agent.rng["report"]
    terms = world.elbo({"image": data["image"]}, rng)
    mask = terms.posterior.mask[..., 0].detach().numpy() > 0.5
    np.testing.assert_array_equal(drawn["found"], mask)
    # probabilities of the detector; the first frame is always a boundary
    logits = terms.posterior.detector_logits[:, now].detach()
    chance = (logits / world.temperature).softmax(-1)[..., 0].numpy()
    np.testing.assert_allclose(drawn["chance"][:, 1:], chance[:, 1:], rtol=1e-5)
    assert drawn["chance"][0, 0] == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "choose from boundaries"),
        (["bounds"], "Did you mean 'boundaries'"),
        (["boundaries"], "needs the folder of a run"),
        (["boundaries", "RUN", "--idx", "3", "--num-samples", "3"], "no sequence 3"),
        (["boundaries", "RUN", "--index", "3"], "no setting 'index'"),
        (["boundaries", "RUN", "--idx", "one"], "idx must be a whole number"),
        (["boundaries", "RUN", "--out", "/proc/none"], "could not be written"),
    ],
)
def test_invalid_draw_commands_exit_with_2_and_a_message(
    run, capsys, arguments, complaint
):
    words = [str(run) if word == "RUN" else word for word in arguments]
    assert cli.main(["draw", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_boundaries_are_evaluated_on_new_sequences(run, capsys):
    assert cli.main(["eval", str(run), "--episodes", "6"]) == 0
    out = capsys.readouterr().out
    assert "6 new sequences" in out
    assert "periodic" in out
    assert "at a missed event" in out
    assert "Brier score" in out
    assert "nan" not in out
    assert "NaN" not in (run / "eval.json").read_text()
    result = json.loads((run / "eval.json").read_text())
    assert (result["kind"], result["data"]) == ("boundaries", "")
    assert result["summary"]["count"] == 6
    assert 0 <= result["summary"]["boundaries/exact/f1"] <= 1
    feeds = [open_sequence_run(run, 6, (), offset).feed for offset in (0, 1_000_000)]
    held_out, new = (feed("report")["image"] for feed in feeds)
    assert not np.array_equal(held_out, new)
    for feed in feeds:
        feed.close()


def test_sequences_of_a_folder_are_limited_by_its_size(tmp_path, capsys):
    write_balls(tmp_path / "balls", train=6, test=2, length=8)
    flags = {"sequences.folder": str(tmp_path / "balls"), "run.steps": 1}
    path = train(vta_settings(tmp_path / "run", **flags))
    assert cli.main(["eval", str(path), "--episodes", "6"]) == 0
    assert f"2 held-out sequences of {tmp_path / 'balls'}" in capsys.readouterr().out
    assert json.loads((path / "eval.json").read_text())["summary"]["count"] == 2
    assert cli.main(["eval", str(path), str(path), "--episodes", "6"]) == 0
    assert "2 held-out sequences" in capsys.readouterr().out
    assert cli.main(["draw", "boundaries", str(path), "--idx", "2"]) == 2
    assert "has 2 evaluation sequences" in capsys.readouterr().err


def test_settings_can_be_changed_for_an_evaluation(run, tmp_path, capsys):
    write_balls(tmp_path / "balls", train=6, test=2, length=8)
    words = ["--sequences.folder", str(tmp_path / "balls")]
    assert cli.main(["eval", str(run), *words]) == 0
    assert "2 held-out sequences" in capsys.readouterr().out
    assert cli.main(["draw", "boundaries", str(run), "--idx", "3", *words]) == 2
    assert "has 2 evaluation sequences" in capsys.readouterr().err
    for places in ([str(run)], [str(run), str(run)]):
        assert cli.main(["eval", *places, "--sorce.folder", "x"]) == 2
        assert "no setting 'sorce.folder'" in capsys.readouterr().err


def test_without_events_no_boundary_scores_are_printed(tmp_path, capsys):
    for name in ("train", "test"):
        path = tmp_path / "balls" / f"{name}.npz"
        path.parent.mkdir(exist_ok=True)
        image = np.zeros((6, 8, 32, 32, 3), np.uint8)
        np.savez(path, image=image, event=np.zeros((6, 8), bool))
    flags = {"sequences.folder": str(tmp_path / "balls"), "run.steps": 1}
    path = train(vta_settings(tmp_path / "run", **flags))
    assert cli.main(["eval", str(path), "--episodes", "6"]) == 0
    out = capsys.readouterr().out
    assert "no events" in out
    assert "F1" not in out


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_runs_in_read_only_folders_can_be_evaluated(run, monkeypatch, code):
    def refuse(path, data):
        raise write_error(code, path)

    monkeypatch.setattr(result_module, "write_json", refuse)
    assert eval_boundaries(run, 3).summary["count"] == 3


def test_too_many_sequences_for_the_memory_are_an_error(run, capsys):
    assert cli.main(["eval", str(run), "--episodes", str(10**12)]) == 2
    assert "ran out of memory" in capsys.readouterr().err


@pytest.mark.extended
def test_boundaries_of_two_runs_are_compared_on_the_same_sequences(
    run, tmp_path, capsys, monkeypatch
):
    other = train(vta_settings(tmp_path / "other", seed=1))
    few = train(vta_settings(tmp_path / "few", **{"vta.batch_size": 2}))
    longer = train(vta_settings(tmp_path / "longer", **{"vta.world.length": 5}))
    small = train(vta_settings(tmp_path / "small", **{"sequences.side": 16}))
    seen = []

    def evaluate(self, data):
        """Mark boundaries by the index of a sequence."""
        seen.append(data["image"])
        marks = torch.zeros(len(data["image"]), 4, dtype=torch.bool)
        marks[self.config.batch_size :, 2] = True
        return SimpleNamespace(boundary=marks)

    monkeypatch.setattr(VTAAgent, "evaluate", evaluate)
    assert cli.main(["eval", str(run), str(other), "--episodes", "6"]) == 0
    assert "kappa 1.000" in capsys.readouterr().out
    torch.testing.assert_close(*seen, rtol=0, atol=0)
    agreement = compare_boundaries(run, few, 6)
    assert agreement.rates == pytest.approx([3 / 18, 4 / 18])
    assert 0 < agreement.kappa < 1
    for different in (longer, small):
        assert cli.main(["eval", str(run), str(different)]) == 2
        assert "different shapes" in capsys.readouterr().err


def test_runs_in_environments_have_no_sequences(tmp_path, capsys):
    flags = {"run.steps": 4, "run.envs": 2, "logger.outputs": "jsonl"}
    config = resolve(["random"], flags={"logdir": str(tmp_path / "run"), **flags})
    path = train(config)
    with pytest.raises(UserError, match="not trained on a sequence dataset"):
        open_sequence_run(path, 5)
    assert cli.main(["eval", str(path), str(path)]) == 2
    assert "compared by their segment boundaries" in capsys.readouterr().err
