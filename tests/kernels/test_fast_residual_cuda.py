"""Residual blocks in tiles against plain ones.

On a machine without a GPU the very same source runs with a fiber of the CPU for each of
its threads (`emulated_block.h`), where there is a C++ compiler.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reverie.kernels import nvrtc
from reverie.kernels.accelerate import use_fast_versions
from reverie.kernels.conv.fused_residual import launch as fused_residual
from reverie.kernels.conv.fused_residual.launch import Given, Plan, Size
from reverie.kernels.norm import cluster_group_norm, group_norm
from reverie.nets.blocks import initialize
from reverie.nets.residual import EPS, GROUPS, Residual

COMPILER = shutil.which("g++") or shutil.which("clang++")
SMALL = {Size(8, 16, 32): Plan(4), Size(8, 16, 64): Plan(8), Size(24, 16, 32): Plan(8)}
TAIL = """
static Arguments given;
#define RUN(name)                                                                    \\
  extern "C" int run_##name(Arguments* a, int grid, int room, int bytes, bool back) { \\
    given = *a;                                                                      \\
    return launch([] { name(given); }, grid, room, bytes, back);                     \\
  }
"""


class HostKernel:
    """What a test puts in the place of a kernel on a GPU."""

    backwards = False

    def __init__(self, function, room, shared):
        self.function, self.sizes = function, (room, shared)

    def __call__(self, arguments, blocks, overlap):
        given = (ctypes.byref(arguments), blocks, *self.sizes, self.backwards)
        assert self.function(*given) == 0, "outside of memory, or in the same bank"


@functools.cache
def on_host(folder, size, plan):
    """The kernels, built for this machine's processor."""
    source = fused_residual.source(size, plan)
    for package in (cluster_group_norm, fused_residual.__package__):
        text = resources.files(package).joinpath("device.cu").read_text()
        assert text in source
        source = source.replace(text, "")
    host = Path(__file__).with_name("emulated_block.h").read_text()
    at = source.index("//")  # after the sizes
    runs = "".join(f"RUN({name})\n" for name in fused_residual.KERNELS)
    path = folder / f"tiles-{'-'.join(map(str, (*size, *plan)))}.cpp"
    path.write_text("".join([source[:at], host, source[at:], TAIL, runs]))
    library = path.with_suffix(".so")
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, path, "-o", library], check=True)
    built = ctypes.CDLL(str(library))
    return [
        HostKernel(getattr(built, f"run_{name}"), plan.room(size), plan.shared(size))
        for name in fused_residual.KERNELS
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiles")


@pytest.fixture
def emulated(folder, monkeypatch):
    """Small maps have plans, and kernels that a CPU runs."""
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    if torch.cuda.is_available():
        pytest.skip("emulates a GPU on a CPU")

    def load(device, size, plan):
        return on_host(folder, size, plan)

    monkeypatch.setattr(fused_residual, "load", load)
    monkeypatch.setattr(fused_residual, "PLANS", SMALL)
    monkeypatch.setattr(fused_residual, "_refused", [])
    monkeypatch.setattr(fused_residual, "_has_tiles", lambda device: True)


def make(channels, device="cpu"):
    """A block with weights that bfloat16 has, and norms that do something."""
    net = Residual(channels, channels)
    initialize(net, torch.Generator().manual_seed(0))
    for name, parameter in net.named_parameters():
        if name.endswith(("scale", "shift", "bias")):
            parameter.data.add_(0.5 * torch.randn(parameter.shape))
        if "norm" not in name:
            parameter.data.copy_(parameter.data.bfloat16())
    return net.to(device)


def parts(net, first):
    """What a block has, besides its map."""
    last = net.conv1.bias if first is None else net.conv1.bias + first
    weights = (net.conv0.weight, net.conv0.bias, net.conv1.weight, last)
    norms = (net.norm0.scale, net.norm0.shift, net.norm1.scale, net.norm1.shift)
    with torch.no_grad():
        halves = [v.bfloat16() for v in weights]
    return Given(first, *(v.detach() for v in norms), *halves)


def measured(x):
    """Mean and 1 / deviation of groups, for each of their channels."""
    groups = x.double().unflatten(-1, (GROUPS, -1))
    mean = groups.mean((1, 2, 4)).repeat_interleave(groups.shape[-1], -1)
    deviation = groups.var((1, 2, 4), unbiased=False).add(EPS).rsqrt()
    wide = deviation.repeat_interleave(groups.shape[-1], -1)
    return torch.stack([mean, wide], 1)


@torch.no_grad()
def compare(net, x, first):
    """Every step against a plain one, in float32, of what the kernels had there."""
    found = fused_residual.forward(x, parts(net, first))
    assert found is not None
    lead = torch.zeros_like(x[0, 0, 0]) if first is None else first
    bias = net.conv0.bias.bfloat16().float()
    zeros = torch.zeros_like(net.conv0.bias)
    active = net.norm0(x.float() + lead.float()).bfloat16().float().permute(0, 3, 1, 2)
    middle = F.conv2d(active, net.conv0.weight, zeros, padding=1).permute(0, 2, 3, 1)
    torch.testing.assert_close(found.middle.float(), middle, rtol=1e-2, atol=1e-2)
    middle = found.middle.float() + bias
    active = net.norm1(middle).bfloat16().float().permute(0, 3, 1, 2)
    y = F.conv2d(active, net.conv1.weight, net.conv1.bias, padding=1)
    y = y.permute(0, 2, 3, 1) + x.float() + lead.float()
    torch.testing.assert_close(found.y.float(), y, rtol=1e-2, atol=2e-2)
    wanted = measured(x.float() + lead.float()), measured(middle)
    stats = found.stats0.double(), found.stats1.double()
    torch.testing.assert_close(stats, wanted, rtol=1e-5, atol=1e-5)
    exact = net(x.float() + lead)
    torch.testing.assert_close(found.y.float(), exact, rtol=5e-3, atol=0.1)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("size", "bias"),
    [
        (Size(8, 16, 32), True),
        (Size(8, 16, 32), False),
        (Size(8, 16, 64), True),
        (Size(24, 16, 32), True),
    ],
)
def test_the_source_does_what_a_block_does(size, bias):
    x = (2 * torch.randn(2, *size) + 3 * torch.randn(size.channels)).bfloat16()
    first = torch.randn(size.channels).bfloat16() if bias else None
    compare(make(size.channels), x, first)


