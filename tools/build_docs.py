"""Build the documentation site in `.local/site`: `python tools/build_docs.py`.

Pages link to each other, to sources and to benchmarks with relative links, so that they
also work in the repository. This program copies the pages and the files they link to
into a folder with the same structure (`docs_dir` in mkdocs.yml), and runs Zensical in
strict mode, which fails for every link that does not exist.

It also trains a small agent for some seconds, and adds the static page that `reverie
view --export` makes of this run to the gallery.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / ".local" / "docs"
"""Copy of the pages, from which the site is built."""
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "benchmarks/*.md")
HOME = "index.md"
"""Name of the copy of README.md."""
LINK = re.compile(r"\]\(([^)\s]+)\)")
"""Target of a Markdown link."""
RUN = "--configs debug --task catch --run.steps 600 --run.log_every 2 --seed 0"
"""Settings of the run that is added to the gallery."""
RUN_PAGE = "run/index.html"
"""Page of this run, relative to the gallery."""
RUN_SECTION = f"""
## A run in the browser

[The page of a short run]({RUN_PAGE}): curves, videos, settings and files, as `reverie
view FOLDER` shows them, written to a static page with `--export`.
"""


def main() -> int:
    shutil.rmtree(SOURCE, ignore_errors=True)
    copy_pages(SOURCE)
    add_run_page(SOURCE)
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict"]
    return subprocess.run([*command, "--clean"], cwd=ROOT, check=False).returncode


def copy_pages(target: Path) -> None:
    """Copy all pages and the files they link to, with the same relative paths."""
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    files = {path for page in pages for path in linked_files(page)}
    for path in {*pages, *files}:
        copy = target / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    (target / "README.md").rename(target / HOME)


def linked_files(page: Path) -> list[Path]:
    """Return the files in the repository that a page links to."""
    links = [unquote(link.partition("#")[0]) for link in LINK.findall(page.read_text())]
    paths = [(page.parent / link).resolve() for link in links if "://" not in link]
    return [path for path in paths if path.is_file()]


def add_run_page(target: Path) -> None:
    """Train a small agent and write the static page of its run."""
    python, folder = sys.executable, ROOT / ".local" / "docs-runs"
    shutil.rmtree(folder, ignore_errors=True)
    reverie = [python, "-m", "reverie"]
    train = [*reverie, "train", *RUN.split(), "--logdir", str(folder / "catch")]
    subprocess.run(train, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    page = (target / "docs" / RUN_PAGE).parent
    export = [*reverie, "view", str(folder), "--export", str(page)]
    subprocess.run(export, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    with (target / "docs" / "gallery.md").open("a") as file:
        file.write(RUN_SECTION)


if __name__ == "__main__":
    sys.exit(main())
