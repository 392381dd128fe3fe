"""Malicious or damaged contents of files: values, pickles, archives and YAML."""

from __future__ import annotations

import io
import pickle
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

STRINGS = (
    "",
    ".",
    "..",
    "/",
    "../outside/file",
    "/etc/passwd",
    "a/b",
    "name\x00end",
    "x" * 5000,
    "\u202e\U0001f600",
    "nul\n",
    "-rf",
    "~",
    "%s%n",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63),
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    -0.0,
    [],
    {},
    [[]],
    {"a": {"b": 1}},
    list(range(1000)),
    "DEEP_NESTING",
    *STRINGS,
)


class Call:
    """Pickled as a call of a function with arguments."""

    def __init__(self, function: Any, *arguments: Any):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def hostile_pickle(rng: random.Random, marker: Path) -> bytes:
    """Return a pickle that runs code, builds wrong arrays, is huge, or is random."""
    import numpy as np

    kind = rng.randrange(9)
    if kind == 8:
        return pickle.dumps(unexpected_weights(rng))
    if kind == 0:
        return pickle.dumps({"agent": Call(exec, f"open({str(marker)!r}, 'w')")})
    if kind == 1:  # an object array over bytes of the file
        array = Call(np.ndarray, (4,), "O", b"\x41" * 64, 0)
        return pickle.dumps({"params": {"a": array}})
    if kind == 2:  # outside of its buffer
        array = Call(np.ndarray, (2**20,), "f4", bytes(64), rng.choice([-64, 2**40]))
        return pickle.dumps({"params": {"a": array}})
    if kind == 3:  # doubles in memory with every opcode
        return b"\x80\x04]\x94" + b"h\x00h\x00\x86\x94" * 5000 + b"."
    if kind == 4:  # declares more bytes than it has
        return b"\x80\x04\x8e" + struct.pack("<Q", 2 ** rng.randrange(20, 63)) + b"."
    if kind == 5:
        return b"\x80\x04" + b"(" * 100_000 + b"t" * 100_000 + b"."
    valid = pickle.dumps({"params": {f"w{i}": np.ones((3, 4)) for i in range(4)}})
    if kind == 6:
        return mutate(valid, rng)
    return b"\x80\x04" + rng.randbytes(rng.randrange(1, 3000)) + b"."


def unexpected_weights(rng: random.Random) -> dict[str, Any]:
    """Return weights with names of a known program and unexpected shapes or values."""
    import numpy as np

    shape = rng.choice([(), (0,), (2,), (0, 0, 0, 0), (3, 3, 3, 3), (1,) * 30])
    value = rng.choice([np.zeros(shape, np.float32), np.zeros(shape), 3, None, "x"])
    dreamer = ("dyngru/kernel", "dynin0/bias", "obslogit/bias", "obs0/bias")
    contents: list[dict[str, Any]] = [
        {"params": {f"dyn/{name}": value for name in dreamer}},
        {"params": {"dyn/x": value, "enc/cnn3/kernel": value, "dec/imgout/kernel": 3}},
        {"agent_state_dict": {"_wm.encoder._cnn.layers.0.weight": value}},
        {"tokenizer.quantizer.codebook": value, "world_model.x": value},
        {"state_model.abs_feat.weight": value},
    ]
    return rng.choice(contents)


def hostile_torch_file(rng: random.Random, marker: Path) -> bytes:
    """Return a `torch.save` file that is damaged or contains a hostile pickle."""
    import torch

    buffer = io.BytesIO()
    contents = {"agent_state_dict": {"a": torch.ones(8, 8)}}
    kind = rng.randrange(6)
    torch.save(unexpected_weights(rng) if kind == 5 else contents, buffer)
    data = buffer.getvalue()
    if kind == 5:
        return data
    if kind == 0:
        return mutate(data, rng)
    if kind == 1:
        return data[: rng.randrange(len(data))]
    if kind == 2:
        return hostile_pickle(rng, marker)
    source, changed = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    with zipfile.ZipFile(changed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("data.pkl"):
                content = hostile_pickle(rng, marker)
            elif kind == 4 and "/data/" in name:
                content = bytes(2 * 10**8)
            archive.writestr(name, content)
    return changed.getvalue()


def hostile_npz(rng: random.Random, marker: Path) -> bytes:
    """Return an NPZ file with objects, wrong sizes, or unsafe names."""
    import numpy as np

    buffer, kind = io.BytesIO(), rng.randrange(4)
    code = Call(exec, f"open({str(marker)!r}, 'w')")
    arrays: dict[str, Any] = {
        "image": np.zeros((5, 8, 8, 3), np.uint8),
        "reward": np.zeros(5, np.float32),
        "action": np.zeros((5, 2), np.float32),
        "is_first": np.zeros(5, bool),
        "is_last": np.zeros(5, bool),
        "is_terminal": np.zeros(5, bool),
    }
    key = rng.choice(sorted(arrays))
    if kind == 0:
        arrays[key] = np.array([code] * 5, object)
    elif kind == 1:
        arrays[key] = np.zeros(rng.choice([(0,), (4,), (5, 0), (5, 1, 1, 1, 1)]))
    elif kind == 2:
        arrays[rng.choice(["../x", "/x", "", "a/b"])] = arrays.pop(key)
    np.savez_compressed(buffer, **arrays)
    return mutate(buffer.getvalue(), rng) if kind == 3 else buffer.getvalue()


def hostile_yaml(text: str, rng: random.Random) -> tuple[str, str]:
    """Return the config of a run with a change, and a description of the change."""
    import yaml

    kind = rng.randrange(7)
    if kind == 0:
        levels = "\n".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]" for i in range(1, 30))
        return f"a0: &a0 [x]\n{levels}\n{text}", "expanding aliases"
    if kind == 1:
        return text + "x: " + "[" * 50_000, "deep nesting"
    if kind == 2:
        tag = "!!python/object/apply:os.system ['touch executed']"
        return text + f"size: {tag}\n", "a Python tag"
    if kind == 3:
        return mutate(text.encode(), rng).decode(errors="replace"), "damaged text"
    data = yaml.safe_load(text)
    if kind == 4:
        name = rng.choice(["task", "agent", "world", "base", "sequences", "gym"])
        if name == "world":
            data["dreamer"]["world"] = "evilmod:make"
        elif name == "base":
            data["agent"], data["bc"]["run_agent"] = "bc", "evilmod:make"
        else:
            prefix = {"sequences": "sequences_", "gym": "gym_"}.get(name, "")
            key = "agent" if name == "agent" else "task"
            data[key] = f"{prefix}evilmod:make"
        return yaml.safe_dump(data), f"a module as {name}"
    groups = [data, *(v for v in data.values() if isinstance(v, dict) and v)]
    group = rng.choice(groups)
    key = rng.choice(sorted(group))
    group[key] = rng.choice([v for v in VALUES if v != "DEEP_NESTING"])
    return yaml.safe_dump(data), f"{key}: {str(group[key])[:50]}"


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change, insert, repeat or delete some bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8, 50])):
        if not changed:
            break
        start = rng.randrange(len(changed))
        end = min(len(changed), start + rng.choice([1, 1, 4, 30]))
        kind = rng.randrange(4)
        if kind == 0:
            changed[start] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[start:end] = rng.randbytes(end - start)
        elif kind == 2:
            changed[start:start] = changed[start:end]
        else:
            del changed[start:end]
    return bytes(changed)
