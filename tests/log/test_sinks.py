"""Sinks for TensorBoard, W&B, Scope and the media folder."""

from __future__ import annotations

import io
import json
import struct
import sys
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from reverie.api import UserError
from reverie.log.logger import Logger, LoggerConfig, make_logger
from reverie.log.media import MediaSink
from reverie.log.record import Record
from reverie.log.scope import ScopeSink
from reverie.log.tensorboard import TensorboardSink
from reverie.log.wandb import WandbSink


def full_record(step=7):
    """Return a record with a scalar, a text, an image and a video."""
    video = np.zeros((3, 8, 12, 3), np.uint8)
    video[:, :, :, 0] = np.array([0, 100, 200], np.uint8)[:, None, None]
    return Record(
        step,
        scalars={"train/loss/dyn": 1.5},
        texts={"report/params/summary": "12 parameters"},
        images={"report/grey": np.full((4, 6, 1), 9, np.uint8)},
        videos={"report/openloop/image": video},
    )


def test_media_files_are_named_by_key_and_step_and_the_newest_kept(tmp_path):
    sink = MediaSink(tmp_path, keep=2)
    for step in (1, 5, 20):
        sink.write(full_record(step))
    sink.truncate_after(5)
    sink.close()
    names = sorted(path.stem for path in (tmp_path / "media").iterdir())
    assert names == [
        "report-grey-000000000005",
        "report-grey-000000000020",
        "report-openloop-image-000000000005",
        "report-openloop-image-000000000020",
    ]
    (png, *_) = (tmp_path / "media").glob("*.png")
    assert Image.open(png).size == (192, 128)  # enlarged


def test_metrics_with_the_same_prefix_are_kept_separately(tmp_path):
    sink = MediaSink(tmp_path, keep=1)
    image = np.zeros((4, 4, 3), np.uint8)
    for step in (1, 2):
        sink.write(Record(step, images=dict.fromkeys(("a", "a-b", "a-1"), image)))
    names = sorted(path.stem for path in (tmp_path / "media").iterdir())
    assert names == ["a-000000000002", "a-1-000000000002", "a-b-000000000002"]


def read_events(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    return events.Reload()


def test_tensorboard_reads_scalars_text_images_and_videos(tmp_path):
    pytest.importorskip("tensorboard")
    sink = TensorboardSink(tmp_path)
    sink.write(full_record())
    sink.write(Record(8))
    sink.close()
    events = read_events(tmp_path)
    (scalar,) = events.Scalars("train/loss/dyn")
    assert (scalar.step, scalar.value) == (7, 1.5)
    (text,) = events.Tensors("report/params/summary")
    assert text.tensor_proto.string_val[0] == b"12 parameters"
    (grey,) = events.Images("report/grey")
    assert Image.open(io.BytesIO(grey.encoded_image_string)).size == (6, 4)
    (video,) = events.Images("report/openloop/image")
    video = Image.open(io.BytesIO(video.encoded_image_string))
    assert (video.format, video.size, video.n_frames) == ("GIF", (12, 8), 3)


def test_tensorboard_ignores_steps_that_a_resumed_run_repeats(tmp_path):
    pytest.importorskip("tensorboard")
    first = TensorboardSink(tmp_path)
    for step in (1, 2, 3):
        first.write(Record(step, scalars={"x": float(step)}))
    second = TensorboardSink(tmp_path)
    second.truncate_after(2)
    second.write(Record(3, scalars={"x": 33.0}))
    values = [(e.step, e.value) for e in read_events(tmp_path).Scalars("x")]
    assert values == [(1, 1.0), (2, 2.0), (3, 33.0)]


@pytest.fixture
def fake_wandb(monkeypatch):
    """A wandb module that stores all calls."""
    module = ModuleType("wandb")
    module.calls, module.logged, module.finished = [], [], []

    def init(**kwargs):
        module.calls.append(kwargs)
        return SimpleNamespace(
            log=lambda entry, step: module.logged.append((step, entry)),
            finish=lambda: module.finished.append(True),
        )

    module.init = init
    module.Image = lambda array: ("image", array.shape)
    module.Video = lambda path, format: ("video", path, format)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_all_metrics_and_resumes_with_the_same_id(
    tmp_path, fake_wandb, monkeypatch
):
    monkeypatch.setenv("WANDB_PROJECT", "project")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WandbSink(tmp_path, settings={"seed": 1})
    sink.write(full_record())
    sink.truncate_after(7)
    sink.close()
    WandbSink(tmp_path)
    WandbSink(tmp_path / "other")
    first, second, other = fake_wandb.calls
    assert (first["project"], first["entity"], first["mode"]) == (
        "project",
        "team",
        "offline",
    )
    assert (first["dir"], first["config"]) == (str(tmp_path), {"seed": 1})
    assert first["id"] == second["id"] != other["id"]
    ((step, entry),) = fake_wandb.logged
    assert step == 7
    assert entry["train/loss/dyn"] == 1.5
    assert entry["report/grey"] == ("image", (4, 6, 3))
    kind, path, _ = entry["report/openloop/image"]
    assert kind == "video"
    assert path.startswith(str(tmp_path))
    assert fake_wandb.finished == [True]


@pytest.mark.parametrize("variable", ["WANDB_DIR", "WANDB_LOGDIR"])
def test_wandb_files_are_stored_where_the_environment_says(
    tmp_path, fake_wandb, monkeypatch, variable
):
    monkeypatch.setenv(variable, str(tmp_path / "files"))
    monkeypatch.setenv("WANDB_NAME", "first try")
    monkeypatch.setenv("WANDB_PROJECT", "")
    WandbSink(tmp_path / "run")
    (call,) = fake_wandb.calls
    assert (call["dir"], call["name"]) == (str(tmp_path / "files"), "first try")
    assert call["project"] == "reverie"


def test_the_wandb_package_stores_all_metrics_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_DIR", "WANDB_LOGDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for step in (7, 8):  # the second one resumes the run
        sink = WandbSink(tmp_path, settings={"seed": 3})
        sink.write(full_record(step))
        sink.close()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert {file.stem.removeprefix("run-") for file in files} == {
        (tmp_path / "wandb/run-id.txt").read_text()
    }
    for step, file in zip((7, 8), files, strict=True):
        rows, settings = read_wandb(file)
        (row,) = (row for row in rows if "train/loss/dyn" in row)
        assert row["_step"] == step
        assert row["train/loss/dyn"] == 1.5
        assert row["report/params/summary"] == "12 parameters"
        keys = ("_type", "width", "height")
        assert [row[f"report/grey/{key}"] for key in keys] == ["image-file", 6, 4]
        assert row["report/openloop/image/_type"] == "video-file"
        media = file.parent / "files" / row["report/openloop/image/path"]
        with Image.open(media) as gif:
            assert (gif.format, gif.size, gif.n_frames) == ("GIF", (12, 8), 3)
        assert settings == {"seed": 3}


def read_wandb(path):
    """Return the logged rows and the config in the transaction log of a W&B run."""
    from wandb.proto import wandb_internal_pb2

    def read_records():
        log = read_leveldb_log(path.read_bytes())
        return [wandb_internal_pb2.Record.FromString(data) for data in log]

    deadline = time.monotonic() + 120
    records = read_records()
    while not any(x.WhichOneof("record_type") == "exit" for x in records):
        assert time.monotonic() < deadline, "W&B did not write the end of the run"
        time.sleep(0.05)  # it writes in another process, also after `finish`
        records = read_records()
    rows, settings = [], {}
    for record in records:
        if record.WhichOneof("record_type") == "run":
            for item in record.run.config.update:
                settings[item.key] = json.loads(item.value_json)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            names = (item.key or "/".join(item.nested_key) for item in items)
            values = (json.loads(item.value_json) for item in items)
            rows.append(dict(zip(names, values, strict=True)))
    return rows, {k: v for k, v in settings.items() if not k.startswith("_")}


def read_leveldb_log(data):
    """Yield the records of a file in the log format of LevelDB.

    A record has one or more parts with checksum, size and type, in blocks of 32 KB.
    """
    assert data[:4] == b":W&B"
    offset, parts = 7, []
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:  # the end of a block is not used
            offset += 32768 - offset % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, offset)
        parts.append(data[offset + 7 : offset + 7 + size])
        offset += 7 + size
        if kind in (1, 4):  # complete, or the last part
            yield b"".join(parts)
            parts = []


