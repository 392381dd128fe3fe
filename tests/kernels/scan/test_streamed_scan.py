"""The streamed posterior scan: its kernels on an emulated GPU, and its host code."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import reference
from emulated_gpu import EmulatedKernel, compile_kernels
from scan_helpers import (
    KernelRecorder,
    assert_as_accurate,
    outputs_and_gradients,
    random_scan,
    struct_members,
)

from reverie.kernels import nvrtc
from reverie.kernels.scan.streamed import launch as streamed
from reverie.kernels.scan.tensors import BackwardPass
from reverie.kernels.scan.triton import launch as triton_scan

SMALL = (256, 32, 8, 2, 16)
"""Deter, units, blocks, stoch, classes."""


@pytest.fixture(autouse=True)
def _enabled_kernels(monkeypatch):
    monkeypatch.setattr(streamed.fallback, "enabled", False)
    streamed.load_kernels.cache_clear()
    with torch.backends.mkldnn.flags(enabled=False):  # crashes on some processors
        yield
    streamed.load_kernels.cache_clear()


def replace_kernels(monkeypatch, make_kernel) -> None:
    """Replace compiled kernels and pretend that there is a GPU for them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "load", lambda source, names, device: list(names))
    monkeypatch.setattr(nvrtc, "Kernel", make_kernel)


@pytest.mark.skipif(torch.cuda.is_available(), reason="emulates a GPU on a CPU")
@pytest.mark.parametrize(
    ("sizes", "batch", "length", "weight_loads"),
    [
        (SMALL, 3, 2, 28),
        pytest.param((768, 96, 8, 4, 24), 19, 2, 28, marks=pytest.mark.slow),
        # fewer weights in flight than a thread needs
        pytest.param((768, 96, 8, 4, 24), 19, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_kernels_are_as_close_to_float32_as_the_reference(
    monkeypatch, tmp_path, sizes, batch, length, weight_loads
):
    monkeypatch.setattr(streamed, "WEIGHT_LOADS", weight_loads)
    source = streamed.read_source(streamed.LayerSizes(*sizes))
    library = compile_kernels(source, tmp_path)
    replace_kernels(
        monkeypatch,
        lambda name, blocks, threads, shared: EmulatedKernel(
            library, name, blocks, shared
        ),
    )
    exact = outputs_and_gradients(reference, random_scan(batch, length, sizes))
    scan = random_scan(batch, length, sizes, torch.bfloat16)
    plain = outputs_and_gradients(reference, scan)
    assert_as_accurate(outputs_and_gradients(streamed, scan), plain, exact)
    assert not streamed.fallback.enabled


@torch.no_grad()
def test_arguments_are_in_the_order_of_the_cuda_structures(monkeypatch):
    recorders: dict[str, KernelRecorder] = {}

    def record(name, blocks, threads, shared):
        return recorders.setdefault(name, KernelRecorder())

    replace_kernels(monkeypatch, record)
    scan = random_scan(2, 2, SMALL, torch.bfloat16)
    saved = streamed.run_forward(scan)
    grads = (x.transpose(0, 1) for x in saved[:3])
    is_first = scan.inputs.is_first
    streamed.run_backward(
        BackwardPass(scan.weights, saved, is_first, *grads, scan.settings)
    )
    source = streamed.read_source(streamed.LayerSizes(*SMALL))
    for name, kernel in recorders.items():
        struct = f"{name.split('_')[0].title()}Arguments"
        assert kernel.calls[0]._fields_ == struct_members(struct, source), name
    assert len(recorders["forward_in1"].calls) == 1  # not after the last step
    assert len(recorders["backward_logits"].calls) == 2


@pytest.mark.extended
def test_a_failed_launch_falls_back_to_triton_with_a_warning(monkeypatch):
    replace_kernels(monkeypatch, lambda *_: KernelRecorder("launch timed out"))
    scan = random_scan(2, 2, SMALL, torch.float16)
    expected = outputs_and_gradients(triton_scan, scan)
    with pytest.warns(UserWarning, match="launch timed out"):
        fast = outputs_and_gradients(streamed, scan)
    for name, value in expected.items():
        assert torch.equal(fast[name], value), name


def test_a_failed_compilation_disables_the_kernels_with_a_warning(monkeypatch):
    def load(source, names, device):
        raise nvrtc.Unavailable("no compiler")

    replace_kernels(monkeypatch, None)
    monkeypatch.setattr(nvrtc, "load", load)
    sizes, device = streamed.LayerSizes(*SMALL), torch.device("cuda", 0)
    with pytest.warns(UserWarning, match="no compiler"):
        assert streamed.load_kernels(sizes, device) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs tensors on a CPU")
def test_a_cpu_is_not_supported():
    assert not streamed.is_supported(random_scan(2, 2, SMALL, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize(("scale", "batch"), [(12, 16), (16, 16), (16, 19), (32, 16)])
def test_kernels_on_a_gpu(scale: int, batch: int):
    """At the widths of size25m, size50m and size200m."""
    sizes = (256 * scale, 32 * scale, 8, 32, 2 * scale)
    exact = outputs_and_gradients(reference, random_scan(batch, 8, sizes))
    scan = random_scan(batch, 8, sizes, torch.bfloat16)
    assert streamed.is_supported(scan)
    plain = outputs_and_gradients(reference, scan)
    fast = outputs_and_gradients(streamed, scan)
    assert_as_accurate(fast, plain, exact)
    for name, value in outputs_and_gradients(streamed, scan).items():
        assert torch.equal(fast[name], value), name
