"""Read many damaged copies of a file in a child process.

A reader must either load a damaged file or raise one of the errors it declares. The
child process shows crashes (signals), tracebacks, and allocations above a limit.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import subprocess
import sys
import warnings
from pathlib import Path

MEMORY_LIMIT = 8 << 30


def fuzz_reader(
    paths: list[Path], reader: str, errors: list[str], trials: int, seed: int = 0
) -> tuple[int, int]:
    """Read `trials` mutations of files with `module:function` in a child process.

    Returns how many were loaded and how many refused; the last error that is not one
    of `errors` (`module:class`) fails the test.
    """
    job = [[str(path) for path in paths], reader, errors, trials, seed]
    command = [sys.executable, __file__, json.dumps(job)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=environment
    )
    assert child.returncode == 0, child.stderr[-3000:] or f"exit {child.returncode}"
    loaded, refused = child.stdout.split()[-2:]
    return int(loaded), int(refused)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Flip bits, overwrite, insert, delete, repeat or cut some bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        place = rng.randrange(len(changed) + 1)
        length = rng.choice([1, 1, 2, 4, 8, 64])
        kind = rng.randrange(7)
        if kind <= 2 and place < len(changed):
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 3:
            values = rng.choice([b"\0", b"\xff", b"\x7f", rng.randbytes(1)])
            changed[place : place + length] = values * length
        elif kind == 4:
            changed[place:place] = rng.randbytes(length)
        elif kind == 5:
            start = rng.randrange(len(changed) + 1)
            changed[place : place + length] = changed[start : start + length]
        elif rng.random() < 0.2:
            del changed[place:]
        else:
            del changed[place : place + length]
    return bytes(changed)


def _object(name: str):
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _main() -> None:
    paths, reader, errors, trials, seed = json.loads(sys.argv[1])
    read = _object(reader)
    expected = tuple(_object(name) for name in errors)
    rng = random.Random(seed)
    files = [(Path(path), Path(path).read_bytes()) for path in paths]
    for path, _ in files:
        read(path)  # the undamaged file can be read
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    warnings.simplefilter("ignore")
    loaded = refused = 0
    for _ in range(trials):
        path, data = rng.choice(files)
        path.write_bytes(mutate(data, rng))
        try:
            read(path)
            loaded += 1
        except expected:
            refused += 1
    print(loaded, refused)


if __name__ == "__main__":
    _main()