@pytest.mark.usefixtures("emulated")
def test_the_order_of_threads_is_of_no_influence(monkeypatch):
    x, given = torch.randn(1, 8, 16, 32).bfloat16(), parts(make(32), None)
    forth = fused_residual.forward(x, given)
    monkeypatch.setattr(HostKernel, "backwards", True)
    torch.testing.assert_close(fused_residual.forward(x, given), forth, rtol=0, atol=0)


@pytest.mark.usefixtures("emulated")
def test_almost_constant_maps_keep_their_variance():
    x = torch.full((1, 24, 16, 32), 300.0).bfloat16()
    x[0, 5, 3] += 2
    found = fused_residual.forward(x, parts(make(32), None))
    torch.testing.assert_close(found.stats0.double(), measured(x), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("emulated")
def test_the_norms_are_those_of_the_other_way():
    x, given = torch.randn(2, 8, 16, 32).bfloat16(), parts(make(32), None)
    found = fused_residual.forward(x, given)
    _, stats = group_norm.normalize(x, None, given.scale0, given.shift0)
    torch.testing.assert_close(found.stats0, stats, rtol=1e-5, atol=1e-5)
    norm = (given.bias0, given.scale1, given.shift1)
    _, stats = group_norm.normalize(found.middle, *norm)
    torch.testing.assert_close(found.stats1, stats, rtol=1e-5, atol=1e-5)


def both_ways(monkeypatch, net, x, first, plans):
    """Outputs and gradients of a fast block, the other way and in fused_residual."""
    use_fast_versions(net)
    slope = torch.randn_like(x)
    for each in ({}, plans):
        monkeypatch.setattr(fused_residual, "PLANS", each)
        inputs = [v.clone().requires_grad_() for v in (x, first)]
        y = net(*inputs)
        leaves = [*inputs, *net.parameters()]
        yield (y, *torch.autograd.grad((y * slope).float().sum(), leaves))


def check_both(ways):
    for mine, theirs in zip(*ways, strict=True):
        size = float(theirs.detach().abs().max())
        # a bias ahead of single channels has no influence
        atol = 5e-2 * max(size, 1.0)
        torch.testing.assert_close(mine, theirs, rtol=5e-2, atol=atol)


@pytest.mark.usefixtures("emulated")
def test_blocks_and_their_gradients_take_the_plan(monkeypatch):
    x, first = torch.randn(1, 8, 16, 32).bfloat16(), torch.randn(32).bfloat16()
    check_both(both_ways(monkeypatch, make(32), x, first, SMALL))


def test_arguments_are_laid_out_as_in_the_source():
    source = fused_residual.source(Size(24, 16, 32), Plan(8))
    body = re.search(r"struct Arguments {(.*?)};", source, re.S)[1]
    members = re.findall(r"(\w+)\s*[,;]", re.sub(r"//.*", "", body))
    assert [key for key, _ in fused_residual._Step._fields_] == members


def test_every_plan_fits_its_maps():
    assert fused_residual.PLANS.keys() == {Size(64, 64, 32), Size(32, 32, 32)}
    for size, plan in fused_residual.PLANS.items():
        assert plan.fits(size), size


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (Size(60, 64, 32), Plan(8)),
        (Size(64, 60, 32), Plan(8)),
        (Size(64, 64, 96), Plan(8)),
        (Size(64, 64, 32), Plan(2)),
        (Size(64, 64, 64), Plan(16)),  # too many threads
        (Size(64, 128, 32), Plan(16)),
    ],
)
def test_what_does_not_divide_or_has_no_room_fits_no_plan(size, plan):
    assert Plan(8).fits(Size(64, 64, 64))
    assert not plan.fits(size)


