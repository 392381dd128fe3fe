"""The script of `make test-envs`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from reverie import envs

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import test_envs as script  # noqa: E402

REPORT = """<testsuites><testsuite>
<testcase classname="t.conf" name="test_rows[dmc_walker_walk]" time="2"/>
<testcase classname="t.conf" name="test_seed[dmc_walker_walk]" time="1">
  <failure message="other"/></testcase>
<testcase classname="t.conf" name="test_rows[dmlab_x]" time="9"/>
<testcase classname="t.conf" name="test_rows[dmc_subtle_reacher]" time="5"/>
<testcase classname="t.conf" name="test_skipped[dmc_walker_walk]"><skipped/></testcase>
<testcase classname="t.real" name="test_frames_of_dmc_show_the_scene" time="1"/>
<testcase classname="t.real.TestMetaWorld" name="test_goals" time="1"/>
</testsuite></testsuites>"""


def test_results_are_counted_by_suite(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert script.count(report, "dmc") == (2, 1, 4.0)
    assert script.count(report, "dmc_subtle") == (1, 0, 5.0)
    assert script.count(report, "metaworld") == (1, 0, 1.0)
    assert script.count(report, "robosuite") == (0, 0, 0.0)


def test_recording_replaces_the_rows_of_tested_suites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tested -->\n<!-- /tested -->\nafter\n")
    monkeypatch.setattr(script, "PAGE", page)
    old = script.Result("dmc", 1, 2, 3.0, "dm_control 1", "egl")
    other = script.Result("procgen", 7, 0, 3.0, "procgen 1", "")
    script.write_rows([old, other])
    assert "1 passed, 2 failed" in page.read_text()
    script.write_rows([script.Result("dmc", 9, 0, 3.0, "dm_control 2", "egl")])
    text = page.read_text()
    assert "| dmc | 9 passed | dm_control 2 | egl |" in text
    assert "| procgen | 7 passed |" in text
    assert "failed" not in text
    assert text.startswith("before\n<!-- tested -->\n")
    assert text.endswith("<!-- /tested -->\nafter\n")


def test_unknown_groups_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["dmx"]) == 2
    assert "choose from small" in capsys.readouterr().out


def test_every_pip_installable_suite_is_in_one_group() -> None:
    grouped = [suite.name for group in script.GROUPS.values() for suite in group]
    expected = [
        suite.name
        for suite in envs.SUITES.values()
        if suite.package and not suite.package.script
    ]
    assert sorted(grouped) == sorted(expected)
    assert [suite.name for suite in script.GROUPS["metaworld"]] == ["metaworld"]
    for group in script.GROUPS.values():
        assert all(suite.package.distributions for suite in group)
