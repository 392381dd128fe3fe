"""The documentation site: navigation, copied pages, and the build (`make docs`)."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import reverie

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def build_docs(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("build_docs")


def navigation() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return re.findall(r": (\S+\.md)$", text, re.M)


def test_navigation_has_every_page_once(build_docs, tmp_path):
    build_docs.copy_pages(tmp_path)
    copied = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
    pages = navigation()
    assert len(pages) == len(set(pages))
    assert set(pages) == copied - {"benchmarks/log.md"}


def test_pages_are_copied_with_the_files_they_link_to(build_docs, tmp_path):
    build_docs.copy_pages(tmp_path)
    assert (tmp_path / "index.md").read_text() == (ROOT / "README.md").read_text()
    assert (tmp_path / "docs" / "catch-dream.gif").is_file()
    assert (tmp_path / "examples" / "random_shooting.py").is_file()
    page = tmp_path / "page.md"
    page.write_text("[a](index.md#title) [b](missing.md) [c](https://x.y/index.md)")
    assert build_docs.linked_files(page) == [tmp_path / "index.md"]


def test_reference_lists_what_users_import():
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert {f"reverie.{name}" for name in reverie.__all__} <= set(names)
    for name in names:
        assert resolve_name(name).__doc__


@pytest.mark.slow
def test_site_builds_without_warnings(build_docs, monkeypatch, tmp_path):
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("needs the extra docs")
    monkeypatch.setattr(sys, "argv", ["build_docs.py"])
    assert build_docs.main() == 0
    assert "reverie.train" in (ROOT / ".local/site/docs/api/index.html").read_text()
