import json
import math
import os
import pickle

import numpy as np
import pytest
import torch
from full_disk import file_size_limit

from reverie.api import UserError
from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints
from reverie.storage.atomic import DiskFull


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
        path = checkpoints.save(100 * epoch, {"loop": {"epoch": epoch}}, epoch)
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
    with pytest.raises(UserError, match="no checkpoint"):
        checkpoint.find_checkpoint(tmp_path / "nowhere")


def test_the_first_nonfinite_tensor_is_named():
    good = {"a": {"w": torch.ones(3)}, "n": torch.zeros(2, dtype=torch.int64)}
    assert checkpoint.find_nonfinite(good) is None
    good["a"]["v"] = torch.tensor([1.0, float("nan")])
    assert checkpoint.find_nonfinite(good) == "a/v"


def test_a_reader_skips_damaged_checkpoints_and_moves_nothing(tmp_path):
    """An evaluation may read a folder while a training run writes to it."""
    saves = Checkpoints(tmp_path / "ckpt", keep_last=5)
    good = saves.save(1, {"agent": {"w": torch.ones(3)}})
    bad = saves.save(2, {"agent": {"w": torch.ones(3)}})
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
    saves.save(1, {"agent": {"w": torch.ones(3)}})
    verify, newer = checkpoint.verify, []

    def replaced_meanwhile(path):
        if not newer:
            newer.append(saves.save(2, {"agent": {"w": torch.zeros(3)}}))
            saves.prune()
        verify(path)

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
