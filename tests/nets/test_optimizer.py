"""The optimizer: its update rules, skipped updates, loss scaling, and schedules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reverie.api import UserError
from reverie.nets.blocks import Linear, Norm
from reverie.nets.optim.adam import AdamConfig, AMSGradConfig
from reverie.nets.optim.laprop import LaPropConfig
from reverie.nets.optim.optimizer import Optimizer, dense_weights
from reverie.nets.residual import FrameConv
from reverie.nets.transformer import Dense, Embedding

LAPROP = LaPropConfig(lr=0.1, warmup=0, agc=0.0)
RULES = {
    "laprop": LaPropConfig(lr=0.1, warmup=0, wd=0.1),
    "adam": AdamConfig(),
    "amsgrad": AMSGradConfig(),
}


def make(config=LAPROP, value=1.0, scaling=False, name="a.weight"):
    parameter = torch.full((3,), value, requires_grad=True)
    return parameter, Optimizer({name: parameter}, config, scaling=scaling)


def make_parameters():
    torch.manual_seed(3)
    return {"a": torch.randn(4, 3), "b": torch.randn(5), "c": torch.randn(2, 2)}


def step(opt, grad, loss=1.0):
    return opt.apply(torch.tensor(loss), [torch.as_tensor(grad)])


# LaProp


def test_the_first_update_has_no_learning_rate():
    config = LaPropConfig()
    rule = config.rule()
    rates = [float(rule.learning_rate(torch.tensor(n))) for n in (0.0, 1.0, 1000.0)]
    assert rates == pytest.approx([0, 4e-8, 4e-5])
    parameter, opt = make(config)
    step(opt, [1.0, -1.0, 2.0])
    assert parameter.tolist() == [1, 1, 1]


def test_laprop_averages_normalized_gradients():
    # Adam would divide the mean of (1, 9) by their magnitude; LaProp averages the
    # already normalized 1 and 9 / sqrt(mean square).
    parameter, opt = make()
    step(opt, [1.0] * 3)
    step(opt, [9.0] * 3)
    nu = (0.999 * 0.001 * 1 + 0.001 * 81) / (1 - 0.999**2)
    mu = (0.9 * 0.1 * 1 + 0.1 * 9 / nu**0.5) / (1 - 0.9**2)
    expected = 1 - 0.1 * 1.0 - 0.1 * mu
    assert parameter.tolist() == pytest.approx([expected] * 3, rel=1e-4)


def test_adaptive_clipping_is_per_tensor_and_lets_a_zero_tensor_change():
    parameter, opt = make(LaPropConfig(lr=0.1, warmup=0), value=0.0)
    step(opt, [3.0, 4.0, 0.0])
    clipped = opt.moments["nu"][0].div(0.001).sqrt()
    assert float(clipped.norm()) == pytest.approx(0.3 * 1e-3, rel=1e-4)
    assert parameter[:2].abs().min() > 0


def test_linear_and_cosine_schedules_end_at_a_tenth():
    for schedule in ("linear", "cosine"):
        config = LaPropConfig(lr=1.0, warmup=10, anneal=20, schedule=schedule)
        rule = config.rule()
        at = [float(rule.learning_rate(torch.tensor(float(n)))) for n in range(30)]
        assert at[5] == pytest.approx(0.5)
        assert at[10] == pytest.approx(1.0)
        assert at[15] == pytest.approx(0.55)
        assert at[20] == at[29] == pytest.approx(0.1)


def test_a_schedule_that_ends_during_warm_up_is_refused():
    with pytest.raises(UserError, match=r"anneal. above 10"):
        LaPropConfig(schedule="cosine", warmup=10, anneal=10)


def test_weight_decay_applies_only_to_matching_names():
    config = LaPropConfig(lr=0.1, warmup=0, agc=0.0, wd=0.5)
    for name, after in (("a.weight", 0.95), ("a.bias", 1.0)):
        parameter, opt = make(config, name=name)
        step(opt, [0.0] * 3)
        assert parameter.tolist() == pytest.approx([after] * 3)


def test_nesterov_momentum():
    parameter, opt = make(LaPropConfig(lr=0.1, warmup=0, agc=0.0, nesterov=True))
    step(opt, [1.0] * 3)
    mu = 0.1
    expected = (0.9 * mu + 0.1 * 1) / (1 - 0.9)  # without Nesterov: 1
    assert parameter.tolist() == pytest.approx([1 - 0.1 * expected] * 3, rel=1e-4)


# Adam and AMSGrad


@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
def test_adam_equals_that_of_pytorch(clip):
    parameters = make_parameters()
    expected = [nn.Parameter(p) for p in make_parameters().values()]
    config = AdamConfig(lr=1e-2, clip=clip, wd=0.1)
    opt = Optimizer(parameters, config, ["a", "c"])
    groups = [
        {"params": [expected[0], expected[2]], "weight_decay": 0.1},
        {"params": [expected[1]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(5):
        grads = [torch.randn_like(p) for p in expected]
        for parameter, grad in zip(expected, grads, strict=True):
            parameter.grad = grad.clone()
        norm = nn.utils.clip_grad_norm_(expected, clip or torch.inf)
        reference.step()
        ok, metrics = opt.apply(torch.tensor(1.0), grads)
        assert bool(ok)
        torch.testing.assert_close(metrics["opt/grad_norm"], norm)
        for actual, other in zip(parameters.values(), expected, strict=True):
            torch.testing.assert_close(actual, other.detach(), rtol=1e-5, atol=1e-6)
    assert metrics["opt/updates"] == 5


def test_amsgrad_equals_that_of_pytorch():
    torch.manual_seed(0)
    ours, theirs = (nn.Linear(5, 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    config = AMSGradConfig(lr=0.01, clip=0.5)
    opt = Optimizer(dict(ours.named_parameters()), config)
    reference = torch.optim.Adam(theirs.parameters(), lr=0.01, amsgrad=True)
    for _ in range(5):
        x = torch.randn(8, 5)
        opt.update(ours(x).square().sum())
        reference.zero_grad()
        theirs(x).square().sum().backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert AMSGradConfig().lr == 5e-4


def test_only_weights_of_dense_layers_decay():
    net = nn.Module()
    net.dense, net.plain, net.conv = Dense(3, 4), Linear(3, 4), FrameConv(3, 4)
    net.norm, net.table = Norm("layer", 4), Embedding(5, 4)
    assert dense_weights(net) == ["dense.weight", "plain.weight"]
    assert dense_weights(Dense(2, 2)) == ["weight"]


@pytest.mark.parametrize("config", [AdamConfig, AMSGradConfig])
@pytest.mark.parametrize("fields", [{"lr": -1.0}, {"beta1": 1.0}, {"clip": -0.1}])
def test_invalid_settings_are_refused(config, fields):
    with pytest.raises(ValueError, match="must"):
        config(**fields)


# All rules


@pytest.mark.parametrize("rule", RULES)
def test_updates_minimize_the_loss(rule):
    x = torch.tensor([3.0, -2.0], requires_grad=True)
    unused = torch.ones(2, requires_grad=True)
    config = type(RULES[rule])(lr=0.1, **({"warmup": 0} if rule == "laprop" else {}))
    opt = Optimizer({"x": x, "unused": unused}, config)
    for _ in range(100):
        opt.update(x.square().sum())
    assert x.detach().abs().max() < 0.2
    assert torch.equal(unused.detach(), torch.ones(2))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("loss", "grad"), [(float("nan"), 1.0), (1.0, float("nan")), (1.0, float("inf"))]
)
def test_a_nonfinite_update_changes_nothing(rule, loss, grad):
    parameter, opt = make(RULES[rule])
    step(opt, [1.0, 2.0, 3.0])
    moments = [moment for (moment,) in opt.moments.values()]
    before = [x.clone() for x in (parameter, *moments, opt.step)]
    for count in (1, 2):
        ok, metrics = step(opt, [grad, 1.0, 1.0], loss)
        assert not ok
        assert float(metrics["opt/consecutive_skips"]) == count
        assert float(metrics["opt/skipped"]) == count
    after = (parameter, *moments, opt.step)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert opt.nonfinite() == ([] if grad == 1.0 else ["a.weight"])
    ok, metrics = step(opt, [1.0, 1.0, 1.0])
    assert ok
    assert float(metrics["opt/consecutive_skips"]) == 0
    assert float(metrics["opt/skipped"]) == 2
    assert opt.nonfinite() == []


def test_only_the_parameter_with_a_nonfinite_gradient_is_named():
    parameters = make_parameters()
    opt = Optimizer(parameters, AdamConfig(), ["a"])
    grads = [torch.ones_like(p) for p in parameters.values()]
    grads[1][2] = float("nan")
    ok, _ = opt.apply(torch.tensor(1.0), grads)
    assert not ok
    assert opt.nonfinite() == ["b"]


@pytest.mark.parametrize("rule", RULES)
def test_skipping_the_first_update_has_no_effect_on_later_ones(rule):
    parameter, opt = make(RULES[rule])
    step(opt, [float("nan")] * 3)
    fresh, other = make(RULES[rule])
    step(opt, [1.0, 2.0, 3.0])
    step(other, [1.0, 2.0, 3.0])
    assert torch.equal(parameter, fresh)


@pytest.mark.parametrize(
    ("config", "initial"), [(LAPROP, 1e4), (AMSGradConfig(), 2.0**16)]
)
def test_the_loss_scale_halves_on_overflow_and_doubles_after_many_updates(
    config, initial
):
    _, opt = make(config, scaling=True)
    scaling = opt.rule.LOSS_SCALING
    assert float(opt.loss_scale) == initial
    ok, metrics = step(opt, [float("inf")] * 3)
    assert not ok
    assert float(opt.loss_scale) == initial / 2
    assert float(metrics["opt/consecutive_skips"]) == 0  # a smaller scale avoids it
    for _ in range(scaling.growth_interval):
        step(opt, [1.0] * 3)
    assert float(opt.loss_scale) == initial
    for _ in range(60):
        _, metrics = step(opt, [float("inf")] * 3)
    assert float(opt.loss_scale) == pytest.approx(scaling.minimum)
    assert float(metrics["opt/consecutive_skips"]) > 0


@pytest.mark.parametrize("rule", RULES)
def test_scaled_gradients_equal_the_unscaled_ones(rule):
    parameter, opt = make(RULES[rule], scaling=True)
    (grad,) = opt.gradients((parameter**2).sum())
    torch.testing.assert_close(grad, 2 * parameter.detach())


@pytest.mark.parametrize("rule", RULES)
def test_a_restored_optimizer_continues_identically(rule):
    one, two = make_parameters(), make_parameters()
    first, second = Optimizer(one, RULES[rule]), Optimizer(two, RULES[rule])
    grads = [[torch.randn_like(p) for p in one.values()] for _ in range(4)]
    for i in range(2):
        first.apply(torch.tensor(0.0), grads[i])
    second.load_state_dict(first.state_dict())
    for key, parameter in one.items():
        two[key].copy_(parameter)
    for i in range(2, 4):
        first.apply(torch.tensor(0.0), grads[i])
        second.apply(torch.tensor(0.0), grads[i])
    for key, parameter in one.items():
        assert torch.equal(parameter, two[key])
