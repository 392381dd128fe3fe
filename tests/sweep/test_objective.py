"""Metrics of a run as one number."""

from __future__ import annotations

import json
import math

from reverie.sweep.objective import (
    metric_names,
    metric_not_found,
    read_metric,
    summarize,
)


def test_metrics_are_read_from_every_file_of_a_run(tmp_path):
    (tmp_path / "scores.jsonl").write_text(
        '{"step": 1, "episode/score": 2}\n{"step": 3, "episode/score": 4}\n{"torn'
    )
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 3, "episode/score": 3, "loss": null}\n{"step": 4, "loss": 0.5}\n'
    )
    curves = {"image": {"model": [1.0, 3.0, None]}}
    summary = {"success": 0.5, "loss": {"action": 0.25}, "openloop": curves}
    result = {"task": "reach", "seed": 3, "summary": summary}
    (tmp_path / "eval.json").write_text(json.dumps(result))
    assert read_metric(tmp_path, "episode/score") == [(1, 2), (3, 4)]
    loss = read_metric(tmp_path, "loss")
    assert math.isnan(loss[0][1])
    assert loss[1] == (4, 0.5)
    assert read_metric(tmp_path, "success") == [(0, 0.5)]
    assert read_metric(tmp_path, "loss/action") == [(0, 0.25)]
    assert read_metric(tmp_path, "openloop/image/model") == [(0, 2.0)]
    assert read_metric(tmp_path, "nothing") == []
    assert "step" not in metric_names(tmp_path)
    assert set(metric_names(tmp_path)) >= {"loss", "success", "loss/action"}
    assert "Did you mean 'success'?" in str(metric_not_found(tmp_path, "sucess"))


def test_series_is_summarized_as_one_number():
    points = [(1.0, 5.0), (2.0, 1.0), (3.0, 3.0), (4.0, math.nan), (5.0, 4.0)]
    assert summarize(points, "last", 1, "min") == 4
    assert summarize(points, "best", 1, "min") == 1
    assert summarize(points, "best", 1, "max") == 5
    assert summarize(points[:3], "mean", 2, "min") == 2
    assert math.isnan(summarize(points, "mean", 2, "min"))
    assert math.isnan(summarize([(1.0, math.nan)], "best", 1, "min"))
