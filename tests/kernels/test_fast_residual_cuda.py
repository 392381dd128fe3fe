"""CUDA residual blocks equal the plain ones.

Without a GPU, the same source runs on the CPU with one fiber per thread
(`emulated_block.h`), if a C++ compiler is installed.
"""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from host_kernels import (
    argument_names,
    compile_for_host,
    host_source,
    imitate_hopper,
    raise_unavailable,
)

from reverie.kernels import nvrtc
from reverie.kernels.accelerate import use_fast_versions
from reverie.kernels.conv.fused_residual import launch
from reverie.kernels.conv.fused_residual.launch import BlockWeights, MapSize, TilePlan
from reverie.kernels.norm import cluster_group_norm, group_norm
from reverie.nets.blocks import initialize
from reverie.nets.residual import EPS, GROUPS, Residual

SMALL_PLANS = {
    MapSize(8, 16, 32): TilePlan(4),
    MapSize(8, 16, 64): TilePlan(8),
    MapSize(24, 16, 32): TilePlan(8),
}
RUN_FUNCTIONS = """
static Arguments arguments;
#define RUN(name)                                                              \\
  extern "C" int run_##name(Arguments* a, int grid, int scratch_bytes, int bytes, \\
                            bool backwards) {                                  \\
    arguments = *a;                                                            \\
    return launch([] { name(arguments); }, grid, scratch_bytes, bytes, backwards); \\
  }
"""


def fits(plan, size):
    """True if the work divides evenly among warps and the memory suffices."""
    return (
        plan.rows in (4, 8, 16)
        and size.height % plan.rows == 0
        and size.width % launch.WARP_COLUMNS == 0
        and size.channels in (32, 64)
        and size.channels <= plan.threads(size) <= launch.MAX_THREADS
        and plan.blocks_per_sm(size) > 0
    )


class HostKernel:
    """Replaces a kernel on a GPU."""

    backwards = False

    def __init__(self, function, scratch_bytes, shared_bytes):
        self.function, self.sizes = function, (scratch_bytes, shared_bytes)

    def __call__(self, arguments, blocks):
        inputs = (ctypes.byref(arguments), blocks, *self.sizes, self.backwards)
        assert self.function(*inputs) == 0, "invalid address, or a bank conflict"


@functools.cache
def load_on_host(folder, size, plan):
    """Compile the kernels for the CPU."""
    packages = (cluster_group_norm, launch.__package__)
    source = host_source(launch.source(size, plan), packages, "emulated_block.h")
    runs = "".join(f"RUN({name})\n" for name in launch.KERNELS)
    path = folder / f"kernels-{'-'.join(map(str, (*size, *plan)))}.cpp"
    path.write_text(source + RUN_FUNCTIONS + runs)
    library = compile_for_host(path, "-std=c++17")
    sizes = (plan.sum_bytes(size), plan.tile_bytes(size))
    return [
        HostKernel(getattr(library, f"run_{name}"), *sizes) for name in launch.KERNELS
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def emulated(folder, monkeypatch):
    """Plans for small maps, with kernels that run on the CPU."""
    if torch.cuda.is_available():
        pytest.skip("emulates a GPU on a CPU")

    def load(device, size, plan):
        return load_on_host(folder, size, plan)

    monkeypatch.setattr(launch, "load", load)
    monkeypatch.setattr(launch, "PLANS", SMALL_PLANS)
    monkeypatch.setattr(launch.fallback, "enabled", False)
    monkeypatch.setattr(launch, "_is_available", lambda device: True)


def make_block(channels, device="cpu"):
    """Return a block with weights exact in bfloat16 and random norm parameters."""
    net = Residual(channels, channels)
    initialize(net, torch.Generator().manual_seed(0))
    for name, parameter in net.named_parameters():
        if name.endswith(("scale", "shift", "bias")):
            parameter.data.add_(0.5 * torch.randn(parameter.shape))
        if "norm" not in name:
            parameter.data.copy_(parameter.data.bfloat16())
    return net.to(device)


def block_weights(net, input_bias):
    bias = net.conv1.bias if input_bias is None else net.conv1.bias + input_bias
    weights = (net.conv0.weight, net.conv0.bias, net.conv1.weight, bias)
    norms = (net.norm0.scale, net.norm0.shift, net.norm1.scale, net.norm1.shift)
    with torch.no_grad():
        halves = [v.bfloat16() for v in weights]
    return BlockWeights(input_bias, *(v.detach() for v in norms), *halves)


def group_statistics(x):
    """Return mean and 1 / deviation of each channel's group."""
    groups = x.double().unflatten(-1, (GROUPS, -1))
    mean = groups.mean((1, 2, 4)).repeat_interleave(groups.shape[-1], -1)
    deviation = groups.var((1, 2, 4), unbiased=False).add(EPS).rsqrt()
    wide = deviation.repeat_interleave(groups.shape[-1], -1)
    return torch.stack([mean, wide], 1)


@torch.no_grad()
def compare(net, x, input_bias):
    """Compare every step with a plain one in float32, with the kernels' own inputs."""
    result = launch.forward(x, block_weights(net, input_bias))
    assert result is not None
    bias = torch.zeros_like(x[0, 0, 0]) if input_bias is None else input_bias
    bias0 = net.conv0.bias.bfloat16().float()
    zeros = torch.zeros_like(net.conv0.bias)
    active = net.norm0(x.float() + bias.float()).bfloat16().float().permute(0, 3, 1, 2)
    middle = F.conv2d(active, net.conv0.weight, zeros, padding=1).permute(0, 2, 3, 1)
    torch.testing.assert_close(result.middle.float(), middle, rtol=1e-2, atol=1e-2)
    middle = result.middle.float() + bias0
    active = net.norm1(middle).bfloat16().float().permute(0, 3, 1, 2)
    y = F.conv2d(active, net.conv1.weight, net.conv1.bias, padding=1)
    y = y.permute(0, 2, 3, 1) + x.float() + bias.float()
    torch.testing.assert_close(result.y.float(), y, rtol=1e-2, atol=2e-2)
    expected = group_statistics(x.float() + bias.float()), group_statistics(middle)
    stats = result.stats0.double(), result.stats1.double()
    torch.testing.assert_close(stats, expected, rtol=1e-5, atol=1e-5)
    exact = net(x.float() + bias)
    torch.testing.assert_close(result.y.float(), exact, rtol=5e-3, atol=0.1)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("size", "has_bias"),
    [
        (MapSize(8, 16, 32), True),
        (MapSize(8, 16, 32), False),
        (MapSize(8, 16, 64), True),
        (MapSize(24, 16, 32), True),
    ],
)
def test_kernels_equal_the_plain_block(size, has_bias):
    x = (2 * torch.randn(2, *size) + 3 * torch.randn(size.channels)).bfloat16()
    input_bias = torch.randn(size.channels).bfloat16() if has_bias else None
    compare(make_block(size.channels), x, input_bias)


