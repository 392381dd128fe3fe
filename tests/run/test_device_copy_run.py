"""A run with a copy of the replay on the device gives the same results."""

from __future__ import annotations

import pytest
from state_helpers import assert_same
from test_resume import contents, read_state, settings, strip

from reverie.replay import device_copy
from reverie.run.online_run import OnlineRun
from reverie.run.train import train


@pytest.mark.extended
@pytest.mark.parametrize(
    "storage", ["disk", pytest.param("ram", marks=pytest.mark.slow)]
)
def test_a_device_copy_changes_nothing_also_across_a_resume(
    monkeypatch, tmp_path, storage
):
    signal = {"replay.fracs.uniform": 0.5, "replay.fracs.priority": 0.5}
    more = {**signal, "dreamer.priosignal": "model"}
    on_host = settings(tmp_path / "host", 300, "catch", storage, **more)
    train(on_host)
    expected = contents(on_host)
    monkeypatch.setattr(device_copy, "fits_on_device", lambda replay, device: True)
    on_device = settings(tmp_path / "device", 300, "catch", storage, **more)
    train(settings(tmp_path / "device", 180, "catch", storage, **more))
    train(on_device)
    states = [strip(read_state(tmp_path / name)) for name in ("host", "device")]
    assert_same(*states)
    assert_same(expected, contents(on_device))


def test_the_start_message_has_the_device_memory(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(device_copy, "fits_on_device", lambda replay, device: True)
    with OnlineRun(settings(tmp_path, 300, "catch", "ram")) as run:
        assert run.feed.device_copy is not None
        run.print_summary()
    assert "of cpu memory" in capsys.readouterr().err
