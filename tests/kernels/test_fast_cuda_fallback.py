"""Modules with CUDA kernels report when a GPU or a compiler is missing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from host_kernels import imitate_hopper, raise_unavailable

from reverie.kernels import nvrtc
from reverie.kernels.conv.fused_residual import launch as fused_residual
from reverie.kernels.norm.cluster_group_norm import launch as cluster_group_norm

each_module = pytest.mark.parametrize(
    "launch", [cluster_group_norm, fused_residual], ids=["norm", "residual"]
)


@each_module
def test_without_a_compiler_it_warns_once(launch, monkeypatch):
    imitate_hopper(launch, monkeypatch)
    for name in ("load", "compile_in_background"):
        monkeypatch.setattr(nvrtc, name, raise_unavailable)
    with pytest.warns(UserWarning, match="libnvrtc was not found"):
        assert not launch._is_available(torch.device("cuda"))
    assert not launch._is_available(torch.device("cuda"))


@each_module
@pytest.mark.parametrize(
    "change", [{"major": 8}, {"shared_memory_per_multiprocessor": 99}]
)
def test_smaller_gpus_are_not_supported(launch, change, monkeypatch):
    vars(imitate_hopper(launch, monkeypatch)).update(change)
    assert not launch._is_available(torch.device("cuda"))
