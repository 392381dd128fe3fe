import errno
import hashlib
import json
import math
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from full_disk import file_size_limit

from reverie.api import UserError
from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints
from reverie.storage.os_errors import DiskFull


def state(seed: int) -> dict:
    return {
        "agent": {
            "weight": torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)),
            "half": torch.ones(2, dtype=torch.bfloat16) * seed,
            "opt": {"step": seed, "rate": 0.1, "gone": None, "ok": True},
        },
        "loop": {
            "rng": {"state": 2**100 + seed, "inc": 7},
            "row": np.arange(5, dtype=np.uint8) + seed,
            "list": [torch.zeros(1) + seed, "text", math.inf],
            "$odd": 1,
        },
    }


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and (a == b).all()
    return type(a) is type(b) and a == b


def test_saved_state_is_restored_with_its_types(tmp_path):
    path = Checkpoints(tmp_path).save(10, state(1))
    found = {part: checkpoint.read_part(path, part) for part in ("agent", "loop")}
    assert same(found, state(1))


def test_the_newest_checkpoint_is_found_by_its_number(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    checkpoints.save(10, state(1))
    # A later save may have a smaller step: after a return to an older checkpoint.
    last = checkpoints.save(5, state(2))
    assert Checkpoints(tmp_path).newest() == last


@pytest.mark.parametrize("harm", ["truncate", "flip", "remove", "manifest", "list"])
def test_a_damaged_checkpoint_is_quarantined_and_the_previous_one_used(tmp_path, harm):
    checkpoints = Checkpoints(tmp_path)
    good = checkpoints.save(10, state(1))
    bad = checkpoints.save(20, state(2))
    victim = bad / (
        "manifest.json" if harm in ("manifest", "list") else "agent.safetensors"
    )
    data = bytearray(victim.read_bytes())
    if harm == "remove":
        victim.unlink()
    elif harm == "list":
        victim.write_text('{"files": [], "parts": []}')
    elif harm == "flip":
        data[-3] ^= 4
        victim.write_bytes(data)
    else:
        victim.write_bytes(data[: len(data) // 2])
    with pytest.warns(UserWarning, match=bad.name):
        assert checkpoints.newest() == good
    assert (tmp_path / "quarantine" / bad.name).exists()
    assert checkpoints.newest() == good


def test_pruning_keeps_the_last_and_every_nth_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_every=3)
    for step in range(7):
        checkpoints.save(step, {"loop": {"step": step}})
        (tmp_path / ".partial-000000000099-000099").mkdir()
        kept = checkpoints.prune()
    saves = [int(path.name.split("-")[1]) for path in kept]
    assert saves == [3, 6, 7]
    assert kept == checkpoints.paths()
    assert not list(tmp_path.glob(".partial-*"))


def test_pruning_keeps_the_first_checkpoint_after_every_nth_epoch(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_epochs=3)
    for epoch in (0, 1, 2, 3, 3, 5, 7, 8, 9, 10_000, 10_000):
        path = checkpoints.save(100 * epoch, {"agent": {}, "loop": {}}, epoch)
        kept = checkpoints.prune()
        assert checkpoints.newest() == path
    names = [
        "000000000300-000004-epoch0003",
        "000000000700-000007-epoch0007",  # the first after epoch 6
        "000000000900-000009-epoch0009",
        "000001000000-000010-epoch10000",
        "000001000000-000011-epoch10000",
    ]
    assert [path.name for path in kept] == names
    assert checkpoints.step == 1_000_000
    assert checkpoint.find_checkpoint(tmp_path / names[0]).name == names[0]
    assert checkpoint.find_checkpoint(tmp_path).name == names[-1]


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    good = checkpoints.save(1, state(1))
    large = {"agent": {"weight": torch.zeros(1_000_000)}}
    with (
        file_size_limit(100_000),
        pytest.raises(DiskFull, match="disk is full"),
    ):
        checkpoints.save(2, large)
    assert checkpoints.newest() == good
    assert os.listdir(tmp_path) == [good.name]


def test_a_pickle_in_a_checkpoint_is_not_executed(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "boom"),))

    path = Checkpoints(tmp_path).save(1, state(1))
    for name in ("agent.safetensors", "agent.json"):
        good = (path / name).read_bytes()
        (path / name).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(UserError):
            checkpoint.read_part(path, "agent")
        (path / name).write_bytes(good)
    assert not (tmp_path / "boom").exists()


