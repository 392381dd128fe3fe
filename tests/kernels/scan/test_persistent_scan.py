"""The host code of the persistent posterior scan, without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton")

import reference
from scan_helpers import KernelRecorder, struct_members

from reverie.kernels.scan import posterior
from reverie.kernels.scan.persistent import launch as persistent
from reverie.kernels.scan.tensors import (
    BackwardPass,
    ForwardPass,
    SavedActivations,
    ScanInputs,
    ScanSettings,
    ScanWeights,
)


@pytest.fixture
def scan(monkeypatch):
    """Weights, inputs and settings of size12m for 32 rows and two steps."""
    monkeypatch.setattr(persistent.fallback, "enabled", False)
    deter, units, logits = persistent.DETER, persistent.UNITS, persistent.LOGITS

    def normal(*shape: int) -> Tensor:
        return (0.05 * torch.randn(*shape)).bfloat16()

    ones = torch.ones(units)
    weights = ScanWeights(
        *(normal(units, deter), normal(units), ones),
        *(normal(units, logits), normal(units), ones),
        *(normal(8, 4 * units, units), normal(deter), torch.ones(deter)),
        *(normal(8, units, 3 * units), normal(3 * deter)),
        *(normal(units, deter + 6)[:, :deter], ones),
        *(normal(logits, units), normal(logits)),
    )
    inputs = ScanInputs(
        normal(32, deter),
        normal(32, logits),
        normal(32, 2, units),
        normal(32, 2, units),
        torch.zeros(32, 2, dtype=torch.bool),
        torch.ones(32, 2, persistent.STOCH, persistent.CLASSES),
    )
    with torch.backends.mkldnn.flags(enabled=False):  # crashes on some processors
        settings = ScanSettings(persistent.CLASSES, 0.01, 1e-4)
        yield ForwardPass(weights, inputs, settings)


def replace_kernels(monkeypatch, error: str = "") -> dict[str, KernelRecorder]:
    kernels = {name: KernelRecorder(error) for name in persistent.SHARED_BYTES}
    monkeypatch.setattr(persistent, "load_kernels", lambda device: kernels)
    return kernels


def backward_pass(scan: ForwardPass, saved: SavedActivations) -> BackwardPass:
    widths = (persistent.DETER, persistent.LOGITS, persistent.LOGITS)
    generator = torch.Generator().manual_seed(0)
    grads = (torch.randn(32, 2, x, generator=generator).bfloat16() for x in widths)
    is_first = scan.inputs.is_first
    return BackwardPass(scan.weights, saved, is_first, *grads, scan.settings)


def test_arguments_are_in_the_order_of_the_cuda_structures(monkeypatch, scan):
    kernels = replace_kernels(monkeypatch)
    saved = persistent.run_forward(scan)
    grads = persistent.run_backward(backward_pass(scan, saved))
    source = persistent.read_source()
    for name, kernel in kernels.items():
        struct = f"{name.removeprefix('scan_').title()}Arguments"
        expected = struct_members(struct, source)
        assert kernel.calls[0]._fields_ == expected
    widths = [x.shape[0] for x in grads.vectors]
    assert widths == persistent.VECTOR_WIDTHS


def test_rows_are_scanned_sixteen_at_a_time(monkeypatch, scan):
    kernels = replace_kernels(monkeypatch)
    saved = persistent.run_forward(scan)
    first, second = kernels["scan_forward"].calls
    assert second.gates - first.gates == saved.gates.stride(0) * 2
    assert saved.gates.shape == (2, 2, 16, 3 * persistent.DETER)
    assert second.input_partials > first.input_partials
    assert first.obs_stride == persistent.DETER + 6
    assert first.hid_weight == second.hid_weight


def test_exchanged_words_are_initially_unset(monkeypatch, scan):
    replace_kernels(monkeypatch)
    saved, units = persistent.run_forward(scan), persistent.UNITS
    exchanged = (saved.deter, saved.hid_pre, saved.in1_pre[:, 1:])
    for x in (*exchanged, saved.shared_input[..., :units]):
        assert (x.contiguous().view(torch.int32) == persistent.UNSET).all()
    weights, inputs, _ = scan
    expected = torch.addmm(weights.in0_bias, inputs.deter, weights.in0_weight.T)
    assert torch.equal(saved.in0_pre[:, 0].flatten(0, 1), expected)


def gradients(implementation, scan: ForwardPass) -> tuple[Tensor, ...]:
    """Gradients of some weights and inputs, with the reference instead of Triton."""
    weight = scan.weights.gru_weight.requires_grad_()
    tokens = scan.inputs.tokens.requires_grad_()
    outputs = posterior.posterior_scan(implementation, scan)
    loss = sum(x.float().square().sum() for x in outputs)
    return torch.autograd.grad(loss, (weight, tokens))


@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_a_failed_launch_falls_back_to_triton_with_a_warning(
    monkeypatch, scan, failing
):
    """With the reference in place of Triton, which is slow without a GPU."""
    replace_kernels(monkeypatch, "too many blocks")
    monkeypatch.setattr(posterior, "triton", reference)
    expected = gradients(reference, scan)
    if failing == "backward":

        def run_forward(scan: ForwardPass) -> SavedActivations:
            saved = reference.run_forward(scan)
            grouped = (x.unflatten(1, (2, 16)).transpose(0, 1) for x in saved)
            return SavedActivations(*grouped)

        monkeypatch.setattr(persistent, "run_forward", run_forward)
    with pytest.warns(UserWarning, match="too many blocks"):
        actual = gradients(persistent, scan)
    for value, wanted in zip(actual, expected, strict=True):
        assert torch.equal(value, wanted)
    assert persistent.fallback.enabled


def test_a_cpu_is_not_supported(scan):
    assert not persistent.is_supported(scan)


def test_processes_that_share_a_gpu_with_mps_are_not_supported(monkeypatch, scan):
    replace_kernels(monkeypatch)
    monkeypatch.delenv(persistent.MPS_VARIABLE, raising=False)
    with FakeTensorMode():
        actions = torch.empty(32, 2, 1, dtype=torch.bfloat16, device="cuda")
    scan = scan._replace(inputs=scan.inputs._replace(actions=actions))
    assert persistent.is_supported(scan)
    monkeypatch.setenv(persistent.MPS_VARIABLE, "/tmp/nvidia-mps")
    assert not persistent.is_supported(scan)
