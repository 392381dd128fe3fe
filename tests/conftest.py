"""Set-up of all tests: annotations are checked, and each process uses one thread.

Import hooks wrap the annotated functions, dataclasses and methods of `reverie` with
beartype, and with jaxtyping where a module annotates shapes, so that a wrong type or
shape fails at the call that passed it. Runs never install them. `REVERIE_TYPECHECK=0`
leaves them out, and so does a machine without beartype.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch

torch.set_num_threads(1)
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # for the processes that tests start
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ["WANDB_MODE"] = "offline"
if not torch.cuda.is_available():  # hand-written kernels run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.backends.cudnn.allow_tf32 = False  # float32 means float32 where it is compared

UNMEASURED = {
    "test_learns",
    "test_learns_iris",
    "test_learns_offline",
    "test_resume",
    "test_interrupted_update",
}
"""Long tests that run without coverage; other tests execute the same lines."""

CHECKED = (
    os.environ.get("REVERIE_TYPECHECK", "1") != "0"
    and importlib.util.find_spec("beartype") is not None
)

if CHECKED:
    import typecheck

    typecheck.accept_plain_protocols()
    early = [name for name in sys.modules if name.split(".")[0] == "reverie"]
    assert not early, f"imported before the type hook: {early}"
    typecheck.install_hooks()


def pytest_report_header() -> str:
    return f"annotations of reverie: {'checked' if CHECKED else 'not checked'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folders, name = item.path.parts, item.path.stem
        if UNMEASURED.intersection((*folders, name)):
            item.add_marker(pytest.mark.no_cover)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


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
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(1)