def test_other_machines_sizes_and_dtypes_take_another_way(monkeypatch):
    x, given = torch.zeros(1, 64, 64, 32).bfloat16(), parts(make(32), None)
    assert fused_residual.forward(x, given) is None  # no GPU
    monkeypatch.setattr(fused_residual, "_has_tiles", lambda device: True)
    monkeypatch.setattr(fused_residual, "_refused", [])
    assert fused_residual.plan_for(x, given) is not None
    assert fused_residual.plan_for(x, given._replace(first=torch.zeros(32))) is None
    assert fused_residual.plan_for(x.float(), given) is None
    assert fused_residual.plan_for(x[:0], given) is None
    assert fused_residual.plan_for(x[:, :9], given) is None
    odd = torch.zeros(33).bfloat16()[1:]
    assert fused_residual.plan_for(x, given._replace(last=odd)) is None
    monkeypatch.setattr(fused_residual, "PLANS", {})
    assert fused_residual.plan_for(x, given) is None


@pytest.fixture
def gpu(monkeypatch):
    """What a GPU says of itself."""
    about = SimpleNamespace(
        major=9, shared_memory_per_multiprocessor=fused_residual.MEMORY
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(fused_residual, "_refused", [])
    fused_residual._has_tiles.cache_clear()
    fused_residual.load.cache_clear()
    yield about
    fused_residual._has_tiles.cache_clear()
    fused_residual.load.cache_clear()


def refuse(*_):
    raise nvrtc.Unavailable("libnvrtc was not found")


def test_without_a_compiler_it_says_so_once(gpu, monkeypatch):
    monkeypatch.setattr(nvrtc, "compile_in_background", refuse)
    with pytest.warns(UserWarning, match="libnvrtc was not found"):
        assert not fused_residual._has_tiles(torch.device("cuda"))
    assert not fused_residual._has_tiles(torch.device("cuda"))


def test_all_kernels_are_compiled_ahead(gpu, monkeypatch):
    prepared = []

    def load(text, names, device):
        assert text in prepared
        assert all(f"KERNEL {name}(" in text for name in names)
        return [ctypes.c_void_p()] * len(names)

    monkeypatch.setattr(
        nvrtc, "compile_in_background", lambda texts, device: prepared.extend(texts)
    )
    monkeypatch.setattr(nvrtc, "load", load)
    monkeypatch.setattr(nvrtc, "_call_driver", lambda *_: None)
    assert fused_residual._has_tiles(torch.device("cuda"))
    for size, plan in fused_residual.PLANS.items():
        measure, convolve = fused_residual.load(torch.device("cuda"), size, plan)
        assert (measure.shared, convolve.shared) == (0, plan.shared(size))
        assert measure.threads == convolve.threads == plan.threads(size)
    assert len(set(prepared)) == len(fused_residual.PLANS)


@pytest.mark.parametrize(
    "less", [{"major": 8}, {"shared_memory_per_multiprocessor": 99}]
)
def test_smaller_gpus_take_another_way(gpu, less):
    vars(gpu).update(less)
    assert not fused_residual._has_tiles(torch.device("cuda"))


@pytest.mark.usefixtures("emulated")
def test_a_kernel_that_does_not_start_leaves_the_work_to_others(monkeypatch):
    monkeypatch.setattr(fused_residual, "load", refuse)
    x, given = torch.randn(1, 8, 16, 32).bfloat16(), parts(make(32), None)
    with pytest.warns(UserWarning, match="not found"):
        assert fused_residual.forward(x, given) is None
    assert fused_residual.plan_for(x, given) is None


ON_GPU = [
    *fused_residual.PLANS.items(),
    (Size(64, 64, 32), Plan(8)),
    (Size(64, 64, 64), Plan(8)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("size", "plan"), ON_GPU)
def test_every_plan_on_a_gpu(size, plan, bias, monkeypatch):
    monkeypatch.setattr(fused_residual, "PLANS", {size: plan})
    level = 3 * torch.randn(size.channels, device="cuda")
    x = (2 * torch.randn(5, *size, device="cuda") + level).bfloat16()
    compare(make(size.channels, "cuda"), x, level.bfloat16() if bias else None)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "plan"), ON_GPU)
def test_gradients_of_every_plan_on_a_gpu(size, plan, monkeypatch):
    x = torch.randn(5, *size, device="cuda").bfloat16()
    first = torch.randn(size.channels, device="cuda").bfloat16()
    net = make(size.channels, "cuda")
    check_both(both_ways(monkeypatch, net, x, first, {size: plan}))