def test_another_checkpoint_format_is_an_error(tmp_path):
    path = Checkpoints(tmp_path).save(1, state(1))
    facts = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**facts, "format": 99}))
    with pytest.raises(UserError, match="format 99"):
        Checkpoints(tmp_path).newest()


def test_a_checkpoint_is_found_in_a_run_or_ckpt_folder_or_by_name(tmp_path):
    path = Checkpoints(tmp_path / "ckpt").save(1, state(1))
    for place in (tmp_path, tmp_path / "ckpt", path):
        assert checkpoint.find_checkpoint(place) == path
    with pytest.raises(UserError, match="does not exist"):
        checkpoint.find_checkpoint(tmp_path / "nowhere")


def test_the_first_nonfinite_tensor_is_named():
    good = {"a": {"w": torch.ones(3)}, "n": torch.zeros(2, dtype=torch.int64)}
    assert checkpoint.find_nonfinite(good) is None
    good["a"]["v"] = torch.tensor([1.0, float("nan")])
    assert checkpoint.find_nonfinite(good) == "a/v"


def test_a_reader_skips_damaged_checkpoints_and_moves_nothing(tmp_path):
    """An evaluation may read a folder while a training run writes to it."""
    saves = Checkpoints(tmp_path / "ckpt", keep_last=5)
    good = saves.save(1, {"agent": {"w": torch.ones(3)}, "loop": {}})
    bad = saves.save(2, {"agent": {"w": torch.ones(3)}, "loop": {}})
    (bad / "agent.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="skipped. Trying the previous"):
        assert checkpoint.find_checkpoint(tmp_path) == good
    assert bad.exists()
    (good / "agent.safetensors").write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="skipped. There is no older"),
        pytest.warns(UserWarning, match="Trying the previous"),
        pytest.raises(UserError, match=r"Fix: "),
    ):
        checkpoint.find_checkpoint(tmp_path)


def test_a_reader_searches_again_if_checkpoints_were_replaced(tmp_path, monkeypatch):
    saves = Checkpoints(tmp_path / "ckpt", keep_last=1)
    saves.save(1, state(1))
    verify, newer = checkpoint.verify, []

    def replaced_meanwhile(path, required):
        if not newer:
            newer.append(saves.save(2, state(2)))
            saves.prune()
        verify(path, required)

    monkeypatch.setattr(checkpoint, "verify", replaced_meanwhile)
    assert checkpoint.find_checkpoint(tmp_path) == newer[0]


def test_checkpoint_numbers_may_have_more_digits(tmp_path):
    saves = Checkpoints(tmp_path)
    (tmp_path / "000000000005-999999").mkdir()
    path = saves.save(7, {"loop": {}})
    assert saves.paths()[-1] == path
    assert path.name == "000000000007-1000000"


def test_keys_with_slashes_do_not_collide(tmp_path):
    state = {"a/b": torch.zeros(2), "a": {"b": torch.ones(3)}}
    path = Checkpoints(tmp_path).save(1, {"agent": state})
    found = checkpoint.read_part(path, "agent")
    assert found["a/b"].tolist() == [0, 0]
    assert found["a"]["b"].tolist() == [1, 1, 1]


def change_manifest(path, change) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def outside_file(manifest, name: str) -> None:
    manifest["files"][name] = {
        "bytes": 4,
        "sha256": hashlib.sha256(b"kept").hexdigest(),
    }


INVALID_MANIFESTS = {
    "no files": (lambda m: m.update(files={}), "does not list agent.json"),
    "nothing": (lambda m: m.update(files={}, parts=[]), "no agent and no loop"),
    "no loop": (lambda m: m["parts"].remove("loop"), "it has no loop"),
    "no arrays": (
        lambda m: m["files"].pop("agent.safetensors"),
        "does not list agent.safetensors",
    ),
    "no checksum": (lambda m: m["files"].update({"loop.json": None}), "no checksum"),
    "parent": (lambda m: outside_file(m, "../../a.txt"), "not a file name"),
    "empty": (lambda m: outside_file(m, ""), "not a file name"),
    "null byte": (lambda m: outside_file(m, "a\0"), "not a file name"),
    "part": (lambda m: m["parts"].append("../x"), "not a file name"),
    "number": (lambda m: m["parts"].append(3), "not a string"),
}


