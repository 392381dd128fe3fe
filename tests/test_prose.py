"""Words that code and docs must not use, because readers of this field use others.

The list is short on purpose: it keeps old names from coming back, and does not check
style. See the glossary in `docs/` for the terms that are used instead.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FORBIDDEN = {
    r"whoever|nobody|somebody|one's own": "name the class, function or user",
    r"anew": "again, from scratch",
    r"mend(s|ed|ing)?": "fix, correct",
    r"foresee(s|n)?": "predict",
    r"beside": "next to, in addition to, in parallel with",
    r"by itself": "automatically, `auto`, alone",
    r"go(es)? on|going on|went on": "continue",
    r"in vain|of ours|(is|are|was|were) told": "say it plainly",
    r"learnt|dreamt": "learned, imagined",
    r"dice": "rng",
    r"diet|meals?": "windows",
    r"rhythm": "schedule",
    r"twins?": "fast version",
    r"shadows?": "low-precision weights",
    r"lanes?": "stream",
    r"shelf|shelves": "episode cache",
    r"recipes?": "transforms",
    r"witness(es)?": "episode recorder",
    r"films?|filmed": "video",
    r"coins?": "random boundary, random choice",
    r"judg(e|es|ed|ing|ement|ements)": "evaluate",
    r"watch(es|ed|ing|er|ers)?": "train on sequences, observe",
    r"notes": "extras",
    r"seats?": "env slot",
    r"eyes": "feature extractor",
    r"ground(?![ -]truth)": "base",
    r"stor(y|ies)|chapters?": "segments, rollout",
    r"worn|wander(s|ed)?": "use a plain verb",
}
"""Regular expressions of forbidden words, and what to write instead."""

ALLOWED = {
    ("reverie/kernels", "lane"),  # of a GPU warp
    ("reverie/kernels", "lanes"),
    ("reverie/envs/suites/loconav.py", "ground"),  # of the simulator
    ("reverie/envs/suites/metaworld.py", "shelf"),  # name of a task
    ("docs/dreamer-options.md", "twins"),  # the method Barlow Twins
}
"""Legitimate uses: (file or folder, word)."""


def texts() -> list[Path]:
    """Sources, presets and docs."""
    paths = [*ROOT.glob("reverie/**/*.py"), *ROOT.glob("reverie/presets/*.yaml")]
    paths += [*ROOT.glob("reverie/**/*.cu"), *ROOT.glob("reverie/**/*.cuh")]
    paths += [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*.py")]
    paths += [*ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
    paths += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return sorted(paths)


def is_in(path: Path, item: str) -> bool:
    """True if a path is this file, or is in this folder."""
    return path.is_relative_to(ROOT / item)


def forbidden_words(path: Path) -> list[str]:
    """Every use of a forbidden word, with its line and what to write instead."""
    name = path.relative_to(ROOT).as_posix()
    messages = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for pattern, instead in FORBIDDEN.items():
            # letters are the only word characters, so `old_name` is checked by parts
            for match in re.finditer(rf"(?i)(?<![a-z])({pattern})(?![a-z])", line):
                word = match[0].lower()
                if not any(is_in(path, x) and word == y for x, y in ALLOWED):
                    messages.append(f"{name}:{number}: {match[0]!r} ({instead})")
    return messages


@pytest.mark.parametrize("path", texts(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_forbidden_words(path: Path) -> None:
    messages = forbidden_words(path)
    assert not messages, "\n".join(messages)


def test_allowed_paths_exist() -> None:
    for name, _ in ALLOWED:
        assert (ROOT / name).exists(), name


def test_parts_of_identifiers_are_checked(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "a.py"
    path.write_text("def judge_run(): ...\nx = 'coinrun'\n# the ground truth\n")
    assert len(forbidden_words(path)) == 1
