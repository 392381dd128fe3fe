"""Group norms in clusters of thread blocks against plain ones.

On a machine without a GPU the very same source runs with a thread of the CPU for each
of its threads (`emulated_cluster.h`), where there is a C++ compiler.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
from contextlib import nullcontext
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reverie.kernels import nvrtc
from reverie.kernels.norm import group_norm
from reverie.kernels.norm.cluster_group_norm import launch as cluster_group_norm
from reverie.kernels.norm.cluster_group_norm.launch import Plan
from reverie.nets.residual import EPS, GROUPS

COMPILER = shutil.which("g++") or shutil.which("clang++")
WAYS = (cluster_group_norm.FORWARD, cluster_group_norm.BACKWARD)
TAIL = """
extern "C" void run(Arguments* a, int grid) { launch(norm_%s, *a, grid); }
"""


class HostKernel:
    """What a test puts in the place of a kernel on a GPU."""

    def __init__(self, function):
        self.function = function

    def __call__(self, arguments, blocks, overlap):
        self.function(ctypes.byref(arguments), blocks)


@pytest.fixture
def on_host(tmp_path, monkeypatch):
    """Have the kernels built for this machine's processor."""
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")

    @functools.cache
    def load(device, pixels, channels, way, plan):
        source = cluster_group_norm.source(pixels, channels, way, plan)
        machine = resources.files(cluster_group_norm.__package__).joinpath("device.cu")
        host = Path(__file__).with_name("emulated_cluster.h").read_text()
        path, library = tmp_path / f"{way.name}.cpp", tmp_path / f"{way.name}.so"
        path.write_text(source.replace(machine.read_text(), host) + TAIL % way.name)
        flags = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread"]
        subprocess.run([COMPILER, *flags, path, "-o", library], check=True)
        return HostKernel(ctypes.CDLL(str(library)).run)

    monkeypatch.setattr(cluster_group_norm, "load", load)


def compare(shape, plan, bias, more, device="cpu"):
    """There and back, and all the sums, against autograd in float32."""
    _, height, width, channels = shape

    def normal(*shape):
        return torch.randn(*shape, device=device)

    def half(*shape):
        return normal(*shape).bfloat16()

    x = (2 * normal(*shape) + 5 * normal(channels)).bfloat16()
    slope, scale, shift = half(*shape), normal(channels), normal(channels)
    lead, extra = half(channels) if bias else None, half(*shape) if more else None
    zeros = torch.zeros(channels, device=device)
    leaves = [
        leaf.detach().float().clone().requires_grad_()
        for leaf in (x, zeros if lead is None else lead, scale, shift)
    ]
    y = (leaves[0] + leaves[1]).permute(0, 3, 1, 2).contiguous()
    y = F.silu(F.group_norm(y, GROUPS, *leaves[2:], EPS)).permute(0, 2, 3, 1)
    dx, dbias, dscale, dshift = torch.autograd.grad(y, leaves, slope.float())
    total = zeros
    if extra is not None:
        dx, total = dx + extra.float(), extra.float().sum((0, 1, 2))

    active, stats = cluster_group_norm.normalize(x, lead, scale, shift, plan)
    torch.testing.assert_close(active.float(), y, rtol=1e-2, atol=1e-2)
    if not plan.fits(height * width, channels, cluster_group_norm.BACKWARD):
        return
    got = slope.clone()
    again, sums = cluster_group_norm.go_back(
        x, lead, scale, shift, stats, got, extra, plan
    )
    torch.testing.assert_close(again, active)
    torch.testing.assert_close(got.float(), dx, rtol=2e-2, atol=2e-2)
    size = float(dshift.abs().max())
    for mine, theirs in zip(sums.sum(0), (dshift, dscale, dbias, total), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * size)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize(
    ("shape", "plan", "bias", "more"),
    [
        ((2, 8, 8, 64), Plan(2, 64), True, True),
        ((2, 4, 8, 32), Plan(1, 32), False, False),
        ((1, 4, 8, 256), Plan(4, 64), False, True),
    ],
)
def test_the_source_does_what_a_norm_does(shape, plan, bias, more):
    compare(shape, plan, bias, more)


@pytest.mark.usefixtures("on_host")
def test_almost_constant_maps_keep_their_variance():
    x = torch.full((1, 8, 8, 32), 300.0).bfloat16()
    x[0, 0, 0] += 2
    _, stats = cluster_group_norm.normalize(
        x, None, torch.ones(32), torch.zeros(32), Plan(2, 64)
    )
    wanted = x.double().var((1, 2), unbiased=False)
    torch.testing.assert_close(stats[:, 1].double(), (wanted + EPS).rsqrt())


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_arguments_are_laid_out_as_in_the_source(way):
    source = cluster_group_norm.source(64, 64, way, Plan(2, 64))
    body = re.search(r"struct Arguments {(.*?)};", source, re.S)[1]
    members = re.findall(r"(\w+)\s*[,;]", re.sub(r"//.*", "", body))
    fields = getattr(cluster_group_norm, f"_{way.name.title()}")._fields_
    assert [key for key, _ in fields] == members


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_plan_fits_its_maps(way):
    for (pixels, channels), plan in cluster_group_norm.PLANS[way.name].items():
        assert plan.fits(pixels, channels, way), (pixels, channels)