@pytest.mark.parametrize("case", INVALID_MANIFESTS)
def test_a_manifest_must_list_all_parts_and_only_files_in_the_folder(tmp_path, case):
    change, problem = INVALID_MANIFESTS[case]
    (tmp_path / "a.txt").write_text("kept")
    checkpoints = Checkpoints(tmp_path / "ckpt")
    good, bad = (checkpoints.save(i, state(i)) for i in (1, 2))
    change_manifest(bad, change)
    with pytest.warns(UserWarning, match=problem):
        assert checkpoints.newest() == good
    assert (tmp_path / "a.txt").read_text() == "kept"


def test_a_checkpoint_without_a_part_that_the_run_needs_is_damaged(tmp_path):
    Checkpoints(tmp_path).save(1, state(1))
    assert Checkpoints(tmp_path).newest()
    needs_more = Checkpoints(tmp_path, required=("agent", "loop", "replay"))
    with pytest.warns(UserWarning, match="it has no replay"):
        assert needs_more.newest() is None


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", ["agent.json", "agent.safetensors", "manifest.json"])
def test_parts_must_be_regular_files(tmp_path, name, kind):
    checkpoints = Checkpoints(tmp_path / "ckpt")
    good, bad = (checkpoints.save(i, state(i)) for i in (1, 2))
    if kind == "link" and name == "manifest.json":
        return  # its contents are checked
    (bad / name).rename(tmp_path / "target")
    if kind == "link":
        (bad / name).symlink_to(tmp_path / "target")
    else:
        os.mkfifo(bad / name)
    with pytest.warns(UserWarning, match="symbolic link|not a regular|unreadable"):
        assert checkpoints.newest() == good
    if name == "agent.safetensors" and kind == "pipe":
        with pytest.raises(UserError, match="not a regular file"):
            checkpoint.read_part(checkpoints.quarantine / bad.name, "agent")


def test_links_in_place_of_checkpoints_are_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.txt").write_text("kept")
    checkpoints = Checkpoints(tmp_path / "ckpt", keep_last=1)
    checkpoints.save(1, state(1))
    (tmp_path / "ckpt" / ".partial-000000000002-000002").symlink_to(outside)
    second = checkpoints.save(2, state(2))
    assert checkpoints.newest() == second
    (tmp_path / "ckpt" / ".partial-000000000009-000009").symlink_to(outside)
    os.mkfifo(tmp_path / "ckpt" / ".partial-000000000008-000008")
    checkpoints.prune()
    assert os.listdir(tmp_path / "ckpt") == [second.name]
    third = tmp_path / "ckpt" / "000000000003-000003"
    shutil.copytree(second, outside / "copy")
    third.symlink_to(outside / "copy")
    (tmp_path / "ckpt" / "quarantine").mkdir()
    with pytest.warns(UserWarning, match="is a symbolic link"):
        assert checkpoints.newest() == second
    (tmp_path / "ckpt" / "quarantine" / third.name).unlink()
    (tmp_path / "ckpt" / "quarantine").rmdir()
    (tmp_path / "ckpt" / "quarantine").symlink_to(outside)
    (second / "agent.json").write_text("")
    with pytest.raises(UserError, match=r"quarantine is a symbolic link(.|\n)*Fix: "):
        checkpoints.newest()
    assert sorted(os.listdir(outside)) == ["a.txt", "copy"]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES])
def test_a_checkpoint_that_cannot_be_opened_now_is_not_moved(
    tmp_path, monkeypatch, code
):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, state(1))

    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(checkpoint, "open_regular", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        checkpoints.newest()
    monkeypatch.undo()
    assert checkpoints.newest() == path


def test_a_save_into_a_deleted_folder_is_an_error(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run" / "ckpt")
    with pytest.raises(UserError, match=r"could not be written(.|\n)*Fix: check that"):
        checkpoints.save(1, state(1))
    assert not (tmp_path / "run").exists()


def test_a_format_of_megabytes_is_a_short_message(tmp_path):
    path = Checkpoints(tmp_path).save(10, state(1))
    facts = json.loads((path / "manifest.json").read_text())
    text = json.dumps({**facts, "format": "\x1b[31m" * 100_000})
    (path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="format") as raised:
        checkpoint.read_manifest(path)
    assert len(str(raised.value)) < 1000
    assert "\x1b" not in str(raised.value)


def test_an_infinite_number_of_a_checkpoint_is_one_message(tmp_path):
    with (
        pytest.raises(UserError, match="does not fit this run"),
        checkpoint.explain_mismatch(tmp_path),
    ):
        int(json.loads("1e999"))