@pytest.mark.usefixtures("emulated")
def test_the_order_of_threads_does_not_matter(monkeypatch):
    x, weights = (
        torch.randn(1, 8, 16, 32).bfloat16(),
        block_weights(make_block(32), None),
    )
    in_order = launch.forward(x, weights)
    monkeypatch.setattr(HostKernel, "backwards", True)
    torch.testing.assert_close(launch.forward(x, weights), in_order, rtol=0, atol=0)


@pytest.mark.usefixtures("emulated")
def test_almost_constant_maps_keep_their_variance():
    x = torch.full((1, 24, 16, 32), 300.0).bfloat16()
    x[0, 5, 3] += 2
    stats = launch.forward(x, block_weights(make_block(32), None)).stats0
    expected = group_statistics(x)
    torch.testing.assert_close(stats.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("emulated")
def test_statistics_equal_those_of_the_separate_norms():
    x, weights = (
        torch.randn(2, 8, 16, 32).bfloat16(),
        block_weights(make_block(32), None),
    )
    result = launch.forward(x, weights)
    _, stats = group_norm.group_norm_silu(x, None, weights.scale0, weights.shift0)
    torch.testing.assert_close(result.stats0, stats, rtol=1e-5, atol=1e-5)
    norm = (weights.bias0, weights.scale1, weights.shift1)
    _, stats = group_norm.group_norm_silu(result.middle, *norm)
    torch.testing.assert_close(result.stats1, stats, rtol=1e-5, atol=1e-5)


def compare_with_separate_kernels(monkeypatch, net, x, input_bias, plans):
    """Compare outputs and gradients of a fast block with and without these kernels."""
    use_fast_versions(net)
    grad, results = torch.randn_like(x), []
    for each in ({}, plans):
        monkeypatch.setattr(launch, "PLANS", each)
        inputs = [v.clone().requires_grad_() for v in (x, input_bias)]
        y = net(*inputs)
        leaves = [*inputs, *net.parameters()]
        results.append((y, *torch.autograd.grad((y * grad).float().sum(), leaves)))
    for expected, actual in zip(*results, strict=True):
        size = float(expected.detach().abs().max())
        # a bias before a norm of single channels has no influence
        atol = 5e-2 * max(size, 1.0)
        torch.testing.assert_close(actual, expected, rtol=5e-2, atol=atol)


@pytest.mark.usefixtures("emulated")
def test_blocks_and_their_gradients_use_the_plan(monkeypatch):
    x, input_bias = torch.randn(1, 8, 16, 32).bfloat16(), torch.randn(32).bfloat16()
    compare_with_separate_kernels(
        monkeypatch, make_block(32), x, input_bias, SMALL_PLANS
    )


def test_arguments_have_the_order_of_the_source():
    source = launch.source(MapSize(24, 16, 32), TilePlan(8))
    assert [*launch.ARGUMENTS, "eps"] == argument_names(source)


def test_every_plan_fits_its_maps():
    assert launch.PLANS.keys() == {MapSize(64, 64, 32), MapSize(32, 32, 32)}
    for size, plan in launch.PLANS.items():
        assert fits(plan, size), size


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (MapSize(60, 64, 32), TilePlan(8)),
        (MapSize(64, 60, 32), TilePlan(8)),
        (MapSize(64, 64, 96), TilePlan(8)),
        (MapSize(64, 64, 32), TilePlan(2)),
        (MapSize(64, 64, 64), TilePlan(16)),  # too many threads
        (MapSize(64, 128, 32), TilePlan(16)),
    ],
)
def test_maps_that_do_not_divide_or_need_too_much_memory_fit_no_plan(size, plan):
    assert fits(TilePlan(8), MapSize(64, 64, 64))
    assert not fits(plan, size)


