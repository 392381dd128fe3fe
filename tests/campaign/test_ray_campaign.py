"""Workers of a campaign as tasks of a Ray cluster on this machine."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from campaign_helpers import make_run, make_spec, starts

from reverie.api import UserError
from reverie.campaign import ray_workers, worker
from reverie.campaign.queue import Queue
from reverie.campaign.spec import CampaignConfig
from reverie.run.actors import ray_transport
from reverie.run.actors.config import ActorsConfig
from reverie.run.actors.ray_transport import check_reachable
from reverie.run.signals import Interrupted


@pytest.mark.parametrize(
    "text", ["auto", "jobs=x", "jobs=0", "num_gpus=one", "partition=gpu"]
)
def test_invalid_options_of_ray_are_refused(text):
    with pytest.raises(UserError, match="--ray address=auto"):
        ray_workers.parse_ray_options(text)
    with pytest.raises(UserError, match="cannot be used together"):
        CampaignConfig(slurm="jobs=1", ray="jobs=1")


def test_workers_that_need_more_than_any_machine_has(capsys):
    machines = [{"Alive": True, "Resources": {"CPU": 4.0}}, {"Alive": False}]
    ray = SimpleNamespace(nodes=lambda: machines)
    ray_workers.check_resources(ray, "local", CPU=4, GPU=0)
    assert not capsys.readouterr().err
    ray_workers.check_resources(ray, "auto", CPU=4, GPU=1)
    assert "worker reserves is 1, but no machine" in capsys.readouterr().err
    with pytest.raises(UserError, match="num_cpus=4"):
        ray_workers.check_resources(ray, "local", CPU=8, GPU=0)


def test_address_without_ray_is_an_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_reachable(address)
        check_reachable(address.replace("127.0.0.1", "[127.0.0.1]"))
    started = []
    ray = SimpleNamespace(init=lambda **options: started.append(options))
    with pytest.raises(UserError, match=f"Could not connect to Ray at {address}"):
        ray_workers.connect(ray, address)
    with pytest.raises(UserError, match=f"Could not connect to Ray at {address}"):
        ray_transport.connect(ray, ActorsConfig(count=1, address=address))
    assert not started
    check_reachable("auto")


@pytest.mark.scale
def test_tasks_of_ray_are_workers(tmp_path, program):
    pytest.importorskip("ray")
    folder = tmp_path / "campaign"
    runs = [make_run("a"), make_run("b"), make_run("slow", steps=2000, pace=0.05)]
    options = {"ray": "address=local,jobs=2,num_cpus=0.5", "retries": 0}
    spec = worker.create_campaign(make_spec(folder, runs, **options))
    queue = Queue(folder)

    def stop_when_half_done():
        end = time.monotonic() + 300
        while time.monotonic() < end:
            finished = [s for s in queue.statuses() if s.state == "finished"]
            if len(finished) == 2 and (folder / "runs" / "slow" / "saved").exists():
                break
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop_when_half_done, daemon=True).start()
    with pytest.raises(Interrupted):
        ray_workers.submit(spec, program)
    states = {status.run.name: status.state for status in queue.statuses()}
    assert states == {"a": "finished", "b": "finished", "slow": "stopped"}
    (folder / "runs" / "slow" / "saved").write_text("1998")
    assert {status.state for status in ray_workers.submit(spec, program)} == {
        "finished"
    }
    assert [starts(folder, name) for name in ("a", "b", "slow")] == [1, 1, 2]