def test_maps_that_do_not_divide_or_have_no_room_fit_no_plan():
    plan, way = Plan(2, 64), cluster_group_norm.FORWARD
    assert plan.fits(64, 64, way)
    assert not plan.fits(60, 64, way)
    assert not plan.fits(64, 96, way)
    assert Plan(4, 256).fits(4096, 64, way)
    assert not Plan(4, 256).fits(4096, 64, cluster_group_norm.BACKWARD)


def test_other_machines_and_dtypes_take_another_way(monkeypatch):
    x, way = torch.zeros(1, 64, 64, 64), cluster_group_norm.FORWARD
    assert cluster_group_norm.plan_for(x.bfloat16(), None, way) is None  # no GPU
    monkeypatch.setattr(cluster_group_norm, "_has_clusters", lambda device: True)
    assert cluster_group_norm.plan_for(x.bfloat16(), None, way) is not None
    assert cluster_group_norm.plan_for(x.bfloat16(), torch.zeros(64), way) is None
    assert cluster_group_norm.plan_for(x, None, way) is None
    assert cluster_group_norm.plan_for(x.bfloat16()[:, :9], None, way) is None


@pytest.fixture
def gpu(monkeypatch):
    """What a GPU says of itself."""
    about = SimpleNamespace(
        major=9, shared_memory_per_multiprocessor=cluster_group_norm.MEMORY
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    cluster_group_norm._has_clusters.cache_clear()
    yield about
    cluster_group_norm._has_clusters.cache_clear()


def refuse(*_):
    raise nvrtc.Unavailable("libnvrtc was not found")


def test_without_a_compiler_it_says_so_once(gpu, monkeypatch):
    monkeypatch.setattr(cluster_group_norm, "_refused", [])
    monkeypatch.setattr(nvrtc, "load", refuse)
    with pytest.warns(UserWarning, match="libnvrtc was not found"):
        assert not cluster_group_norm._has_clusters(torch.device("cuda"))
    assert not cluster_group_norm._has_clusters(torch.device("cuda"))


@pytest.mark.parametrize(
    "less", [{"major": 8}, {"shared_memory_per_multiprocessor": 99}]
)
def test_smaller_gpus_take_another_way(gpu, less):
    vars(gpu).update(less)
    assert not cluster_group_norm._has_clusters(torch.device("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="emulates one on a CPU")
@pytest.mark.usefixtures("on_host")
def test_norms_and_their_gradients_take_the_plan(monkeypatch):
    plans = {(64, 32): Plan(2, 64)}
    monkeypatch.setattr(cluster_group_norm, "_has_clusters", lambda device: True)
    x = torch.randn(1, 8, 8, 32).bfloat16()
    bias, scale, shift = torch.randn(32).bfloat16(), torch.randn(32), torch.randn(32)
    weight = (0.1 * torch.randn(32, 32, 3, 3)).bfloat16()
    found = []
    for each in ({}, plans):
        monkeypatch.setattr(
            cluster_group_norm, "PLANS", {way.name: each for way in WAYS}
        )
        active, stats = group_norm.normalize(x, bias, scale, shift)
        back = group_norm.slopes(x, x, bias, scale, shift, stats, weight, more=x)
        found.append((active, stats, *back))
    for mine, theirs in zip(*found, strict=True):
        size = float(theirs.abs().max())
        atol = 1e-4 + 1e-2 * size  # a bias ahead of single channels has no influence
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=atol)


@pytest.mark.parametrize("refuses", WAYS, ids=lambda way: way.name)
def test_a_kernel_that_does_not_start_leaves_the_work_to_others(refuses, monkeypatch):
    monkeypatch.setattr(cluster_group_norm, "_has_clusters", lambda device: True)
    monkeypatch.setattr(cluster_group_norm, "_refused", [])
    monkeypatch.setattr(cluster_group_norm, "load", refuse)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(1, 4, 4, 32, device=device).bfloat16()
    weight = torch.randn(32, 32, 3, 3, device=device).bfloat16()
    norm, found = (x[0, 0, 0], *torch.rand(2, 32, device=device)), []
    for plans in ({}, {(16, 32): Plan(1, 32)}):
        each = {way.name: plans if way is refuses else {} for way in WAYS}
        monkeypatch.setattr(cluster_group_norm, "PLANS", each)
        with pytest.warns(match="not found") if plans else nullcontext():
            active, stats = group_norm.normalize(x, *norm)
            back = group_norm.slopes(x, x, *norm, stats, weight, more=x)
        found.append((active, stats, *back))
    torch.testing.assert_close(found[1], found[0])
    assert cluster_group_norm.plan_for(x, None, refuses) is None


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_plan_on_a_gpu(way):
    for (pixels, channels), plan in cluster_group_norm.PLANS[way.name].items():
        side = int(pixels**0.5)
        compare((5, side, side, channels), plan, True, True, "cuda")
