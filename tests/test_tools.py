"""The tools that check licences, coverage and the installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest

from reverie.envs import SUITES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import check_coverage  # noqa: E402
import check_licences  # noqa: E402


class Installed:
    """A fake index of installed packages."""

    def __init__(self, **packages):
        self.packages = packages

    def __call__(self, name):
        if name not in self.packages:
            raise metadata.PackageNotFoundError(name)
        fields, requires = self.packages[name]
        about = Message()
        for key, value in fields:
            about[key] = value
        found = type("Found", (), {"metadata": about, "requires": requires})
        return found()


MIT = [("License-Expression", "MIT")]
GPL = [("License-Expression", "GPL-3.0-only")]


def test_core_dependencies_are_permissive():
    names, messages = check_licences.check_licences("reverie", metadata.distribution)
    assert not messages
    assert {"torch", "numpy", "pillow"} <= set(names)
    assert "ale-py" not in names


def test_indirect_copyleft_dependency_is_found():
    index = Installed(app=(MIT, ["lib>=1"]), lib=(MIT, ["deep"]), deep=(GPL, None))
    _, messages = check_licences.check_licences("app", index)
    assert messages == ["deep has the licence GPL-3.0-only."]


def test_only_requested_extras_are_followed():
    index = Installed(
        app=(MIT, ["lib[fast]", 'other; extra == "more"']),
        lib=(MIT, ['turbo; extra == "fast"', 'slow; extra == "slow"']),
        turbo=(GPL, None),
    )
    names, messages = check_licences.check_licences("app", index)
    assert names == ["app", "lib", "turbo"]
    assert messages == ["turbo has the licence GPL-3.0-only."]


def test_package_without_licence_information_fails():
    _, messages = check_licences.check_licences("app", Installed(app=(MIT, ["gone"])))
    assert "gone is required but not installed" in messages[0]
    _, messages = check_licences.check_licences("app", Installed(app=([], None)))
    assert messages == ["app has the licence (none)."]


@pytest.mark.parametrize(
    ("expression", "passes"),
    [
        ("MIT", True),
        ("Apache-2.0 OR GPL-3.0-only", True),
        ("Apache-2.0 AND GPL-3.0-only", False),
        ("MIT AND (GPL-2.0-only OR BSD-3-Clause)", True),
        ("MIT AND (GPL-2.0-only OR LGPL-3.0-only)", False),
        ("Apache-2.0 WITH LLVM-exception AND BSD-2-Clause", True),
        ("GPL-3.0-only WITH GCC-exception-3.1", False),
        ("", False),
    ],
)
def test_spdx_expressions(expression, passes):
    assert check_licences.is_permissive(expression) is passes


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ([("License", "MIT License\n\nCopyright (c) 2022")], "MIT"),
        ([("License", "Apache 2.0")], "Apache-2.0"),
        ([("License", "3-Clause BSD License")], "BSD-3-Clause"),
        ([("Classifier", "License :: OSI Approved :: BSD License")], "BSD-3-Clause"),
        ([("License", "LGPLv3")], "LGPLv3"),
    ],
)
def test_licences_without_spdx_identifier(fields, licence):
    found = Installed(app=(fields, None))("app")
    assert check_licences.licence_of(found) == licence


def coverage(**files):
    def entry(covered, total):
        percent = 100 * covered / total if total else 100.0
        summary = {"covered_lines": covered, "num_statements": total}
        missing = list(range(covered + 1, total + 1))
        return {
            "summary": summary | {"percent_covered": percent},
            "missing_lines": missing,
        }

    report = {name.replace("__", "/") + ".py": entry(*n) for name, n in files.items()}
    return {"files": report, "totals": {"percent_covered": 0.0}}


def test_core_and_each_module_have_a_minimum():
    low = check_coverage.find_uncovered
    assert low(coverage(reverie__api=(95, 100), reverie__cli=(81, 100))) != []
    assert low(coverage(reverie__api=(99, 100), reverie__cli=(81, 100))) == []
    (module,) = low(coverage(reverie__api=(1000, 1000), reverie__cli=(5, 10)))
    assert "reverie/cli.py: 50.0 % is below 80 %; missing lines 6-10" in module
    (whole,) = low(coverage(reverie__api=(85, 100)))
    assert whole.startswith("the core: 85.0 % of 100 lines is below 90 %")


def test_only_suites_that_cannot_be_installed_are_excluded():
    for name in SUITES:
        files = {"reverie__api": (10, 10), f"reverie__envs__suites__{name}": (0, 100)}
        is_excluded = check_coverage.find_uncovered(coverage(**files)) == []
        needs_labmaze = name in ("dmc", "dmc_subtle", "loconav")
        cannot_run = needs_labmaze and sys.version_info >= (3, 13)
        assert is_excluded == cannot_run, name
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert "reverie[dmc]; python_version < '3.13'" in pyproject


def test_exit_codes_of_coverage_check(tmp_path, capsys):
    path = tmp_path / "coverage.json"
    assert check_coverage.main([str(path)]) == 2
    path.write_text(json.dumps(coverage(reverie__api=(10, 10))))
    assert check_coverage.main([str(path)]) == 0
    path.write_text(json.dumps(coverage(reverie__api=(1, 10))))
    assert check_coverage.main([str(path)]) == 1
    assert "reverie/api.py: 10.0 %" in capsys.readouterr().out


def install(tmp_path, **variables):
    return subprocess.run(
        ["sh", str(ROOT / "tools/install.sh"), str(tmp_path / "venv"), "."],
        env=os.environ | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def executable(path, text):
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_old_python_is_refused(tmp_path):
    old = executable(
        tmp_path / "python",
        'if [ "$1" = --version ]; then echo Python 3.8.1; else exit 1; fi\n',
    )
    done = install(tmp_path, PYTHON=old)
    assert done.returncode == 2
    assert "needs Python 3.11 or newer; found: Python 3.8.1" in done.stderr
    assert "Fix: " in done.stderr
    assert not (tmp_path / "venv").exists()


def test_python_without_venv_is_refused(tmp_path):
    bare = executable(tmp_path / "python", '[ "$1" != -m ]\n')
    done = install(tmp_path, PYTHON=bare)
    assert done.returncode == 2
    assert "its venv module is missing" in done.stderr
    assert "apt install python3-venv" in done.stderr


COMPILE_ONE_KERNEL = """
import check_kernels
import torch
from reverie.kernels.sums import sum_partials

compiler = check_kernels.KernelCompiler(75)
with compiler.active():
    total = sum_partials(torch.ones(300, 40))
assert not total.any()  # the kernel was compiled only
assert compiler.report()
check_kernels.SHARED_KILOBYTES[75] = 0
assert not compiler.report()
"""


@pytest.mark.extended
def test_kernels_are_compiled_for_gpus_that_are_not_there():
    pytest.importorskip("triton.backends.nvidia")
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT}/tools:{ROOT}"}
    command = [sys.executable, "-W", "error", "-c", COMPILE_ONE_KERNEL]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert "sums._sum_partials" in done.stdout
    assert done.stdout.count("too much") == 1
