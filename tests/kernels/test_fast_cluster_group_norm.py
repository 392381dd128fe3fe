"""CUDA group norms in thread block clusters equal the plain ones.

Without a GPU, the same source runs on the CPU with one CPU thread per GPU thread
(`emulated_cluster.h`), if a C++ compiler is installed.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from host_kernels import (
    argument_names,
    compile_for_host,
    host_source,
    raise_unavailable,
)

from reverie.kernels.norm import group_norm
from reverie.kernels.norm.cluster_group_norm import launch
from reverie.kernels.norm.cluster_group_norm.launch import ClusterPlan
from reverie.nets.residual import EPS, GROUPS

MAX_STATIC_BYTES = 48 * 1024
"""Limit of statically allocated shared memory."""
DIRECTIONS = (launch.FORWARD, launch.BACKWARD)
RUN_FUNCTION = """
extern "C" void run(Arguments* a, int grid) { launch(norm_%s, *a, grid); }
"""
each_direction = pytest.mark.parametrize(
    "direction", DIRECTIONS, ids=lambda direction: direction.name
)


def fits(plan, pixels, channels, direction):
    """True if the work divides evenly among threads and the memory suffices."""
    share, pixels_left = divmod(pixels, plan.cluster_size)
    loads, values_left = divmod(share * channels, 8 * plan.threads)
    return (
        channels in (32, 64, 128, 256)
        and not pixels_left
        and not values_left
        and loads in (1, 2, 3, 4, 8, 12, 16, 32)
        and plan.sum_bytes(channels, direction) <= MAX_STATIC_BYTES
        and plan.blocks_per_sm(pixels, channels, direction) > 0
    )


class HostKernel:
    """Replaces a kernel on a GPU."""

    def __init__(self, function):
        self.function = function

    def __call__(self, arguments, blocks):
        self.function(ctypes.byref(arguments), blocks)


@pytest.fixture
def on_host(tmp_path, monkeypatch):
    """Compile the kernels for the CPU."""

    @functools.cache
    def load(device, pixels, channels, direction, plan):
        source = host_source(
            launch.source(pixels, channels, direction, plan),
            [launch.__package__],
            "emulated_cluster.h",
        )
        path = tmp_path / f"{direction.name}.cpp"
        path.write_text(source + RUN_FUNCTION % direction.name)
        return HostKernel(compile_for_host(path, "-std=c++20", "-pthread").run)

    monkeypatch.setattr(launch, "load", load)


def compare(shape, plan, has_bias, has_residual, device="cpu"):
    """Compare both passes and all sums with autograd in float32."""
    _, height, width, channels = shape

    def normal(*shape):
        return torch.randn(*shape, device=device)

    def half(*shape):
        return normal(*shape).bfloat16()

    x = (2 * normal(*shape) + 5 * normal(channels)).bfloat16()
    dy, scale, shift = half(*shape), normal(channels), normal(channels)
    bias = half(channels) if has_bias else None
    residual_grad = half(*shape) if has_residual else None
    zeros = torch.zeros(channels, device=device)
    leaves = [
        leaf.detach().float().clone().requires_grad_()
        for leaf in (x, zeros if bias is None else bias, scale, shift)
    ]
    y = (leaves[0] + leaves[1]).permute(0, 3, 1, 2).contiguous()
    y = F.silu(F.group_norm(y, GROUPS, *leaves[2:], EPS)).permute(0, 2, 3, 1)
    dx, dbias, dscale, dshift = torch.autograd.grad(y, leaves, dy.float())
    residual_sum = zeros
    if residual_grad is not None:
        dx = dx + residual_grad.float()
        residual_sum = residual_grad.float().sum((0, 1, 2))

    active, stats = launch.forward(x, bias, scale, shift, plan)
    torch.testing.assert_close(active.float(), y, rtol=1e-2, atol=1e-2)
    if not fits(plan, height * width, channels, launch.BACKWARD):
        return
    actual_dx = dy.clone()
    recomputed, sums = launch.backward(
        x, bias, scale, shift, stats, actual_dx, residual_grad, plan
    )
    torch.testing.assert_close(recomputed, active)
    torch.testing.assert_close(actual_dx.float(), dx, rtol=2e-2, atol=2e-2)
    size = float(dshift.abs().max())
    expected = (dshift, dscale, dbias, residual_sum)
    for actual, wanted in zip(sums.sum(0), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-4 * size)


@pytest.mark.extended_except("shape2-plan2-False-True")
@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize(
    ("shape", "plan", "has_bias", "has_residual"),
    [
        ((2, 8, 8, 64), ClusterPlan(2, 64), True, True),
        ((2, 4, 8, 32), ClusterPlan(1, 32), False, False),
        ((1, 4, 8, 256), ClusterPlan(4, 64), False, True),
    ],
)
def test_kernels_equal_the_plain_norm(shape, plan, has_bias, has_residual):
    compare(shape, plan, has_bias, has_residual)


@pytest.mark.usefixtures("on_host")
def test_almost_constant_maps_keep_their_variance():
    x = torch.full((1, 8, 8, 32), 300.0).bfloat16()
    x[0, 0, 0] += 2
    norm = (None, torch.ones(32), torch.zeros(32))
    _, stats = launch.forward(x, *norm, ClusterPlan(2, 64))
    variance = x.double().var((1, 2), unbiased=False)
    torch.testing.assert_close(stats[:, 1].double(), (variance + EPS).rsqrt())


def test_arguments_have_the_order_of_the_source(monkeypatch):
    names, plan = {}, ClusterPlan(2, 64)

    def load(device, pixels, channels, direction, plan):
        def record(arguments, blocks):
            names[direction] = [key for key, _ in arguments._fields_]

        return record

    monkeypatch.setattr(launch, "load", load)
    x, norm = torch.zeros(1, 8, 8, 64), (None, torch.ones(64), torch.zeros(64))
    _, stats = launch.forward(x, *norm, plan)
    launch.backward(x, *norm, stats, x, None, plan)
    for direction in DIRECTIONS:
        source = launch.source(64, 64, direction, plan)
        assert names[direction] == argument_names(source)


@each_direction
def test_every_plan_fits_its_maps(direction):
    for (pixels, channels), plan in launch.PLANS[direction.name].items():
        assert fits(plan, pixels, channels, direction), (pixels, channels)


def test_maps_that_do_not_divide_or_need_too_much_memory_fit_no_plan():
    plan, direction = ClusterPlan(2, 64), launch.FORWARD
    assert fits(plan, 64, 64, direction)
    assert not fits(plan, 60, 64, direction)
    assert not fits(plan, 64, 96, direction)
    assert fits(ClusterPlan(4, 256), 4096, 64, direction)
    assert not fits(ClusterPlan(4, 256), 4096, 64, launch.BACKWARD)


def test_other_devices_and_dtypes_are_not_supported(monkeypatch):
    x, direction = torch.zeros(1, 64, 64, 64), launch.FORWARD
    assert launch.plan_for(x.bfloat16(), None, direction) is None  # no GPU
    monkeypatch.setattr(launch, "_is_available", lambda device: True)
    assert launch.plan_for(x.bfloat16(), None, direction) is not None
    assert launch.plan_for(x.bfloat16(), torch.zeros(64), direction) is None
    assert launch.plan_for(x, None, direction) is None
    assert launch.plan_for(x.bfloat16()[:, :9], None, direction) is None


@pytest.mark.extended
@pytest.mark.skipif(torch.cuda.is_available(), reason="emulates one on a CPU")
@pytest.mark.usefixtures("on_host")
def test_norms_and_their_gradients_use_the_plan(monkeypatch):
    plans = {(64, 32): ClusterPlan(2, 64)}
    monkeypatch.setattr(launch, "_is_available", lambda device: True)
    x = torch.randn(1, 8, 8, 32).bfloat16()
    norm = (torch.randn(32).bfloat16(), torch.randn(32), torch.randn(32))
    weight = (0.1 * torch.randn(32, 32, 3, 3)).bfloat16()
    results = []
    for each in ({}, plans):
        all_plans = {direction.name: each for direction in DIRECTIONS}
        monkeypatch.setattr(launch, "PLANS", all_plans)
        active, stats = group_norm.group_norm_silu(x, *norm)
        grads = group_norm.norm_conv_backward(x, x, *norm, stats, weight, x)
        results.append((active, stats, *grads))
    for expected, actual in zip(*results, strict=True):
        # a bias before a norm of single channels has no influence
        atol = 1e-4 + 1e-2 * float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=atol)


@pytest.mark.parametrize("failing", DIRECTIONS, ids=lambda direction: direction.name)
def test_after_a_failed_launch_other_kernels_are_used(failing, monkeypatch):
    monkeypatch.setattr(launch, "_is_available", lambda device: True)
    monkeypatch.setattr(launch.fallback, "enabled", False)
    monkeypatch.setattr(launch, "load", raise_unavailable)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(1, 4, 4, 32, device=device).bfloat16()
    weight = torch.randn(32, 32, 3, 3, device=device).bfloat16()
    norm, results = (x[0, 0, 0], *torch.rand(2, 32, device=device)), []
    for plans in ({}, {(16, 32): ClusterPlan(1, 32)}):
        all_plans = {each.name: plans if each is failing else {} for each in DIRECTIONS}
        monkeypatch.setattr(launch, "PLANS", all_plans)
        with pytest.warns(match="not found") if plans else nullcontext():
            active, stats = group_norm.group_norm_silu(x, *norm)
            grads = group_norm.norm_conv_backward(x, x, *norm, stats, weight, x)
        results.append((active, stats, *grads))
    torch.testing.assert_close(results[1], results[0])
    assert launch.plan_for(x, None, failing) is None


@pytest.mark.gpu
@each_direction
def test_every_plan_on_a_gpu(direction):
    for (pixels, channels), plan in launch.PLANS[direction.name].items():
        side = int(pixels**0.5)
        compare((5, side, side, channels), plan, True, True, "cuda")
