"""Actors on a Ray cluster of two nodes: kills and lost nodes lose no step silently."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from actor_helpers import check_steps, settings, use_fake

from reverie.run.checkpoint import Checkpoints
from reverie.run.online_run import OnlineRun

pytestmark = pytest.mark.scale
ray = pytest.importorskip("ray")
SECONDS = 120
"""Limit of each wait."""
COMMAND = (
    *("train", "--configs", "debug", "--task", "actor_helpers:make_counting"),
    *("--agent", "random", "--run.clock", "steps", "--run.save_every", "200"),
    *("--actors.count", "2", "--actors.envs", "2", "--logger.outputs", "jsonl"),
    *("--replay.capacity", "1e6"),
)


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def collect_until(run: OnlineRun, condition) -> None:
    """Collect until a condition on the metrics of the actors holds."""
    end = time.monotonic() + SECONDS
    while not condition(run.collector.metrics()):
        assert time.monotonic() < end, run.collector.metrics()
        for _ in range(20):
            run.collect()


def collect_steps(run: OnlineRun, steps: int) -> None:
    goal = run.clock.step + steps
    while run.clock.step < goal:
        run.collect()


def test_every_step_is_accounted_for_when_actors_and_nodes_end(cluster, tmp_path):
    node = cluster.add_node(num_cpus=1)
    flags = {"actors.address": cluster.address, "replay.capacity": 1_000_000}
    with OnlineRun(settings(tmp_path, **flags)) as run:
        run.start()
        collect_until(run, lambda x: x["actors/running"] == 2)
        collect_steps(run, 400)
        handle = run.envs.transport._actors[1]
        pid = ray.get(handle.__ray_call__.remote(lambda actor: os.getpid()))
        os.kill(pid, signal.SIGKILL)
        collect_until(run, lambda x: x["actors/restarts"] and x["actors/running"] == 2)
        collect_steps(run, 400)

        cluster.remove_node(node, allow_graceful=False)
        collect_until(run, lambda x: x["actors/restarts"] == 2)
        collect_steps(run, 400)
        assert len(run.envs.running) == 1  # the other waits for a free core
        cluster.add_node(num_cpus=1)
        collect_until(run, lambda x: x["actors/running"] == 2)
        collect_steps(run, 400)
        metrics = run.collector.metrics()
        assert metrics["actors/duplicates"] == 0
        assert 1 <= metrics["actors/truncated_episodes"] <= 4
        check_steps(run.replay, metrics["actors/truncated_episodes"])
        assert len(run.replay) == run.clock.step
        run.save()


def start_learner(path: Path) -> subprocess.Popen:
    here = Path(__file__).parent
    paths = [str(here.parent.parent), str(here), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", "reverie", *COMMAND, "--logdir", str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        start_new_session=True,
        cwd=path.parent,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, what: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def processes_of(path: Path) -> list[str]:
    """Return the processes whose current folder is that of the learner."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(process / "cwd")) == path.parent:
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it has ended
    return [line for line in found if line]


def test_a_killed_learner_leaves_no_process_and_resumes(tmp_path, monkeypatch):
    path = tmp_path / "run"
    checkpoints = Checkpoints(path / "ckpt")
    learner = start_learner(path)
    wait_for(lambda: len(checkpoints.paths()) > 1, "no checkpoint")
    assert any("ActorProcess" in line for line in processes_of(path))
    learner.kill()
    learner.wait()
    wait_for(lambda: not processes_of(path), "processes are left after SIGKILL")
    killed = checkpoints.paths()[-1].name

    learner = start_learner(path)
    wait_for(lambda: checkpoints.paths()[-1].name > killed, "the run was not resumed")
    os.killpg(learner.pid, signal.SIGINT)  # as Ctrl-C: to all processes of the group
    _, output = learner.communicate(timeout=SECONDS)
    assert learner.returncode == 130, output
    assert "Resumed" in output
    wait_for(lambda: not processes_of(path), "processes are left after Ctrl-C")

    use_fake(monkeypatch)  # the replay is read without Ray
    with OnlineRun(settings(path, **{"replay.capacity": 1_000_000})) as run:
        run.start()
        collect_steps(run, 100)
        metrics = run.collector.metrics()
        check_steps(run.replay, metrics["actors/truncated_episodes"])
        assert len(run.replay) == run.clock.step
