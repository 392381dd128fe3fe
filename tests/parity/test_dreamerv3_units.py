"""Single equations of DreamerV3 against numbers of the original."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dreamerv3_recording import load, under

from reverie.agents.returns import lambda_return
from reverie.nets.blocks import BlockLinear, Linear, Norm, initialize, symexp, symlog
from reverie.nets.conv import SameConv, max_pool_2x2, upsample_nearest
from reverie.nets.distributions import (
    Binary,
    Categorical,
    Normal,
    OneHot,
    TwoHot,
    symexp_bins,
)
from reverie.nets.normalize import Normalize, NormalizeConfig
from reverie.nets.optim.laprop import LaPropConfig
from reverie.nets.optim.optimizer import Optimizer
from reverie.nets.rng import Rng
from reverie.spaces import Space
from reverie.worlds.rssm.config import RSSMConfig
from reverie.worlds.rssm.dynamics import RSSMDynamics, RSSMState

CASES = load("units")


def case(prefix: str) -> dict[str, torch.Tensor]:
    return {k: torch.tensor(v) for k, v in under(CASES, f"{prefix}/").items()}


def close(ours, theirs, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(
        torch.as_tensor(ours).detach().float(), theirs.float(), rtol=rtol, atol=atol
    )


@pytest.mark.parametrize(("name", "fn"), [("symlog", symlog), ("symexp", symexp)])
def test_squashing(name, fn):
    c = case(name)
    close(fn(c["x"]), c["y"])


BIN_COUNTS = sorted({int(k.split("/")[0][6:]) for k in CASES if k[:6] == "twohot"})


@pytest.mark.parametrize("count", BIN_COUNTS)
def test_two_hot(count):
    c = case(f"twohot{count}")
    bins = symexp_bins(len(c["bins"]))
    close(bins, c["bins"])
    assert torch.equal(bins, -bins.flip(0))
    logits = c["logits"].clone().requires_grad_()
    # On the recorded bins: ours differ by an ulp of their exponent, which the share
    # between two neighbours magnifies.
    out = TwoHot(logits, c["bins"])
    loss = out.loss(c["target"])
    close(loss, c["loss"])
    close(out.pred(), c["mean"], atol=1e-4)
    equal = (c["logits"] == c["logits"][:, :1]).all(-1)
    assert (out.pred()[equal] == 0).all()  # equal logits mean exactly zero
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    close(grad, c["grad_loss"], rtol=1e-4)
    close(logits.softmax(-1) - grad, c["twohot_target"], atol=2e-6)


def test_block_linear():
    c = case("blocklinear")
    blocks, inputs, outputs = c["kernel"].shape
    layer = BlockLinear(blocks * inputs, blocks * outputs, blocks)
    layer.weight.data, layer.bias.data = c["kernel"], c["bias"]
    close(layer(c["x"]), c["y"])


def make_layer(name: str, shape: list[int]) -> tuple[torch.nn.Module, int]:
    """Return a layer whose kernel has this shape in the original, and its fan-in."""
    if name == "linear":
        return Linear(*shape), shape[0]
    if name == "blocklinear":
        blocks, inputs, outputs = shape
        return BlockLinear(blocks * inputs, blocks * outputs, blocks), blocks * inputs
    size, _, inputs, outputs = shape
    return SameConv(inputs, outputs, size), size * size * inputs


@pytest.mark.parametrize("name", ["linear", "blocklinear", "conv"])
def test_initial_weights_have_the_original_spread(name):
    c = case(f"init/{name}")
    layer, fan_in = make_layer(name, c["shape"].tolist())
    initialize(layer, torch.Generator().manual_seed(0))
    assert layer.weight.numel() == int(c["shape"].prod())
    std = fan_in**-0.5
    # the spread of a sample of n normal numbers varies by about 1 / sqrt(2 n)
    tolerance = max(0.03, 4 / (2 * layer.weight.numel()) ** 0.5)
    assert float(c["std"]) == pytest.approx(std, rel=tolerance)
    assert float(layer.weight.detach().std()) == pytest.approx(std, rel=tolerance)
    assert float(layer.weight.detach().abs().max()) <= 2 * 1.1368 * std + 1e-7
    assert float(layer.weight.detach().abs().max()) > 1.9 * 1.1368 * std
    assert not layer.bias.any()


def test_rms_norm():
    c = case("rmsnorm")
    norm = Norm("rms", len(c["scale"]))
    norm.scale.data = c["scale"]
    assert norm.eps == pytest.approx(float(c["eps"]))
    close(norm(c["x"]), c["y"])


def test_convolution_pooling_and_repetition():
    c = case("conv")
    size, _, inputs, outputs = c["kernel"].shape
    conv = SameConv(inputs, outputs, size)
    conv.weight.data = c["kernel"].permute(3, 2, 0, 1)
    conv.bias.data = c["bias"]
    y = conv(c["x"])
    close(y, c["y"])
    close(max_pool_2x2(y), c["pooled"])
    close(upsample_nearest(c["x"]), c["up"])


def count_layers(c: dict[str, torch.Tensor], prefix: str) -> int:
    """Return the number of recorded layers `<prefix>0`, `<prefix>1`, ..."""
    layers = 0
    while f"{prefix}{layers}/kernel" in c:
        layers += 1
    return layers


def test_recurrent_core_and_its_gradients():
    c = case("gru")
    width = c["action"].shape[-1]
    stoch, classes = c["stoch"].shape[-2:]
    hidden = len(c["param/dyn/dynin0/bias"])
    config = RSSMConfig(
        deter=c["deter"].shape[-1],
        hidden=hidden,
        stoch=stoch,
        classes=classes,
        blocks=len(c["param/dyn/dyngru/kernel"]),
        dynlayers=count_layers(c, "param/dyn/dynhid"),
        imglayers=count_layers(c, "param/dyn/prior"),
    )
    space = Space(np.dtype(np.float32), (width,), -1, 1)
    dyn = RSSMDynamics(1, {"action": space}, config)
    parameters = dict(dyn.named_parameters())
    ours = {}
    for key, value in c.items():
        if key.startswith("param/dyn/"):
            name = key.removeprefix("param/dyn/").replace("/", ".")
            parameter = parameters[name.replace("kernel", "weight")]
            parameter.data = value.T if value.ndim == 2 else value
            ours[key.removeprefix("param/")] = parameter
    inputs = [c[k].clone().requires_grad_() for k in ("deter", "stoch", "action")]
    deter, stoch_in, action = inputs
    embedded = dyn.embed_action({"action": action}, None, deter)
    after = dyn.core(RSSMState(deter, stoch_in), embedded)
    close(after, c["deter_next"])
    close(dyn.prior_logits(deter), c["prior_logits_of_deter"])
    total = (after * c["cotangent"]).sum()
    grads = torch.autograd.grad(
        total, [*inputs, *ours.values()], materialize_grads=True
    )
    for name, grad in zip(("deter", "stoch", "action"), grads, strict=False):
        close(grad, c[f"grad_{name}"], rtol=1e-4)
    for name, grad in zip(ours, grads[3:], strict=True):
        grad = grad.T if grad.ndim == 2 else grad
        close(grad, c[f"grad_param/{name}"], rtol=1e-4)


def test_lambda_return_with_flags():
    c = case("lambda")
    ours = lambda_return(
        c["rew"],
        c["boot"],
        c["last"].float(),
        c["term"].float(),
        float(c["disc"]),
        float(c["lam"]),
    )
    close(ours, c["ret"])


def test_lambda_return_with_probabilities():
    c, hard = case("lambda_soft"), case("lambda")
    never = torch.zeros_like(c["con"])
    lam = float(hard["lam"])
    ours = lambda_return(hard["rew"], hard["boot"], never, 1 - c["con"], 1.0, lam)
    close(ours, c["ret"])


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("perc", NormalizeConfig("perc", 0.01, 1.0, debias=False)),
        ("perc_debias", NormalizeConfig("perc", 0.1, 1e-8, debias=True)),
        ("meanstd", NormalizeConfig("meanstd", 0.1, 1e-8, debias=True)),
    ],
)
def test_normalizer(name, config):
    c, norm = case(f"norm/{name}"), Normalize(config)
    for i, x in enumerate(c["x"]):
        offset, scale = norm(x, True)
        close(offset, c["offset"][i])
        close(scale, c["scale"][i])
    for key, buffer in norm.named_buffers():
        close(buffer, c[f"state/nz/{key}/value"])


OPTIMIZERS = {
    "default": LaPropConfig(),
    "fast": LaPropConfig(lr=1e-2, warmup=0),
    "warm3": LaPropConfig(lr=1e-2, warmup=3),
    "wd_cosine": LaPropConfig(
        lr=1e-2,
        warmup=2,
        anneal=6,
        schedule="cosine",
        wd=0.1,
        wdregex=".*/kernel$",
        floor=0.1 * 1e-2,
    ),
    "linear": LaPropConfig(lr=1e-2, warmup=2, anneal=6, schedule="linear"),
    "noclip": LaPropConfig(lr=1e-2, warmup=0, agc=0.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name):
    c = case(f"opt/{name}")
    parameters = {k[3:]: c[k].clone() for k in c if k.startswith("p0/")}
    opt = Optimizer(parameters, OPTIMIZERS[name])
    steps = 0
    while f"grad{steps}/{opt.names[0]}" in c:
        grads = [c[f"grad{steps}/{key}"].clone() for key in opt.names]
        opt.apply(torch.tensor(1.0), grads)
        steps += 1
        for key, parameter in parameters.items():
            close(parameter, c[f"p{steps}/{key}"])
    assert steps > 0
    assert f"p{steps + 1}/{opt.names[0]}" not in c  # all recorded steps were taken


def test_cosine_really_ends_at_a_tenth_unless_told_otherwise():
    config = LaPropConfig(lr=1e-2, warmup=2, anneal=6, schedule="cosine")
    end = config.rule().learning_rate(torch.tensor(100.0))
    assert float(end) == pytest.approx(1e-3)


class Chosen(Rng):
    def __init__(self, index):
        self.index = index

    def categorical(self, probs):
        return self.index


def test_uniform_mix_kl_and_straight_through():
    c = case("unimix")
    post_logits = c["post_logits"].clone().requires_grad_()
    prior_logits = c["prior_logits"].clone().requires_grad_()
    post, prior = OneHot(post_logits, 0.01), OneHot(prior_logits, 0.01)
    close(post.probs, c["post_probs"])
    close(prior.probs, c["prior_probs"])
    close(post.kl(prior), c["kl"])
    dyn = post.detach().kl(prior).clamp(min=1.0)
    rep = post.kl(prior.detach()).clamp(min=1.0)
    close(dyn, c["dyn"])
    close(rep, c["rep"])
    close(post.entropy(), c["entropy_post"])
    (grad,) = torch.autograd.grad(dyn.sum(), prior_logits, retain_graph=True)
    close(grad, c["grad_dyn_wrt_prior"], rtol=1e-4)
    (grad,) = torch.autograd.grad(rep.sum(), post_logits, retain_graph=True)
    close(grad, c["grad_rep_wrt_post"], rtol=1e-4)
    sample = post.sample(Chosen(c["sample_index"]))
    assert torch.equal(sample.detach().argmax(-1), c["sample_index"])
    (grad,) = torch.autograd.grad((sample * c["st_cotangent"]).sum(), post_logits)
    close(grad, c["st_grad_logits"], rtol=1e-4)


def test_bounded_normal():
    c = case("bounded_normal")
    mean, std = torch.tanh(c["mean_raw"]), 0.9 * torch.sigmoid(c["std_raw"] + 2) + 0.1
    close(mean, c["mean"])
    close(std, c["std"])
    out = Normal(mean, std, 1)
    close(out.logp(c["event"]), c["logp"])
    close(out.entropy(), c["entropy"])


def test_categorical():
    c = case("categorical")
    out = Categorical(c["logits"])
    close(out.logp(c["event"]), c["logp"])
    close(out.entropy(), c["entropy"])


def test_binary():
    c = case("binary")
    out = Binary(c["logit"])
    close(out.loss(c["target"]), c["loss"])
    close(out.prob(), c["prob"])
