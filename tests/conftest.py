"""Set-up of all tests: annotations are checked, and each process uses one thread.

An import hook wraps the annotated functions, dataclasses and methods of `reverie` with
beartype, and with jaxtyping where a module annotates shapes, so that a wrong type or
shape fails at the call that passed it. The first calls of a function in a test are
checked for shapes. Runs never install it. `REVERIE_TYPECHECK=0`
leaves it out, and so does a machine without beartype. The hook also marks executed
lines, for the coverage (`line_marks.py`).
"""

from __future__ import annotations

import fnmatch
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator

import line_marks
import pytest
import torch

gc.disable()  # until the tests are collected, see `pytest_collection_finish`
torch.set_num_threads(1)
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # for the processes that tests start
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ["WANDB_MODE"] = "offline"
# submitit would close the log handlers of pytest when it is imported
os.environ["SUBMITIT_LOG_LEVEL"] = "NOCONFIG"
if not torch.cuda.is_available():  # hand-written kernels run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.backends.cudnn.allow_tf32 = False  # float32 means float32 where it is compared

CHECKED = (
    os.environ.get("REVERIE_TYPECHECK", "1") != "0"
    and importlib.util.find_spec("beartype") is not None
)

if CHECKED:
    import typecheck

    typecheck.accept_plain_protocols()
    early = [name for name in sys.modules if name.split(".")[0] == "reverie"]
    assert not early, f"imported before the type hook: {early}"
    typecheck.install_hook()


MEASUREMENT = pytest.StashKey()


@pytest.hookimpl(trylast=True)  # after pytest-cov starts the measurement
def pytest_sessionstart(session: pytest.Session) -> None:
    """Stop the tracer of coverage.py: executed lines are marked without it."""
    if CHECKED and importlib.util.find_spec("coverage") is not None:
        from coverage import Coverage

        if measurement := Coverage.current():
            session.config.stash[MEASUREMENT] = measurement
        while tracing := Coverage.current():  # processes of xdist have two
            tracing.stop()


@pytest.hookimpl(wrapper=True, trylast=True)  # before pytest-cov saves its data
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    result = yield
    if measurement := session.config.stash.get(MEASUREMENT, None):
        measurement.get_data().add_lines(line_marks.executed_lines())
    return result


def pytest_report_header() -> str:
    return f"annotations of reverie: {'checked' if CHECKED else 'not checked'}"


LONG = {"test_learns", "test_resume", "test_interrupted_update", "test_iris_fast"}
"""Files with the longest tests; they run first, so that all processes end together."""


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("extended_except")
        if mark and not any(
            fnmatch.fnmatchcase(item.callspec.id, pattern) for pattern in mark.args
        ):
            item.add_marker(pytest.mark.extended)
    items.sort(key=lambda item: item.path.stem not in LONG)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Exclude modules and tests, millions of objects, from garbage collection."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # modules of extensions report what is not freed at the exit


@pytest.fixture(autouse=True, scope="session")
def _state_directory(tmp_path_factory):
    """Keep the list of runs of the tests out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _same_global_state_for_every_test():
    """Seeds and default flags, so that no test depends on which ran before it."""
    torch.manual_seed(0)
    if CHECKED:
        typecheck.reset_counts()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)  # imports for seconds
    torch.set_num_threads(1)
