"""`reverie plot` on small run folders."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from score_files import write_run

from reverie.cli.main import main
from reverie.results.benchmarks import find_baseline, human_normalized_score
from reverie.results.curves import aggregate_curve, bin_edges, bin_run, make_curve
from reverie.results.plot import _method_labels, draw_curves, read_points
from reverie.results.runs import find_runs, group_runs

# x and value of the episodes of a run
EVERY = np.array([[10.0, 1], [20, 2], [30, 3], [40, 4]])
FEW = np.array([[10.0, 3], [40, 0]])


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """Intervals of figures do not have to be exact here."""
    monkeypatch.setattr("reverie.results.statistics.RESAMPLES", 20)
    monkeypatch.setattr("reverie.results.curves.RESAMPLES", 10)


def write_runs(folder: Path, tasks, seeds=3, offset=0.0, **more) -> Path:
    for task in tasks:
        for seed in range(seeds):
            run = folder / f"{task}-{offset}-{seed}"
            write_run(run, task, seed, offset=offset + seed, **more)
    return folder


def make_figure(folder: Path, baseline: str = "", key: str = "episode/score", x="step"):
    runs = find_runs([folder])
    tasks = {run.task for run in runs}
    found = [find_baseline(name, tasks) for name in baseline.split()]
    points = read_points(group_runs(runs), key, x)
    return draw_curves(points, key, x, baselines=found)


def test_curves_on_common_bins():
    assert len(bin_edges([EVERY, FEW])) == 3  # as wide as the episodes of each run
    assert len(bin_edges([EVERY, FEW[:1]])) == 5  # a run that has just started
    assert list(bin_edges([EVERY], bins=3)) == [0, 20, 40]
    long = np.array([[x, 0.0] for x in range(1, 434)])
    assert list(bin_edges([long], bins=5)) == [0, 100, 200, 300, 433]
    assert list(bin_edges([long * 0.01], bins=5)) == pytest.approx([0, 1, 2, 3, 4.33])
    long[-1] = 460
    assert list(bin_edges([long], bins=5)) == [0, 100, 200, 300, 400, 460]
    edges = np.linspace(0, 40, 5)
    np.testing.assert_array_equal(bin_run(EVERY, edges), [1, 2, 3, 4])
    np.testing.assert_array_equal(bin_run(FEW, edges), [3, 2, 1, 0])
    short = bin_run(EVERY[:2], edges)
    np.testing.assert_array_equal(short, [1, 2, np.nan, np.nan])
    curve = make_curve([EVERY, EVERY[:2]], edges)
    np.testing.assert_array_equal(curve.mean, [1, 2, 3, 4])
    assert curve.runs == 2
    assert list(curve.x) == [5, 15, 25, 35]


def test_episodes_that_end_at_the_same_step_are_averaged():
    same = np.array([[10.0, 0], [10, 1], [20, 0], [20, 0], [20, 3]])
    edges = bin_edges([same])
    assert len(edges) == 3
    np.testing.assert_array_equal(bin_run(same, edges), [0.5, 1])


def test_bands_stay_within_success_rates():
    rng = np.random.default_rng(0)
    x = np.arange(1.0, 101)
    runs = [np.stack([x, rng.random(100) < 0.95], 1).astype(float) for _ in range(5)]
    curve = make_curve(runs, bin_edges(runs))
    assert (curve.low >= 0).all()
    assert (curve.high <= 1).all()
    assert (curve.low <= curve.mean).all()
    assert (curve.mean <= curve.high).all()
    assert (curve.low < curve.high).any()


def test_aggregate_curve_is_the_iqm_of_all_tasks():
    points = {"a": [EVERY, EVERY + np.array([0, 1])], "b": [EVERY * (1, 10), EVERY[:3]]}
    edges = np.linspace(0, 40, 5)

    def scale(task, values):
        return values / (1 if task == "a" else 10)

    curve = aggregate_curve(points, edges, scale)
    # first bin: 1, 2, 1 and 0.1; the middle half is 1 and 1
    assert curve.mean[0] == pytest.approx(1)
    # last bin: 4 and 5 of task a; one run of b, whose weight is double
    assert curve.mean[3] == pytest.approx((4 + 5 + 2 * 4) / 4)
    assert (curve.low <= curve.mean).all()
    assert (curve.mean <= curve.high).all()
    ended = aggregate_curve({"a": [EVERY], "b": [EVERY[:2]]}, edges, scale)
    assert list(ended.x) == [5, 15]  # where all tasks have data


def test_panels_of_tasks_and_aggregate(tmp_path):
    tasks = ("atari100k_boxing", "atari100k_pong")
    write_runs(tmp_path, tasks)
    figure = make_figure(tmp_path, "dreamerv3")
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["boxing", "pong", "IQM of 2 tasks"]
    caption = " ".join(text.get_text() for text in reversed(figure.texts))
    assert caption.endswith("Tasks: atari100k_*.")
    assert figure.axes[2].get_ylabel() == "human-normalized score"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["dreamer (3 seeds)", "DreamerV3 (published)"]
    # the last of 10 episodes; agent steps of 4 frames, at the center of the bin
    assert list(figure.axes[0].lines[0].get_xdata())[-1] == 95
    assert list(figure.axes[0].lines[0].get_ydata())[-1] == pytest.approx(10)
    published = find_baseline("dreamerv3", tasks).scores
    normalized = [human_normalized_score(task, published[task]) for task in tasks]
    line = figure.axes[2].lines[1].get_ydata()
    assert line[0] == pytest.approx(np.mean(normalized))
    assert "bins of 10 agent steps; band: 95 %" in caption


def test_several_published_results(tmp_path):
    tasks = ("atari100k_boxing", "atari100k_pong")
    write_runs(tmp_path, tasks, seeds=1)
    axes = make_figure(tmp_path, "dreamerv3 simple").axes
    assert axes[0].lines[2].get_ydata()[0] == pytest.approx(7.75)  # mean of five runs
    scores = [
        human_normalized_score(task, score)
        for task, runs in find_baseline("simple", tasks).runs.items()
        for score in runs
        if task in tasks
    ]
    # of ten runs, two are left out at each end
    expected = np.mean(sorted(scores)[2:-2])
    assert axes[2].lines[2].get_ydata()[0] == pytest.approx(expected)


def test_tasks_without_a_normalization_are_scaled_to_their_range(tmp_path):
    write_runs(tmp_path, ("catch", "reach"), seeds=1)
    figure = make_figure(tmp_path)
    label = figure.axes[2].get_ylabel()
    assert label == "score, min-max\nnormalized per task"
    scaled = list(figure.axes[2].lines[0].get_ydata())
    assert scaled == pytest.approx([i / 9 for i in range(10)])
    assert "no band" in figure.texts[0].get_text()


def test_a_method_without_all_tasks_is_not_aggregated(tmp_path):
    write_runs(tmp_path, ("catch", "reach"), seeds=1)
    write_runs(tmp_path, ("catch",), seeds=2, offset=5.0, agent="iris")
    figure = make_figure(tmp_path)
    assert [len(axis.lines) for axis in figure.axes] == [2, 1, 1]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["dreamer (1 seed)", "iris (2 seeds)"]


def test_no_aggregate_panel_if_no_method_has_all_tasks(tmp_path):
    write_runs(tmp_path, ("catch",), seeds=1)
    write_runs(tmp_path, ("reach",), seeds=1, agent="iris")
    assert [axis.get_title() for axis in make_figure(tmp_path).axes] == [
        "catch",
        "reach",
    ]


def test_success_rates_and_metrics(tmp_path):
    run = write_run(tmp_path / "run", task="catch")
    lines = [
        {"step": 10 * i, "seconds": i, "episode/success": i % 2, "train/loss": 2.0}
        for i in range(1, 9)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "scores.jsonl").write_text(text)
    (run / "metrics.jsonl").write_text(text)
    axis = make_figure(tmp_path, key="episode/success", x="frames").axes[0]
    assert axis.get_ylabel() == "success rate"
    assert axis.get_ylim() == pytest.approx((-0.03, 1.03))
    axis = make_figure(tmp_path, key="train/loss", x="hours").axes[0]
    assert axis.get_xlabel() == "hours"
    assert {*axis.lines[0].get_ydata()} == {2.0}


def test_success_rates_of_a_run_are_in_its_metrics(tmp_path):
    for task, rate in (("catch", 0.25), ("reach", 0.75)):
        run = write_run(tmp_path / task, task=task)
        line = {"step": 10, "episode/success": rate}
        (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    axes = make_figure(tmp_path, key="episode/success").axes
    assert [axis.lines[0].get_ydata()[0] for axis in axes] == [0.25, 0.75, 0.5]
    assert axes[0].get_ylabel() == "success rate"


def test_labels_of_methods():
    runs = {"a": [0.0], "b": [0.0, 1.0]}
    labels = _method_labels({"dreamer": runs, "IRIS (published)": {"a": [0.0] * 5}})
    assert labels["dreamer"] == "dreamer (1–2 seeds)"
    assert labels["IRIS (published)"] == "IRIS (published, 5 seeds)"


def strings_of(path: Path) -> str:
    """Return the texts of an SVG file, which are comments of the drawn letters."""
    return "\n".join(re.findall("<!-- (.*?) -->", path.read_text()))


def test_files(tmp_path, capsys):
    runs = write_runs(tmp_path / "runs", ("catch",))
    write_runs(runs, ("catch",), offset=7.0, agent="iris")
    names = [str(tmp_path / f"figure.{suffix}") for suffix in ("png", "svg")]
    assert main(["plot", str(runs), "--out", *names]) == 0
    assert capsys.readouterr().out.splitlines() == names
    assert Image.open(names[0]).width == 1020  # a column of 3.4 inches
    texts = {Path(names[1]).read_text()}
    for kind in ("profile", "improvement"):
        assert main(["plot", str(runs), "--kind", kind, "--out", names[1]]) == 0
        texts.add(Path(names[1]).read_text())
    assert all("<svg" in text for text in texts)
    assert len(texts) == 3  # every kind of plot is another figure


def test_profiles_and_aggregates_of_atari(tmp_path, capsys):
    runs = write_runs(tmp_path / "runs", ("atari100k_boxing", "atari100k_pong"), 2)
    for kind in ("profile", "aggregates"):
        out = str(tmp_path / f"{kind}.svg")
        words = ["plot", str(runs), "--kind", kind, "--out", out]
        assert main([*words, "--baseline", "iris"]) == 0
        assert "IRIS (published" in strings_of(Path(out))
    assert main(["plot", str(runs), "--kind", "improvement"]) == 2
    assert "needs two methods" in capsys.readouterr().err
    words = ["plot", str(runs), "--kind", "profile", "--baseline", "dreamerv3"]
    assert main(words) == 2
    assert "only mean scores of dreamerv3 are published" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "needs at least one run folder"),
        (["nowhere"], "does not exist"),
        (["."], "contains no run"),
        (["RUNS", "--out", "plot.jpg"], "written as .png, .svg, .pdf"),
        (["RUNS", "--kind", "curve"], "Did you mean 'curves'"),
        (["RUNS", "--y", "x", "--baseline", "dreamerv3"], "Fix: remove --y"),
        (["RUNS", "--kind", "profile"], "have no common scale"),
        (["RUNS", "--kind", "aggregates"], "no normalized scores"),
        (["RUNS", "--x", "updates"], "choose from frames, step, hours"),
        (["RUNS", "--bins", "0"], "--bins must be at least 1"),
        (["RUNS", "--y", "episode/scor"], "Did you mean 'episode/score'"),
        (["RUNS", "--styel", "x"], "has no option --styel"),
        (["RUNS", "--configs", "debug"], "reads the settings of the runs"),
        (["RUNS", "--out", "no/folder.png"], "no/folder.png"),
    ],
)
def test_invalid_commands_exit_with_2(words, complaint, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    runs = write_runs(tmp_path / "runs", ("catch", "reach"), seeds=1)
    monkeypatch.chdir(tmp_path / "empty")
    words = [str(runs) if word == "RUNS" else word for word in words]
    assert main(["plot", *words]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert "Fix:" in error
