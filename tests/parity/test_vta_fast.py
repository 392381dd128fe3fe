"""VTA with fused kernels compared with the same recordings.

Runs on the GPU if there is one, otherwise in Triton's interpreter. The recorded
recurrent cells are narrower than the kernels support, so the fused recurrent loop is
compared with the plain one at a width of 16: all losses of a window and all gradients.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_vta import close, is_redundant_bias
from vta_recording import MODELS, RecordedNoise, VTARecording, tensors, under

from reverie.convert.vta.weights import rename_tensors
from reverie.nets.optim.adam import AMSGradConfig
from reverie.nets.rng import Rng
from reverie.spaces import Space
from reverie.worlds.vta.config import VTAConfig
from reverie.worlds.vta.world import VTA

pytest.importorskip("triton")

from reverie.kernels.accelerate import use_fast_versions
from reverie.kernels.conv import im2col
from reverie.kernels.conv.strided import FastImageDecoder, FastImageEncoder
from reverie.kernels.norm import batch_norm
from reverie.kernels.optim.optimizer import FusedOptimizer
from reverie.kernels.scan import gru as fast_gru

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Use large tiles: the interpreter takes a fixed time per program."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(batch_norm, "TILE", 1 << 16)
        monkeypatch.setattr(im2col, "ELEMENTS", 1 << 16)


def total(losses: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([loss.mean() for loss in losses.values()]).sum()


def make_world(recording: VTARecording, anneal: float = 0.0, **options) -> VTA:
    world = recording.make_world(anneal, **options).train().to(DEVICE)
    use_fast_versions(world)
    assert isinstance(world.enc, FastImageEncoder)
    assert isinstance(world.dec, FastImageDecoder)
    return world


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_all_gradients(name):
    recording = VTARecording(name)
    world = make_world(recording)
    batch = {key: value.to(DEVICE) for key, value in recording.batch.items()}
    loss = total(world.loss(batch, recording.rng()).losses)
    close(loss.cpu(), torch.tensor(recording.data["train/train_loss"]), 1e-2)
    names, parameters = zip(*world.named_parameters(), strict=True)
    ours = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    for key, theirs in rename_tensors(tensors(recording.data, "grad/")).items():
        gap = (ours[key].cpu() - theirs).abs().max()
        assert gap <= max(1e-2, 1e-3 * theirs.abs().max()), key
    state = world.state_dict()
    for key, theirs in rename_tensors(tensors(recording.data, "buffer_after/")).items():
        close(state[key].cpu(), theirs)


@pytest.mark.slow
def test_three_steps_of_the_optimizer():
    recording = VTARecording(MODELS[-1])
    data = tensors(recording.data, "opt/")
    world = make_world(recording, recording.sizes["beta_anneal"], temperature=1.0)
    batch = {key: value.to(DEVICE) for key, value in recording.batch.items()}
    opt = FusedOptimizer(dict(world.named_parameters()), AMSGradConfig())
    for i in range(len(data["loss"])):
        normals = [data["noise_z"][i], data["noise_s"][i]]
        rng = RecordedNoise(normals, [recording.gumbel(data["gumbel_u"][i])])
        loss = total(world.loss(batch, rng).losses)
        close(loss.cpu(), data["loss"][i], 1e-2)
        _, metrics = opt.update(loss)
        close(metrics["opt/grad_norm"].cpu(), data["grad_norm"][i])
    ours = dict(world.named_parameters())
    for key, value in rename_tensors(under(data, "param_after/")).items():
        if not is_redundant_bias(key, world):
            close(ours[key].cpu(), value, 1e-4, 0)


@pytest.mark.parametrize("acts", [False, True])
def test_losses_and_all_gradients_equal_the_plain_ones(acts, monkeypatch):
    calls = []
    apply = fast_gru.apply_autograd
    monkeypatch.setattr(
        fast_gru, "apply_autograd", lambda *args: calls.append(0) or apply(*args)
    )
    rng = np.random.default_rng(0)
    image = torch.tensor(rng.integers(0, 256, (3, 8, 16, 16, 3), np.uint8))
    batch = {"image": image, "action": torch.tensor(rng.integers(0, 3, (3, 8)))}
    batch = {key: value.to(DEVICE) for key, value in batch.items()}
    config = VTAConfig(context=2, length=4, belief=16, state=3, layers=1)
    obs_space = {"image": Space(np.uint8, (16, 16, 3), 0, 256)}
    act_space = {"action": Space(np.int64, (), 0, 3)} if acts else {}
    found = []
    for is_fast in (False, True):
        world = VTA(obs_space, act_space, config).train()
        world.initialize(torch.Generator().manual_seed(0))
        world.to(DEVICE)
        if is_fast:
            use_fast_versions(world)
        out = world.loss(batch, Rng(0, "test", DEVICE))
        grads = torch.autograd.grad(total(out.losses), list(world.parameters()))
        names = [name for name, _ in world.named_parameters()]
        named = dict(zip(names, grads, strict=True))
        kept = {key: g for key, g in named.items() if not is_redundant_bias(key, world)}
        buffers = dict(world.named_buffers())
        found.append({**out.losses, **out.metrics, **kept, **buffers})
    assert len(calls) == 4  # three recurrent loops and the copied upper state
    for key, theirs in found[0].items():
        allowed = max(1e-5, 1e-3 * float(theirs.detach().abs().max()))
        gap = (found[1][key] - theirs).abs().max()
        assert gap <= allowed, key
