"""A program that writes the files of a run, and sweeps over its flags.

Its loss is smallest at `x = 3`, and it fails for `x` above 50.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from reverie.sweep.search_space import CategoricalRange, NumericRange
from reverie.sweep.spec import SweepConfig, SweepSpec

PROGRAM = """
import json, os, pathlib, sys, time

words = sys.argv[1:]
if words[0] == "eval":
    folder = pathlib.Path(words[1])
    success = json.loads((folder / "flags.json").read_text())["x"] / 100
    result = {"summary": {"success": success}, "n": words[3]}
    (folder / "eval.json").write_text(json.dumps(result))
    sys.exit(0)
flags = {}
for word in words[1:]:
    if word.startswith("--"):
        name = word[2:]
        flags[name] = []
    else:
        flags[name].append(word)
flags = {name: " ".join(value) for name, value in flags.items()}
x, folder = float(flags["x"]), pathlib.Path(flags["logdir"])
folder.mkdir(exist_ok=True)
flags["x"], flags["group"] = x, os.environ.get("WANDB_RUN_GROUP")
(folder / "flags.json").write_text(json.dumps(flags))
with (folder / "starts").open("a") as file:
    file.write("x")
if x > 50:
    print("reverie: x is far", "too large.\\n  Fix: --x 1", sep="\\n", file=sys.stderr)
    sys.exit(2)
if x < 0:
    raise ZeroDivisionError("x")
for step in range(1, 11):
    loss = (x - 3) ** 2 + int(flags["seed"]) + 1 / step
    if flags.get("kind") == "nan":
        loss = None
    name = "other" if flags.get("kind") == "silent" else "loss"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, name: loss}) + "\\n")
    time.sleep(float(flags.get("pace", 0)))
print("done")
"""


def make_spec(tmp_path, ranges=None, settings=None, seed=0, **changes) -> SweepSpec:
    defaults = {"metric": "loss", "goal": "min", "logdir": str(tmp_path / "sweep")}
    config = SweepConfig(**{**defaults, "trials": 4, "jobs": 2, **changes})
    return SweepSpec(
        config, ranges or {"x": NumericRange(0.0, 6.0)}, settings or {}, seed
    )


def choices(*values: object) -> CategoricalRange:
    return CategoricalRange(tuple((str(value),) for value in values))


def rows(folder: Path) -> list[dict[str, str]]:
    """Return the trials in the table of a sweep."""
    with (folder / "table.csv").open() as file:
        return list(csv.DictReader(file))


def flags_of(run: Path) -> dict[str, str]:
    """Return the flags with which a run was started."""
    return json.loads((run / "flags.json").read_text())
