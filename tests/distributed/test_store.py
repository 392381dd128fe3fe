"""How ranks find each other: addresses, missing ranks, ports in use."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import pytest

from reverie.api import UserError
from reverie.distributed import store
from reverie.distributed.launch import Launch, describe_separate_task, find_launch

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def port(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    monkeypatch.delenv(store.AGENT_STORE, raising=False)
    monkeypatch.setattr(store, "START_TIMEOUT", 0.4)
    monkeypatch.setattr(store, "MESSAGE_SECONDS", 0.1)
    return number


@pytest.mark.parametrize("port", ["abc", "0", "99999", "-1", ""])
def test_an_invalid_port_is_refused(port):
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port}
    with pytest.raises(UserError, match="Fix: export MASTER_PORT=29500"):
        find_launch(env)
    assert find_launch({**env, "WORLD_SIZE": "1"}) == Launch()


def test_tasks_of_srun_without_an_address_are_named():
    env = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}
    assert "srun task 1 of 2" in describe_separate_task(env)
    assert not describe_separate_task({**env, "MASTER_ADDR": "node1"})
    assert not describe_separate_task({**env, "SLURM_STEP_NUM_TASKS": "1"})
    assert not describe_separate_task({})


def test_ranks_that_do_not_start_are_named(port):
    shown = []
    with pytest.raises(UserError, match=r"3 ranks, but ranks 1, 2 did not connect"):
        store.open_store(Launch(0, 3, 0, 3), TIMEOUT, shown.append)
    (message,) = shown
    assert f"ranks 1, 2 to connect to 127.0.0.1:{port}" in message


def test_a_rank_without_a_server_names_its_address(port):
    shown = []
    with pytest.raises(UserError, match=f"Rank 1 cannot connect .*127.0.0.1:{port}"):
        store.open_store(Launch(1, 2, 1, 2), TIMEOUT, shown.append)
    assert len(shown) == 1


def test_a_port_in_use_is_an_error_with_a_fix(port):
    message = pytest.raises(UserError, match=f"port {port}(.|\n)*Fix: set MASTER_PORT")
    with socket.create_server(("", port)), message:
        store.open_store(Launch(0, 2, 0, 2), TIMEOUT, print)


def test_a_rank_that_starts_later_is_waited_for(port, monkeypatch):
    monkeypatch.setattr(store, "START_TIMEOUT", 60.0)
    stores, is_waiting = {}, threading.Event()

    def open_rank_1():
        launch = Launch(1, 2, 1, 2)
        stores[1] = store.open_store(launch, TIMEOUT, lambda text: is_waiting.set())

    thread = threading.Thread(target=open_rank_1)
    thread.start()
    assert is_waiting.wait(60)
    stores[0] = store.open_store(Launch(0, 2, 0, 2), TIMEOUT, print)
    thread.join()
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
