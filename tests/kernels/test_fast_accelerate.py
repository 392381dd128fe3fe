"""Fast versions of modules, and the accelerator that agents use them with."""

from __future__ import annotations

import importlib
import pkgutil

import numpy as np
import pytest
import torch

from reverie.nets.blocks import MLP, MLPConfig, initialize
from reverie.nets.decoder import Decoder, DecoderConfig
from reverie.nets.encoder import Encoder, EncoderConfig
from reverie.nets.heads import Head, HeadConfig, PolicyConfig, PolicyHead
from reverie.nets.optim.adam import AdamConfig
from reverie.nets.optim.optimizer import Optimizer
from reverie.nets.rng import Rng
from reverie.spaces import Space

pytest.importorskip("triton")

from reverie.kernels import accelerate
from reverie.kernels.accelerate import Accelerator, kernels_available, use_fast_versions

CPU = torch.device("cpu")


def make_modules() -> torch.nn.ModuleDict:
    image = Space(np.dtype(np.uint8), (16, 16, 3), 0, 256)
    spaces = {"image": image, "vector": Space(np.float32, (3,))}
    enc = EncoderConfig(depth=2, mults=(2, 4), layers=1, units=8)
    dec = DecoderConfig(depth=2, mults=(2, 4), layers=1, units=8, bspace=2)
    modules = {
        "enc": Encoder(spaces, enc),
        "dec": Decoder(spaces, 8, 4, dec),
        "rew": Head(12, HeadConfig(units=8)),
        "pol": PolicyHead(12, {"action": Space(np.int32, (), 0, 3)}, PolicyConfig()),
    }
    net = torch.nn.ModuleDict(modules)
    initialize(net, torch.Generator().manual_seed(0))
    return net


def classes_with(attribute: str) -> list[type]:
    """All classes of the package that name a fast version."""
    classes = set()
    for package in ("nets", "worlds", "agents"):
        path = f"reverie.{package}"
        for info in pkgutil.walk_packages(
            importlib.import_module(path).__path__, f"{path}."
        ):
            members = vars(importlib.import_module(info.name)).values()
            types = [member for member in members if isinstance(member, type)]
            classes |= {x for x in types if attribute in vars(x)}
    return sorted(classes, key=lambda x: x.__name__)


def test_every_module_with_a_fast_version_is_replaced_by_it():
    net = make_modules()
    names = [name for name, _ in net.named_parameters()]
    plain = {key: type(net[key]) for key in net}
    use_fast_versions(net)
    for key, cls in plain.items():
        assert type(net[key]) is pkgutil.resolve_name(cls.fast_version)
    assert type(net["rew"].mlp) is pkgutil.resolve_name(MLP.fast_version)
    assert [name for name, _ in net.named_parameters()] == names


@pytest.mark.parametrize("attribute", ["fast_version", "fast_cpu_version"])
def test_a_fast_version_is_a_subclass_without_its_own_constructor(attribute):
    classes = classes_with(attribute)
    assert len(classes) >= {"fast_version": 18, "fast_cpu_version": 1}[attribute]
    for plain in classes:
        fast = pkgutil.resolve_name(getattr(plain, attribute))
        assert issubclass(fast, plain)
        assert "__init__" not in vars(fast)


def test_a_subclass_does_not_inherit_the_fast_version():
    class Doubled(MLP):
        def forward(self, x):
            return 2 * super().forward(x)

    net = Doubled(4, MLPConfig(1, 8))
    use_fast_versions(net)
    assert type(net) is Doubled


def test_using_fast_versions_twice_changes_nothing():
    net = make_modules()
    use_fast_versions(net)
    classes = [type(part) for part in net.modules()]
    use_fast_versions(net)
    assert [type(part) for part in net.modules()] == classes


def test_kernels_are_not_available_on_a_cpu():
    assert not kernels_available(CPU)


# The accelerator


