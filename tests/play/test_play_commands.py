"""The commands `reverie play` and `reverie view`, without a running server."""

from __future__ import annotations

import asyncio
import inspect
import shutil

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from reverie import plugins
from reverie.cli.main import main
from reverie.play import server


@pytest.fixture
def served(monkeypatch):
    """Collects the arguments of servers that would be started."""
    calls = []

    signature = inspect.signature(server.serve)

    def serve(*arguments, **options):
        given = signature.bind(*arguments, **options)
        given.apply_defaults()
        values = given.arguments
        values["on_start"](f"http://{values['host']}:{values['port']}/?token=x")
        names = ("make_sessions", "host", "port", "open_page", "runs")
        calls.append(tuple(values[name] for name in names))

    monkeypatch.setattr(server, "serve", serve)
    return calls


def test_a_session_starts_in_the_mode_of_the_flag(run_folder, served, capsys):
    words = [str(run_folder("dreamer")), "-w", "--seed", "3", "--no-open"]
    assert main(["play", *words, "--port", "9000"]) == 0
    assert "Open http://127.0.0.1:9000/?token=x" in capsys.readouterr().out
    ((sessions, host, port, open_page, runs),) = served
    assert (host, port, open_page, runs) == ("127.0.0.1", 9000, False, None)
    group = asyncio.run(sessions().get(""))
    group.session.close()
    assert group.session.simulation.mode == "human-model"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["play"], "needs the folder of a run"),
        (["play", "RUN", "-x"], "has no flag -x"),
        (["play", "RUN", "-u", "-w"], "starts in one mode"),
        (["play", "RUN", "--port", "70000"], "--port cannot be 70000"),
        (["play", "RUN", "--configs", "debug"], "settings saved with the run"),
        (["view"], "needs a folder with runs"),
        (["view", "RUN", "--ports", "3"], "has no option --ports"),
    ],
)
def test_invalid_commands_exit_with_2(run_folder, served, words, complaint, capsys):
    run = str(run_folder("dreamer"))
    assert main([run if word == "RUN" else word for word in words]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert "Fix:" in error
    assert not served


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setattr(plugins.importlib.util, "find_spec", lambda name: None)
    assert main(["play", "nowhere"]) == 2
    assert "needs starlette, uvicorn, websockets" in capsys.readouterr().err


def test_view_lists_runs_and_opens_sessions(run_folder, served):
    folder = run_folder("dreamer")
    assert main(["view", str(folder.parent), "--host", "0.0.0.0"]) == 0
    ((sessions, host, _, open_page, runs),) = served
    assert (host, open_page) == ("0.0.0.0", True)
    names = {run["name"]: run["id"] for run in runs.summaries()}
    group = asyncio.run(sessions().get(names[folder.name]))
    group.session.close()


def test_view_exports_a_page(run_folder, tmp_path, capsys):
    runs = tmp_path / "runs"
    shutil.copytree(run_folder("dreamer"), runs / "one")
    assert main(["view", str(runs), "--export", str(tmp_path / "page")]) == 0
    output = capsys.readouterr()
    assert str(tmp_path / "page") in output.out
    assert "exporting run 1 of 1: one" in output.err
    assert "<html" in (tmp_path / "page" / "index.html").read_text()
    assert main(["view", str(runs), "--export", str(tmp_path / "new.html")]) == 2
    assert f"Fix: --export {tmp_path / 'new'}\n" in capsys.readouterr().err
    assert main(["view", str(tmp_path / "page"), "--export", str(tmp_path / "no")]) == 2
    assert not (tmp_path / "new.html").exists()
    assert not (tmp_path / "no").exists()
