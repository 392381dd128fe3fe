"""A run whose replay is kept on the device as well is the same run."""

from __future__ import annotations

import pytest
from test_resume import contents, same, settings, state_of, strip

from reverie.replay import device_copy as ring
from reverie.run.online_run import OnlineRun
from reverie.run.train import train


@pytest.mark.parametrize(
    "storage", ["disk", pytest.param("ram", marks=pytest.mark.slow)]
)
def test_the_ring_changes_nothing_also_across_a_resume(monkeypatch, tmp_path, storage):
    signal = {"replay.fracs.uniform": 0.5, "replay.fracs.priority": 0.5}
    more = {**signal, "dreamer.priosignal": "model"}
    on_host = settings(tmp_path / "host", 300, "catch", storage, **more)
    train(on_host)
    expected = contents(on_host)
    monkeypatch.setattr(ring, "fits", lambda replay, device: True)
    on_ring = settings(tmp_path / "ring", 300, "catch", storage, **more)
    train(settings(tmp_path / "ring", 180, "catch", storage, **more))
    train(on_ring)
    states = [strip(state_of(tmp_path / name)) for name in ("host", "ring")]
    same(*states)
    same(expected, contents(on_ring))


def test_the_start_says_what_the_device_holds(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ring, "fits", lambda replay, device: True)
    with OnlineRun(settings(tmp_path, 300, "catch", "ram")) as run:
        assert run.feed.ring is not None
        run.introduce()
    assert "of cpu memory" in capsys.readouterr().err