@pytest.mark.parametrize("compile", ["none", "step"])
def test_without_kernels_everything_is_plain(compile):
    fast, net = Accelerator(compile, CPU, overlap=True), make_modules()
    classes = [type(part) for part in net.modules()]
    fast.use_fast_modules(net)
    replaced = [type(part) for part in net.modules()] != classes
    assert replaced == (compile == "step")  # `Conv` has a fast CPU version
    fast.use_low_precision([net], torch.bfloat16)
    assert all(getattr(x, "low_precision", None) is None for x in net.modules())
    opt = fast.make_optimizer(dict(net.named_parameters()), AdamConfig())
    assert type(opt) is Optimizer

    def function(x):
        return x

    assert fast.capture(function, "update", Rng(0, "train", CPU)) is function
    fast.before_update()
    fast.weights_changed()
    fast.refresh_slow_copies()


def test_a_policy_returns_arrays_and_keeps_the_carry_on_the_device():
    fast, net = Accelerator("none", CPU), torch.nn.Linear(2, 3)

    rng = Rng(0, "policy", CPU)

    def act(net, carry, obs):
        noise = rng.uniform(carry)
        return carry + 1, {"action": net(obs["x"])}, {"noise": noise}

    with torch.no_grad():
        policy = fast.make_policy(act, [net], rng, collects=True)
        carry, action, extras = policy(torch.zeros(4), {"x": torch.ones(4, 2)})
    assert torch.equal(carry, torch.ones(4))
    assert action["action"].shape == (4, 3)
    assert isinstance(extras["noise"], np.ndarray)


def test_with_kernels_optimizer_and_weights_are_fast(monkeypatch):
    from reverie.kernels.optim.optimizer import FusedOptimizer

    monkeypatch.setattr(accelerate, "kernels_available", lambda device: True)
    fast, net = Accelerator("step", CPU), make_modules()
    fast.use_fast_modules(net)
    assert type(net["rew"]) is pkgutil.resolve_name(Head.fast_version)
    fast.use_low_precision([net], torch.bfloat16)
    layer = net["rew"].mlp.linear0
    opt = fast.make_optimizer(dict(net.named_parameters()), AdamConfig())
    assert type(opt) is FusedOptimizer
    assert any(leaf is layer.low_precision[0] for leaf in opt.leaves)
    with torch.no_grad():
        layer.weight.add_(1)
    fast.weights_changed()
    expected = layer.weight.to(torch.bfloat16)
    assert torch.equal(layer.low_precision[0], expected)


def test_a_gpu_without_triton_gets_a_warning(monkeypatch):
    monkeypatch.setattr(accelerate, "kernels_available", lambda device: False)
    with pytest.warns(UserWarning, match="Triton is not installed"):
        fast = Accelerator("graph", torch.device("cuda"), overlap=True)
    assert not any((fast.has_kernels, fast.has_graphs, fast.overlap))


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_with_overlap_the_training_policy_acts_one_update_behind(overlap):
    device = torch.device("cuda")
    fast = Accelerator("graph", device, overlap)
    net = MLP(4, MLPConfig(1, 8))
    initialize(net, torch.Generator().manual_seed(0))
    net.to(device)
    fast.use_fast_modules(net)

    def act(net, carry, obs):
        return carry, {"y": net(obs["x"].to(device))}, {}

    policies = {
        key: fast.make_policy(act, [net], Rng(0, key, device), collects=key == "policy")
        for key in ("policy", "eval")
    }
    obs = {"x": torch.rand(3, 4)}

    def outputs():
        results = {}
        for key, policy in policies.items():
            _, action, _ = policy(torch.zeros(3, device=device), obs)
            results[key] = action["y"].copy()
        return results

    with torch.no_grad():
        for _ in range(4):
            before = outputs()
            fast.before_update()
            net.linear0.weight.mul_(1.5)
            after = outputs()
            assert not np.allclose(after["eval"], before["eval"])
            assert np.allclose(after["policy"], before["eval"]) == overlap
            fast.weights_changed()
            assert np.allclose(outputs()["policy"], after["eval"])
