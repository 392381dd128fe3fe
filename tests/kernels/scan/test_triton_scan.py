"""The Triton implementation of the posterior scan against the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import reference
from scan_helpers import (
    DEVICE,
    assert_as_accurate,
    outputs_and_gradients,
    random_scan,
)

from reverie.kernels.launch import can_launch
from reverie.kernels.scan.triton import launch as triton_scan

needs_kernels = pytest.mark.skipif(
    not can_launch(DEVICE, torch.float32),
    reason="needs a CUDA device or TRITON_INTERPRET=1",
)

SIZES = {
    "small": (64, 16, 2, 2, 8),
    "blocks of another width": (96, 16, 2, 2, 24),
    "wide classes": (32, 32, 2, 2, 32),
}


@pytest.mark.extended_except("wide classes-1-1")
@needs_kernels
@pytest.mark.parametrize(
    ("name", "batch", "length"),
    [("small", 2, 3), ("blocks of another width", 17, 2), ("wide classes", 1, 1)],
)
def test_kernels_equal_the_reference(name: str, batch: int, length: int):
    scan = random_scan(batch, length, SIZES[name])
    plain = outputs_and_gradients(reference, scan)
    fast = outputs_and_gradients(triton_scan, scan)
    for name, value in plain.items():
        torch.testing.assert_close(
            fast[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@needs_kernels
def test_kernels_support_half_precision():
    exact = outputs_and_gradients(reference, random_scan(3, 2, SIZES["small"]))
    # float16, because the interpreter does not support bfloat16
    scan = random_scan(3, 2, SIZES["small"], torch.float16)
    plain = outputs_and_gradients(reference, scan)
    assert_as_accurate(outputs_and_gradients(triton_scan, scan), plain, exact)


def test_widths_that_are_no_multiple_of_16_are_not_supported():
    assert not triton_scan.is_supported(random_scan(2, 2, (30, 10, 3, 2, 4)))
