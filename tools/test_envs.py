"""Run the conformance test of every suite, in virtual environments of their own.

usage: test_envs.py [--record] [GROUP ...]

The pins of some suites clash (two versions of mujoco, two of numpy), so they are tested
in groups that install together, each in `.local/envs/GROUP`. Where OpenGL works without
a screen, suites on MuJoCo draw images as well. With --record the table in
docs/environments.md is brought up to date. PYTHON and TORCH_INDEX are those of
tools/install.sh.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".local" / "envs"
PAGE = ROOT / "docs" / "environments.md"
TESTS = ("tests/envs/test_env_conformance.py", "tests/envs/test_simulators.py")


@dataclass(frozen=True)
class Group:
    """Suites that share an environment, and the packages whose versions matter."""

    suites: tuple[str, ...]
    packages: tuple[str, ...]
    extras: tuple[str, ...] = ()
    """What to install, where the extras are not called like the suites."""


GROUPS = {
    "small": Group(
        ("atari", "atari100k", "crafter", "minigrid", "bsuite"),
        ("ale-py", "crafter", "minigrid", "bsuite"),
        ("atari", "crafter", "minigrid", "bsuite"),
    ),
    "dmc": Group(
        ("dmc", "loconav", "mujoco", "memorymaze"),
        ("dm_control", "mujoco", "gymnasium", "memory-maze"),
    ),
    "metaworld": Group(("metaworld",), ("metaworld", "mujoco")),
    "robosuite": Group(("robosuite",), ("robosuite", "mujoco")),
    "procgen": Group(("procgen",), ("procgen-mirror", "numpy")),
    "craftax": Group(("craftax",), ("craftax", "jax")),
}


@dataclass(frozen=True)
class Result:
    suite: str
    passed: int
    failed: int
    seconds: float
    versions: str
    opengl: str

    @property
    def row(self) -> str:
        tests = f"{self.passed} passed" + f", {self.failed} failed" * bool(self.failed)
        cells = (self.suite, tests, self.versions, self.opengl)
        return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    record = "--record" in arguments
    names = [name for name in arguments if name != "--record"] or list(GROUPS)
    if unknown := [name for name in names if name not in GROUPS]:
        print(
            f"There is no group {unknown[0]!r}.\n  Fix: pick from {', '.join(GROUPS)}."
        )
        return 2
    results = [result for name in names for result in run_group(name, GROUPS[name])]
    print("\n".join(result.row for result in results))
    if record:
        write_rows(results)
    tried = {result.suite for result in results if result.passed}
    wanted = {suite for name in names for suite in GROUPS[name].suites}
    for suite in sorted(wanted - tried):
        print(f"nothing of {suite} was tested")
    return int(bool(wanted - tried) or any(result.failed for result in results))


def run_group(name: str, group: Group) -> list[Result]:
    """Install a group and test its suites."""
    venv = HOME / name
    python = str(venv / "bin" / "python")
    extras = ",".join(group.extras or group.suites)
    print(f"== {name}: {', '.join(group.suites)}", flush=True)
    install = ["sh", "tools/install.sh", str(venv), f".[{extras}]"]
    subprocess.run(install, cwd=ROOT, check=True)
    more = [python, "-m", "pip", "install", "-q", "pytest", "beartype"]
    subprocess.run(more, cwd=ROOT, check=True)
    opengl = opengl_of(python) if "mujoco" in group.packages else ""
    versions = ", ".join(
        f"{package} {version_of(python, package)}" for package in group.packages
    )
    draws = "1" if opengl else "0"
    report = HOME / f"{name}.xml"
    pick = " or ".join(f"{suite}_" for suite in group.suites)
    begin = time.perf_counter()
    subprocess.run(
        [
            *(python, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not gpu"),
            *("-q", "--junit-xml", str(report), "-k", f"{pick} or test_simulators"),
            *TESTS,
        ],
        cwd=ROOT,
        env={**os.environ, "REVERIE_TEST_IMAGES": draws},
        check=False,  # the report says what failed
    )
    print(f"   {time.perf_counter() - begin:.0f} s", flush=True)
    return [
        Result(suite, *count(report, suite), versions, opengl) for suite in group.suites
    ]


def count(report: Path, suite: str) -> tuple[int, int, float]:
    """Passed and failed tests of one suite, and their seconds."""
    passed, failed, seconds = 0, 0, 0.0
    for case in ElementTree.parse(report).iter("testcase"):
        where = f"{case.get('classname')} {case.get('name')}".lower()
        if not re.search(rf"\[{suite}_|test{suite}\b|of_{suite}_", where):
            continue
        seconds += float(case.get("time", 0))
        failed += case.find("failure") is not None or case.find("error") is not None
        passed += len(case.findall("*")) == 0
    return passed, failed, seconds


def opengl_of(python: str) -> str:
    """The backend that draws without a screen, empty if there is none."""
    code = "from reverie.envs import opengl; print(opengl.prepare(render=False))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def version_of(python: str, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or "missing"


def write_rows(results: list[Result]) -> None:
    """Put the rows into the page, where each suite has one."""
    page = PAGE.read_text()
    begin, end = "<!-- tested -->\n", "<!-- /tested -->"
    head, _, rest = page.partition(begin)
    table, _, tail = rest.partition(end)
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    rows = {line.split()[1]: line for line in lines[2:]}
    rows |= {result.suite: result.row for result in results}
    title = [
        "| suite | conformance | versions | OpenGL |",
        "| ----- | ----------- | -------- | ------ |",
    ]
    system = f"{platform.system()}, Python {platform.python_version()}"
    body = "\n".join([f"On {system}:", "", *title, *rows.values()])
    PAGE.write_text(f"{head}{begin}\n{body}\n\n{end}{tail}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
