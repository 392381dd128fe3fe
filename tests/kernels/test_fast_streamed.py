"""The streamed scan: its kernels on an emulated GPU, and the host's side of it."""

from __future__ import annotations

import ctypes

import pytest
import torch

pytest.importorskip("triton")

from emulated_gpu import Emulated, compile_kernels
from test_fast_persistent import Recorder, structure
from test_fast_scan_steps import make, results

from reverie.kernels import nvrtc
from reverie.kernels.scan import loop as scan_loop
from reverie.kernels.scan.streamed import scan as streamed

SMALL = (256, 32, 8, 2, 16)
"""Deter, units, blocks, choices, classes."""


@pytest.fixture(autouse=True)
def _plain_half_precision(monkeypatch):
    monkeypatch.setattr(streamed, "_refused", [])
    streamed.kernels.cache_clear()
    with torch.backends.mkldnn.flags(enabled=False):  # crashes on some processors
        yield
    streamed.kernels.cache_clear()


def replace_kernels(monkeypatch, make_kernel) -> None:
    """Put something else in the place of compiled code on a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "load", lambda source, names, device: list(names))
    monkeypatch.setattr(nvrtc, "OverlappingKernel", make_kernel)


@pytest.mark.skipif(torch.cuda.is_available(), reason="emulates one on a CPU")
@pytest.mark.parametrize(
    ("sizes", "batch", "length", "hold"),
    [
        (SMALL, 3, 2, 28),
        pytest.param((768, 96, 8, 4, 24), 19, 2, 28, marks=pytest.mark.slow),
        # fewer weights at once than a thread needs
        pytest.param((768, 96, 8, 4, 24), 19, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_kernels_are_as_close_to_float32_as_the_plain_loop(
    monkeypatch, tmp_path, sizes, batch, length, hold
):
    monkeypatch.setattr(streamed, "CUT", streamed.CUT._replace(hold=hold))
    library = compile_kernels(streamed.source(streamed.Sizes(*sizes)), tmp_path)
    replace_kernels(
        monkeypatch,
        lambda name, blocks, threads, shared: Emulated(library, name, blocks, shared),
    )
    exact = results(scan_loop, *make(batch, length, sizes))
    made = make(batch, length, sizes, torch.bfloat16)
    plain, quick = results(scan_loop, *made), results(streamed, *made)
    for name, goal in exact.items():
        error, usual = (float((x[name] - goal).detach().norm()) for x in (quick, plain))
        assert error < 1.5 * usual + 0.002 * float(goal.detach().norm()), name


@torch.no_grad()
def test_arguments_lie_in_the_order_of_the_source(monkeypatch):
    found: dict[str, Recorder] = {}

    def record(name, blocks, threads, shared):
        found[name] = Recorder()
        return lambda arguments, blocks=0, overlap=True: found[name](arguments)

    replace_kernels(monkeypatch, record)
    weights, inputs, settings = make(2, 2, SMALL, torch.bfloat16)
    tape = streamed.run_forward(weights, inputs, settings)
    grads = tuple(x.transpose(0, 1) for x in (tape.deters, tape.stochs, tape.logits))
    streamed.run_backward(weights, tape, inputs.reset, grads, settings)
    source = streamed.source(streamed.Sizes(*SMALL))
    for name, kernel in found.items():
        kind = "Step" if name.startswith("step") else "Back"
        assert kernel.seen[0]._fields_ == structure(kind, source), name
    assert len(found["step_choices"].seen) == 1  # none after the last step
    assert len(found["back_choices"].seen) == 2


def test_a_refused_launch_falls_back_and_says_so(monkeypatch):
    def refuse(name, blocks, threads, shared):
        def launch(arguments: ctypes.Structure, blocks: int = 0, overlap: bool = True):
            raise nvrtc.Unavailable("out of patience")

        return launch

    replace_kernels(monkeypatch, refuse)
    made = make(2, 2, SMALL, torch.bfloat16)
    plain = results(scan_loop, *made)
    with pytest.warns(RuntimeWarning, match="out of patience"):
        quick = results(streamed, *made)
    for name, value in plain.items():
        assert torch.equal(quick[name], value), name


def test_source_that_does_not_compile_is_no_obstacle(monkeypatch):
    def load(source, names, device):
        raise nvrtc.Unavailable("no compiler")

    replace_kernels(monkeypatch, None)
    monkeypatch.setattr(nvrtc, "load", load)
    with pytest.warns(RuntimeWarning, match="no compiler"):
        assert streamed.kernels(streamed.Sizes(*SMALL), torch.device("cuda", 0)) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs tensors of a CPU")
def test_a_cpu_is_left_to_the_plain_loop():
    weights, inputs, _ = make(2, 2, SMALL, torch.bfloat16)
    assert not streamed.fits(weights, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(("scale", "batch"), [(12, 16), (16, 16), (16, 19), (32, 16)])
def test_kernels_on_a_gpu(scale: int, batch: int):
    """As wide as in size25m, size50m and size200m."""
    sizes = (256 * scale, 32 * scale, 8, 32, 2 * scale)
    exact = results(scan_loop, *make(batch, 8, sizes))
    made = make(batch, 8, sizes, torch.bfloat16)
    assert streamed.fits(made[0], made[1])
    plain, quick = results(scan_loop, *made), results(streamed, *made)
    again = results(streamed, *made)
    for name, goal in exact.items():
        error, usual = (float((x[name] - goal).detach().norm()) for x in (quick, plain))
        assert error < 1.5 * usual + 0.002 * float(goal.detach().norm()), name
        assert torch.equal(quick[name], again[name]), name