def test_a_server_that_is_not_reachable_does_not_stop_the_run(
    tmp_path, fake_wandb, monkeypatch, capsys
):
    def init(**kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(fake_wandb, "init", init)
    logger = make_logger(LoggerConfig(outputs=("wandb", "jsonl")), tmp_path)
    assert [sink.name for sink in logger.sinks] == ["jsonl"]
    assert "wandb log cannot start, the run continues" in capsys.readouterr().err


def test_scope_gets_all_metrics_and_drops_failed_writes(tmp_path, monkeypatch):
    opened = []

    class Writer:
        def __init__(self, logdir, workers):
            self.entries, self.flushed, self.broken = [], 0, False
            opened.append(self)

        def add(self, step, mapping):
            self.entries.append((step, mapping))

        def flush(self):
            if self.broken:
                raise OSError(28, "No space left on device")
            self.flushed += 1

    module = ModuleType("scope")
    module.Writer = Writer
    monkeypatch.setitem(sys.modules, "scope", module)
    sink = ScopeSink(tmp_path)
    sink.write(full_record())
    names = {name for _, mapping in opened[0].entries for name in mapping}
    assert {"train/loss/dyn", "report/openloop/image", "report/grey"} <= names
    opened[0].broken = True
    with pytest.raises(OSError, match="No space"):
        sink.write(full_record(8))
    sink.truncate_after(3)
    sink.write(full_record(9))
    sink.close()
    assert {step for step, _ in opened[1].entries} == {9}


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "scope"])
def test_a_missing_package_names_its_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"pip install -e '.*\[{name}\]'"):
        make_logger(LoggerConfig(outputs=(name,)), tmp_path)


def test_a_package_that_cannot_be_imported_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("from json import no_such_name")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"cannot import the wandb package .*no_such"):
        WandbSink(tmp_path)


def test_images_that_cannot_be_written_do_not_stop_the_run(tmp_path, capsys):
    sink = MediaSink(tmp_path)
    (tmp_path / "media").write_text("a file where the folder should be")
    logger = Logger([sink])
    logger.add({"picture": np.zeros((4, 4, 3), np.uint8)})
    logger.write(1)
    assert "media log failed" in capsys.readouterr().err
