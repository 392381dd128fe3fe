"""Imports point one way, and the package alone needs nothing optional."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "reverie"

LEAVES = {"envs", "replay", "datasets", "log", "render"}
"""Subpackages that import only the contract and the file formats."""

CONTRACT = {"api", "spaces", "rows", "capabilities"}

BASE = CONTRACT | {"storage", "plugins", "patterns"}

MAY_IMPORT: dict[str, set[str]] = {
    "spaces": set(),
    "rows": set(),
    "api": {"spaces", "rows"},
    "capabilities": CONTRACT,
    "plugins": CONTRACT,
    "patterns": CONTRACT,
    "storage": CONTRACT,
    **dict.fromkeys(LEAVES, BASE),
    # `render` turns arrays into pictures: the one leaf that log and agents may use.
    "log": BASE | {"render"},
    # Collectives over ranks, which every layer and loss may call.
    "distributed": CONTRACT,
    "nets": BASE | {"distributed"},
    "kernels": BASE | {"distributed", "nets"},
    "worlds": BASE | {"distributed", "nets", "kernels"},
    "agents": BASE | {"distributed", "nets", "kernels", "worlds", "render", "config"},
    "config": CONTRACT | {"storage", "patterns"},
    "convert": BASE | {"nets", "worlds", "agents", "config"},
}
LIBRARY = {*MAY_IMPORT}
RUNS = {"run", "evaluation", "recordings"}
MAY_IMPORT |= dict.fromkeys(RUNS, LIBRARY | RUNS)
TOOLS = {"sweep", "campaign", "bench", "play", "results", "export"}
MAY_IMPORT |= dict.fromkeys(TOOLS, LIBRARY | RUNS)
MAY_IMPORT["play"] = LIBRARY | RUNS | {"campaign"}  # `reverie view` shows its queue
MAY_IMPORT["cli"] = BASE | LEAVES | {"distributed", "config", "convert", *RUNS, *TOOLS}


def room_of(module: str) -> str:
    """`reverie.replay.buffer` -> `data`; the package itself -> ``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def module_of(path: Path, package: Path) -> str:
    parts = ("reverie", *path.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, package: Path) -> list[tuple[int, str]]:
    """Every module of the package that `path` imports, at the top or inside functions.

    Imports under `if TYPE_CHECKING` count too: a type that is known is a dependency.
    A class names its fast version in a string (`fast_version`), which is no import.
    """
    here = module_of(path, package).split(".")
    if path.name != "__init__.py":
        here = here[:-1]
    found = []
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                base = here[: len(here) - node.level + 1] + base
            for alias in node.names:
                # `from reverie import data` names the room in the alias.
                whole = ".".join([*base, alias.name] if base == ["reverie"] else base)
                found.append((node.lineno, whole))
    return [(line, name) for line, name in found if name.split(".")[0] == "reverie"]


def broken_borders(package: Path) -> list[str]:
    """One sentence for each import that points the wrong way."""
    wrong = []
    for path in sorted(package.rglob("*.py")):
        room = room_of(module_of(path, package))
        where = path.relative_to(package.parent)
        if room == "" or room.startswith("__"):
            continue  # the package's own face may show any room
        if room not in MAY_IMPORT:
            wrong.append(f"{where}: room {room!r} is not in the plan of the house")
            continue
        for line, name in imports_of(path, package):
            other = room_of(name)
            if other == "" and room != "cli":
                wrong.append(f"{where}:{line} imports the package's face, not a room")
            elif other and other not in {*MAY_IMPORT[room], room, "__version__"}:
                wrong.append(f"{where}:{line} {room} may not import {name}")
    return wrong


def test_imports_point_one_way():
    assert not broken_borders(PACKAGE)


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("nets/a.py", "from reverie.worlds import rssm", "nets may not import"),
        ("nets/a.py", "from ..agents.dreamer import Dreamer", "nets may not import"),
        ("replay/a.py", "def f():\n    import reverie.log.logger", "a.py:2 replay may"),
        ("replay/a.py", "from reverie.datasets import split", "replay may not import"),
        ("datasets/a.py", "from reverie.replay import feed", "datasets may not import"),
        ("render/a.py", "from reverie import log", "render may not import reverie.log"),
        ("run/a.py", "from reverie import cli", "run may not import reverie.cli"),
        ("envs/a.py", "import reverie", "the package's face"),
        ("utils.py", "", "'utils' is not in the plan"),
    ],
)
def test_an_import_that_points_back_is_named(tmp_path, file, source, complaint):
    path = tmp_path / "reverie" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    (wrong,) = broken_borders(tmp_path / "reverie")
    assert complaint in wrong


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("agents/a.py", "from reverie.render.open_loop import open_loop_video"),
        (
            "datasets/readers/a.py",
            "from ..split import split\nimport reverie.api",
        ),
        ("log/a.py", "from reverie.render.video import write_video"),
        ("cli/a.py", "def f():\n    from reverie.run import train"),
        ("cli/main.py", "from reverie.cli.train import train"),
        ("__init__.py", "from reverie.run import train"),
    ],
)
def test_an_import_that_points_forward_passes(tmp_path, file, source):
    path = tmp_path / "reverie" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert not broken_borders(tmp_path / "reverie")


def test_importing_the_package_imports_nothing_optional():
    """Neither a sink nor a simulator, whether it is installed here or not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {"beartype", "imageio", "tensorboard", "wandb", "ale_py", "minerl", "gym"}
    for needs in project["optional-dependencies"].values():
        for need in needs:
            name = re.split(r"[^\w-]", need)[0].replace("-", "_")
            names.add(name)
    names -= {"reverie", "gymnasium"}
    code = "import reverie, sys; print(*{m.split('.')[0] for m in sys.modules})"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert not names & set(out.split())