def test_other_devices_sizes_and_dtypes_are_not_supported(monkeypatch):
    x = torch.zeros(1, 64, 64, 32).bfloat16()
    weights = block_weights(make_block(32), None)
    assert launch.forward(x, weights) is None  # no GPU
    monkeypatch.setattr(launch, "_is_available", lambda device: True)
    monkeypatch.setattr(launch.fallback, "enabled", False)
    assert launch.plan_for(x, weights) is not None
    assert launch.plan_for(x, weights._replace(input_bias=torch.zeros(32))) is None
    assert launch.plan_for(x.float(), weights) is None
    assert launch.plan_for(x[:0], weights) is None
    assert launch.plan_for(x[:, :9], weights) is None
    unaligned = torch.zeros(33).bfloat16()[1:]
    assert launch.plan_for(x, weights._replace(output_bias=unaligned)) is None
    monkeypatch.setattr(launch, "PLANS", {})
    assert launch.plan_for(x, weights) is None


def test_all_kernels_are_compiled_in_the_background(monkeypatch):
    imitate_hopper(launch, monkeypatch)
    compiled = []

    def load(text, names, device):
        assert text in compiled
        assert all(f"KERNEL {name}(" in text for name in names)
        return [ctypes.c_void_p()] * len(names)

    def compile_in_background(texts, device):
        compiled.extend(texts)

    monkeypatch.setattr(nvrtc, "compile_in_background", compile_in_background)
    monkeypatch.setattr(nvrtc, "load", load)
    monkeypatch.setattr(nvrtc, "call_driver", lambda *_: None)
    assert launch._is_available(torch.device("cuda"))
    for size, plan in launch.PLANS.items():
        measure, convolve = launch.load(torch.device("cuda"), size, plan)
        assert (measure.shared, convolve.shared) == (0, plan.tile_bytes(size))
        assert measure.threads == convolve.threads == plan.threads(size)
    assert len(set(compiled)) == len(launch.PLANS)


@pytest.mark.usefixtures("emulated")
def test_after_a_failed_launch_other_kernels_are_used(monkeypatch):
    monkeypatch.setattr(launch, "load", raise_unavailable)
    x, weights = (
        torch.randn(1, 8, 16, 32).bfloat16(),
        block_weights(make_block(32), None),
    )
    with pytest.warns(UserWarning, match="not found"):
        assert launch.forward(x, weights) is None
    assert launch.plan_for(x, weights) is None


GPU_PLANS = [
    *launch.PLANS.items(),
    (MapSize(64, 64, 32), TilePlan(8)),
    (MapSize(64, 64, 64), TilePlan(8)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("size", "plan"), GPU_PLANS)
def test_every_plan_on_a_gpu(size, plan, has_bias, monkeypatch):
    monkeypatch.setattr(launch, "PLANS", {size: plan})
    level = 3 * torch.randn(size.channels, device="cuda")
    x = (2 * torch.randn(5, *size, device="cuda") + level).bfloat16()
    input_bias = level.bfloat16() if has_bias else None
    compare(make_block(size.channels, "cuda"), x, input_bias)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "plan"), GPU_PLANS)
def test_gradients_of_every_plan_on_a_gpu(size, plan, monkeypatch):
    x = torch.randn(5, *size, device="cuda").bfloat16()
    input_bias = torch.randn(size.channels, device="cuda").bfloat16()
    net = make_block(size.channels, "cuda")
    compare_with_separate_kernels(monkeypatch, net, x, input_bias, {size: plan})
