"""A wheel contains everything that the package needs, and trains without the checkout.

Editable installs find data files in the source tree; only a wheel shows which are
missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*words: object, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COV_CORE")}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "reverie"):
        (source / name).symlink_to(ROOT / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet"]
    run(*pip, "--wheel-dir", folder, source, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.extended
def test_it_contains_every_file_of_the_package(wheel):
    kinds = (".py", ".cu", ".yaml", ".typed", ".html", ".css", ".js")
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "reverie").rglob("*")
        if path.suffix in kinds or path.name == "py.typed"
    }
    with zipfile.ZipFile(wheel) as archive:
        assert wanted <= set(archive.namelist())


@pytest.mark.extended
def test_it_trains_in_an_empty_environment(wheel, tmp_path):
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    paths = {"base": str(home), "platbase": str(home)}
    site = Path(sysconfig.get_path("purelib", vars=paths))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # the dependencies of this environment, without its editable install of the package
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    found = run(python, "-c", "import reverie; print(reverie.__file__)", cwd=tmp_path)
    assert found.startswith(str(site))
    words = "train --configs debug --task catch --logdir run --run.steps 60"
    output = run(python, "-m", "reverie", *words.split(), cwd=tmp_path)
    assert "Done" in output
