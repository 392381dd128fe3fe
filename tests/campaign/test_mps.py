"""The MPS daemon, which runs on the same GPU share."""

from __future__ import annotations

import os

import pytest

from reverie.campaign import mps
from reverie.campaign.gpu_sharing import GpuSharing
from reverie.campaign.mps import MpsDaemon, MpsUnavailable
from reverie.campaign.spec import CampaignConfig

CONTROL = """#!/bin/sh
read command
echo "$*$command $CUDA_VISIBLE_DEVICES" >> "$CUDA_MPS_PIPE_DIRECTORY/calls"
running="$CUDA_MPS_PIPE_DIRECTORY/running"
case "$*$command" in
    -d) touch "$running" ;;
    get_server_list) test -e "$running" ;;
    quit) rm "$running" ;;
esac
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Replace the control program by one that records its calls in this folder."""
    program = tmp_path / "bin" / mps.PROGRAM
    program.parent.mkdir()
    program.write_text(CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv(mps.PIPES, raising=False)
    monkeypatch.setattr(mps.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"reverie-mps-{os.getuid()}"


def calls(folder):
    """Return the arguments and commands of all calls of the control program."""
    return (folder / "calls").read_text().split()


def test_the_first_campaign_starts_the_daemon_and_the_last_one_stops_it(folder):
    first, second = MpsDaemon(), MpsDaemon()
    first.open()
    assert calls(folder) == ["get_server_list", "-d", "get_server_list"]
    assert first.variables[mps.PIPES] == str(folder)
    second.open()
    first.close()
    assert "quit" not in calls(folder)
    second.close()
    assert calls(folder)[-1] == "quit"
    assert not (folder / "running").exists()


def test_a_daemon_that_a_killed_campaign_left_is_used(folder):
    folder.mkdir(mode=0o700)
    (folder / "running").touch()
    daemon = MpsDaemon()
    daemon.open()
    assert calls(folder) == ["get_server_list"]
    daemon.close()
    assert not (folder / "running").exists()


def test_a_daemon_of_the_user_is_not_touched(folder, monkeypatch):
    monkeypatch.setenv(mps.PIPES, "/tmp/nvidia-mps")
    daemon = MpsDaemon()
    daemon.open()
    daemon.close()
    assert daemon.variables == {}
    assert not folder.exists()


@pytest.mark.parametrize("problem", ["link", "failure", "missing"])
def test_runs_take_turns_if_mps_cannot_be_used(folder, problem, monkeypatch, capsys):
    if problem == "link":
        folder.symlink_to(folder.parent / "bin")
    elif problem == "failure":
        (folder.parent / "bin" / mps.PROGRAM).write_text("#!/bin/sh\nexit 1\n")
    else:
        monkeypatch.setenv("PATH", "")
    with pytest.raises(MpsUnavailable):
        MpsDaemon().open()
    gpus = "reverie.campaign.gpu_sharing.visible_gpus"
    monkeypatch.setattr(gpus, lambda: ["0", "1"])
    sharing = GpuSharing(CampaignConfig(per_gpu="3"))
    sharing.open()
    assert sharing.variables == {}
    assert "runs on the same GPU take turns, without MPS" in capsys.readouterr().err
    sharing.close()


def test_only_runs_that_share_a_gpu_use_mps(folder, monkeypatch):
    gpus = "reverie.campaign.gpu_sharing.visible_gpus"
    monkeypatch.setattr(gpus, lambda: ["0", "1"])
    assert GpuSharing(CampaignConfig(per_gpu="1")).mps is None
    assert GpuSharing(CampaignConfig(mps=False)).mps is None
    sharing = GpuSharing(CampaignConfig())
    sharing.open()
    assert sharing.variables == {mps.PIPES: str(folder), mps.LOGS: str(folder)}
    sharing.close()
