"""A session runs in its own thread, follows commands and publishes views."""

from __future__ import annotations

import queue
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from reverie.datasets.episodes import open_episodes
from reverie.play.load import (
    AGENT_ENV,
    HUMAN_ENV,
    HUMAN_MODEL,
    RECORDED,
    load_run,
)
from reverie.play.session import Session


class Views:
    """Starts a session and waits for its views."""

    def __init__(self, session: Session):
        self.session, self._queue = session, queue.Queue()
        session.listeners.append(self._queue.put)
        session.fps = 200.0
        session.start()

    def wait(self, condition=lambda data: True, timeout: float = 120):
        """Return the first view whose data meets a condition."""
        while True:
            view = self._queue.get(timeout=timeout)
            if condition(view.data):
                return view

    def send(self, kind: str, **fields) -> None:
        self.session.send({"type": kind, **fields})


@pytest.fixture
def start(loaded):
    """A function that starts a session and returns its views."""
    sessions = []

    def make(*arguments, **options) -> Views:
        sessions.append(Session(loaded, *arguments, **options))
        return Views(sessions[-1])

    yield make
    for session in sessions:
        session.close()


def test_a_view_has_the_three_panes_and_the_traces(start):
    view = start().wait(lambda data: data["step"] == 2)
    assert [image.pane for image in view.images] == [
        "real",
        "model",
        "difference",
    ]
    data = view.data
    assert data["mode"] == AGENT_ENV
    assert data["action"] in ("left", "stay", "right")
    assert {"reward", "predicted reward", "continue", "value", "KL"} <= set(
        data["scalars"]
    )
    assert len(data["probs"][0]) == 3
    assert max(data["latents"]) < data["classes"]


def test_episodes_follow_each_other(start, monkeypatch):
    monkeypatch.setattr("reverie.play.session.END_SECONDS", 0.0)
    views = start()
    views.wait(lambda data: data["end_reason"] == "terminal state")
    views.wait(lambda data: data["episode"] == 1 and data["step"] == 0)


def test_pause_step_speed_and_seek(start):
    views = start()
    views.wait(lambda data: data["step"] == 1)
    views.send("pause", on=True)
    paused = views.wait(lambda data: data["paused"])
    views.send("step")
    step = views.wait().data["step"]
    assert step == paused.data["step"] + 1
    views.send("seek", step=0)
    assert views.wait().data["step"] == 0
    views.send("speed", speed=100)
    assert views.wait().data["speed"] == 8.0
    views.send("fork", step=1)
    assert views.wait().data["fork"] == 1


def test_held_and_tapped_keys_become_actions(start):
    views = start(HUMAN_MODEL)
    views.send("pause", on=True)
    views.wait(lambda data: data["paused"])
    views.send("keys", held=["ArrowLeft"], timestamp=1.5)
    views.send("step")
    view = views.wait(lambda data: data["step"] == 1)
    assert (view.data["action"], view.data["timestamp"]) == ("left", 1.5)
    views.send("restart", seed=4)
    views.send("pause", on=True)
    views.wait(lambda data: data["paused"] and data["seed"] == 4)
    views.send("keys", held=["ArrowRight"])
    views.send("keys", held=[])  # released before the step
    views.send("step")
    assert views.wait(lambda data: data["step"] == 1).data["action"] == "right"


def test_single_steps_continue_with_the_next_episode(start):
    views = start(HUMAN_ENV)
    views.send("pause", on=True)
    views.wait(lambda data: data["paused"])
    while not views.session.view.data["end_reason"]:
        step = views.session.view.data["step"]
        views.send("step")
        views.wait(lambda data, step=step: data["step"] > step)
    episode = views.session.view.data["episode"]
    views.send("step")
    view = views.wait(lambda data: data["episode"] > episode)
    assert view.data["step"] == 0
    assert view.data["paused"]


def test_a_mode_that_fails_is_reported_and_pauses(start, loaded):
    loaded.missing["env"] = "there is no simulator"
    views = start(HUMAN_MODEL)
    views.wait()
    views.send("mode", mode=HUMAN_ENV)
    view = views.wait(lambda data: data["message"])
    assert "there is no simulator" in view.data["message"]
    assert view.data["paused"]
    assert view.data["mode"] == HUMAN_MODEL


def test_an_error_of_the_environment_does_not_end_the_session(start, loaded, capsys):
    views = start()
    views.wait(lambda data: data["step"] == 1)

    def fail(action):
        raise ValueError("the simulator broke")

    loaded.env.step = fail
    view = views.wait(lambda data: data["message"])
    assert "the simulator broke" in view.data["message"]
    views.send("mode", mode=RECORDED)
    views.wait(lambda data: data["mode"] == RECORDED)
    assert "the simulator broke" in capsys.readouterr().err


def test_several_rollouts_have_a_pane_each(start):
    views = start(HUMAN_MODEL)
    views.wait()
    views.send("rollouts", count=3)
    view = views.wait(lambda data: data["rollouts"] == 3)
    assert [image.pane for image in view.images].count("model") == 3


def test_no_step_is_taken_without_a_page(start):
    views = start()
    views.wait()
    views.send("idle", on=True)
    views.send("speed", speed=2)
    last = views.wait(lambda data: data["speed"] == 2)
    time.sleep(0.1)
    assert views.session.view.number == last.number
    views.send("idle", on=False)
    views.wait(lambda data: data["step"] != last.data["step"])


@pytest.mark.parametrize(
    ("mode", "folder"), [(HUMAN_ENV, "env"), (HUMAN_MODEL, "model")]
)
def test_episodes_are_saved_if_the_user_answers_so(run_folder, tmp_path, mode, folder):
    copy = Path(shutil.copytree(run_folder("dreamer"), tmp_path / "run"))
    session = Session(load_run(copy), mode, ask_to_save=True)
    views = Views(session)
    asked = views.wait(lambda data: data["awaits_save_answer"], timeout=60)
    views.send("save_episode", on=False)
    views.wait(lambda data: data["episode"] == 1)
    views.wait(lambda data: data["awaits_save_answer"], timeout=60)
    views.send("save_episode", on=True)
    saved = views.wait(lambda data: data["message"].startswith("Saved"))
    later = views.wait(lambda data: data["step"] > saved.data["step"])
    assert (
        later.data["message"] == saved.data["message"]
    )  # it is shown for some seconds
    session.close()
    reader = open_episodes(copy / "recordings" / folder)
    (name,) = reader.names()
    episode = reader.read_valid(name)
    assert episode["is_first"].tolist()[0]
    assert episode["is_last"].tolist()[-1]
    assert not episode["action"][-1].any()
    if mode == HUMAN_ENV:
        assert len(episode["reward"]) == asked.data["step"] + 1
        assert np.abs(episode["reward"]).sum() == 1
    (video,) = (copy / "media" / "recordings").iterdir()
    assert video.suffix in (".mp4", ".gif")
    assert "recordings" in {
        entry["source"] for entry in load_run(copy).episodes.table()
    } or (folder == "model")
