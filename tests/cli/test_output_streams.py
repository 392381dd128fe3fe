"""Standard streams that are closed, full, or pipes without a reader."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import suppress

import pytest

from reverie.cli import main as cli
from reverie.cli import streams
from reverie.log.logger import Logger
from reverie.log.terminal import TerminalSink


@pytest.fixture
def run(monkeypatch):
    """Run a command as the program does, with standard output to this descriptor."""

    def run(words: str, descriptor: int) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["reverie", *words.split()])
            patch.setattr(sys, "stdout", open(descriptor, "w"))  # noqa: SIM115
            patch.setattr(cli.warnings, "showwarning", None)
            code = cli.main()
            sys.stdout.close()  # raises if something could not be discarded
            return code

    return run


def broken_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full_device() -> int:
    return os.open("/dev/full", os.O_WRONLY)


needs_full = pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="there is no /dev/full"
)
PRINTING = ["config", "config --explain run", "--help", "train --help", "--version"]


@pytest.mark.parametrize("words", PRINTING)
def test_commands_that_print_end_quietly_without_a_reader(run, capsys, words):
    assert run(words, broken_pipe()) == 0
    assert not capsys.readouterr().err


@needs_full
@pytest.mark.parametrize("words", PRINTING)
def test_output_that_cannot_be_written_is_an_error(run, capsys, words):
    assert run(words, full_device()) == 2
    error = capsys.readouterr().err
    assert "reverie: The output could not be written (No space left" in error
    assert error.count("\n") == 2
    assert "\n  Fix: " in error


@needs_full
def test_training_does_not_need_its_output(run, capsys, monkeypatch):
    monkeypatch.setitem(
        cli.COMMANDS, "train", cli.Command(lambda words: print("step 1") or 0, "")
    )
    assert run("train", full_device()) == 0
    assert run("train", broken_pipe()) == 0
    assert not capsys.readouterr().err


def test_a_broken_pipe_that_is_not_the_output_is_an_internal_error(run, monkeypatch):
    def fail(words):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setitem(cli.COMMANDS, "train", cli.Command(fail, ""))
    with pytest.raises(BrokenPipeError):
        run("train", os.open(os.devnull, os.O_WRONLY))


def log_steps(logger: Logger, steps: int) -> None:
    for step in range(steps):
        logger.add({"score": 1.0})
        logger.progress(step)
        logger.write(step)
        logger.clear_line()
    logger.close()


@pytest.mark.parametrize("descriptor", [broken_pipe, full_device])
def test_a_terminal_that_fails_does_not_stop_a_run(capsys, descriptor):
    if descriptor is full_device and not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    stream = open(descriptor(), "w")  # noqa: SIM115
    stream.isatty = lambda: True
    logger = Logger([TerminalSink("score", stream=stream)])
    log_steps(logger, 5)
    error = capsys.readouterr().err
    assert error.count("warning: Writing the terminal log failed") == 1
    with suppress(OSError):
        stream.close()


class Replaced:
    """A stream that user code has put in place of the standard output."""

    closed = False

    def __init__(self, error):
        self.error = error

    def write(self, text):
        raise self.error

    flush = isatty = write


@pytest.mark.parametrize(
    "stream", [object(), Replaced(ZeroDivisionError()), Replaced(SystemExit(0))]
)
def test_a_replaced_output_does_not_stop_a_run(monkeypatch, stream):
    logger = Logger([TerminalSink("score")])
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    log_steps(logger, 2)


CLOSED = """
import os, sys
numbers = [int(n) for n in sys.argv[1]]
from reverie.cli.streams import flush_output, open_standard_streams
open_standard_streams()
path = sys.argv[2]
with open(path, "w") as file:
    assert file.fileno() > 2, file.fileno()
    print("output")
    print("message", file=sys.stderr)
    os.write(2, b"message")
    assert sys.stdout.isatty() in (True, False)
    assert flush_output() is None
assert open(path).read() == ""
"""


@pytest.mark.parametrize("closed", ["1", "2", "12", "012"])
def test_no_file_takes_the_place_of_a_closed_stream(tmp_path, closed):
    redirect = " ".join(f"{n}>&-" for n in closed)
    path = tmp_path / "file"
    command = f'exec "$0" -c "$1" {closed} {path} {redirect}'
    words = ["sh", "-c", command, sys.executable, CLOSED]
    assert subprocess.run(words, timeout=60).returncode == 0
    assert path.exists()


def test_characters_that_a_stream_does_not_have_are_replaced(monkeypatch, tmp_path):
    file = open(tmp_path / "file", "w", encoding="ascii")  # noqa: SIM115
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        streams.open_standard_streams()
        print("Δ-IRIS")
        sys.stdout.close()
    assert (tmp_path / "file").read_text() == "?-IRIS\n"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        ImportError("libx.so: cannot open shared object file: Too many open files"),
        RuntimeError("unable to open shared memory object: Too many open files"),
        OSError(errno.EIO, "Input/output error", "/data/file"),
        OSError(errno.ESTALE, "Stale file handle"),
    ],
    ids=repr,
)
def test_errors_of_the_system_are_one_sentence_with_a_fix(error, monkeypatch, capsys):
    def fail(words):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "train", cli.Command(fail, ""))
    assert cli.main(["train"]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 2
    assert "\n  Fix: " in text


@pytest.mark.parametrize(
    "error", [OSError(errno.ECHILD, "No child"), OSError("text"), ImportError("x")]
)
def test_other_errors_are_internal(error, monkeypatch):
    def fail(words):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "train", cli.Command(fail, ""))
    with pytest.raises(type(error)):
        cli.main(["train"])
