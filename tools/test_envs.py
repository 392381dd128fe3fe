"""Run the conformance tests of all suites, in separate virtual environments.

usage: test_envs.py [--record] [GROUP ...]

Some suites need different versions of MuJoCo or NumPy, so they are tested in groups
that can be installed together (`Package.group`), each in `.local/envs/GROUP`. Suites
based on MuJoCo are also tested with images if OpenGL works without a display.
--record updates the table in docs/environments.md. The environment variables PYTHON and
TORCH_INDEX are those of tools/install.sh.
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

from reverie.envs import SUITES, Suite

ROOT = Path(__file__).parents[1]
VENVS = ROOT / ".local" / "envs"
PAGE = ROOT / "docs" / "environments.md"
TESTS = ("tests/envs/test_env_conformance.py", "tests/envs/test_simulators.py")


def find_groups() -> dict[str, list[Suite]]:
    """Return the suites that pip can install, by group."""
    groups: dict[str, list[Suite]] = {}
    for suite in SUITES.values():
        if suite.package and not suite.package.script:
            groups.setdefault(suite.package.group or suite.name, []).append(suite)
    return groups


GROUPS = find_groups()


@dataclass(frozen=True)
class Result:
    """Tests of one suite."""

    suite: str
    passed: int  # number of tests
    failed: int
    seconds: float
    versions: str  # of the packages of the suite
    opengl: str  # backend that draws images; empty without images

    @property
    def row(self) -> str:
        """Row of the table in docs/environments.md."""
        tests = f"{self.passed} passed" + f", {self.failed} failed" * bool(self.failed)
        cells = (self.suite, tests, self.versions, self.opengl)
        return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    record = "--record" in arguments
    names = [name for name in arguments if name != "--record"] or list(GROUPS)
    if unknown := [name for name in names if name not in GROUPS]:
        print(
            f"There is no group {unknown[0]!r}.\n"
            f"  Fix: choose from {', '.join(GROUPS)}."
        )
        return 2
    results = [result for name in names for result in run_group(name, GROUPS[name])]
    print("\n".join(result.row for result in results))
    if record:
        write_rows(results)
    untested = [result.suite for result in results if not result.passed]
    for suite in untested:
        print(f"no test of {suite} passed")
    return int(bool(untested) or any(result.failed for result in results))


def run_group(name: str, suites: list[Suite]) -> list[Result]:
    """Install the suites of a group in their virtual environment and test them."""
    venv = VENVS / name
    python = str(venv / "bin" / "python")
    packages = {suite.name: suite.package for suite in suites if suite.package}
    extras = {package.extra or name for name, package in packages.items()}
    print(f"== {name}: {', '.join(suite.name for suite in suites)}", flush=True)
    install = ["sh", "tools/install.sh", str(venv), f".[{','.join(sorted(extras))}]"]
    subprocess.run(install, cwd=ROOT, check=True)
    test_tools = [python, "-m", "pip", "install", "-q", "pytest", "beartype"]
    subprocess.run(test_tools, cwd=ROOT, check=True)
    has_mujoco = any("mujoco" in x.distributions for x in packages.values())
    opengl = opengl_backend(python) if has_mujoco else ""
    report = VENVS / f"{name}.xml"
    selection = " or ".join([*(f"{s.name}_" for s in suites), "test_simulators"])
    start = time.perf_counter()
    subprocess.run(
        [
            *(python, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not gpu"),
            *(
                "-q",
                "--junit-xml",
                str(report),
                "-k",
                selection,
            ),
            *TESTS,
        ],
        cwd=ROOT,
        env={**os.environ, "REVERIE_TEST_IMAGES": "1" if opengl else "0"},
        check=False,  # failures are counted in the report
    )
    print(f"   {time.perf_counter() - start:.0f} s", flush=True)
    return [
        Result(
            name,
            *count(report, name),
            ", ".join(f"{d} {version(python, d)}" for d in package.distributions),
            opengl if "mujoco" in package.distributions else "",
        )
        for name, package in packages.items()
    ]


def count(report: Path, suite: str) -> tuple[int, int, float]:
    """Return the passed and failed tests of one suite, and their total seconds."""
    passed, failed, seconds = 0, 0, 0.0
    prefix = f"{suite}_"
    # tests of `dmc_subtle` are not tests of `dmc`
    longer_names = [name for name in SUITES if name.startswith(prefix)]
    prefix += "".join(rf"(?!{name.removeprefix(prefix)}_)" for name in longer_names)
    for case in ElementTree.parse(report).iter("testcase"):
        test_id = f"{case.get('classname')} {case.get('name')}".lower()
        if not re.search(rf"\[{prefix}|test{suite}\b|of_{prefix}", test_id):
            continue
        seconds += float(case.get("time", 0))
        failed += case.find("failure") is not None or case.find("error") is not None
        passed += len(case.findall("*")) == 0
    return passed, failed, seconds


def opengl_backend(python: str) -> str:
    """Return the OpenGL backend that works without a display, empty if none does."""
    code = "from reverie.envs import opengl; print(opengl.select_backend(render=False))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def version(python: str, package: str) -> str:
    """Return the version of a package in another virtual environment."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or "missing"


def write_rows(results: list[Result]) -> None:
    """Replace the rows of these suites in the table of the page."""
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
