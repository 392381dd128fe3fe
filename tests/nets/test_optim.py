"""The optimizer: order of its steps, skipping, scaling, schedules."""

from __future__ import annotations

import pytest
import torch

from reverie.api import UserError
from reverie.nets.optim.laprop import OptConfig, Optimizer, learning_rate

PLAIN = OptConfig(lr=0.1, warmup=0, agc=0.0)


def make(config=PLAIN, value=1.0, scaling=False, name="a.weight"):
    parameter = torch.full((3,), value, requires_grad=True)
    return parameter, Optimizer({name: parameter}, config, scaling)


def step(opt, grad, loss=1.0):
    return opt.apply(torch.tensor(loss), [torch.as_tensor(grad)])


def test_the_first_update_has_no_learning_rate():
    config = OptConfig()
    rates = [float(learning_rate(config, torch.tensor(float(n)))) for n in (0, 1, 1000)]
    assert rates == pytest.approx([0, 4e-8, 4e-5])
    parameter, opt = make(config)
    step(opt, [1.0, -1.0, 2.0])
    assert parameter.tolist() == [1, 1, 1]


def test_momentum_is_of_normalized_gradients():
    # Adam would divide the mean of (1, 9) by their magnitude; LaProp averages the
    # already normalized 1 and 9 / sqrt(mean square).
    parameter, opt = make()
    step(opt, [1.0] * 3)
    step(opt, [9.0] * 3)
    nu = (0.999 * 0.001 * 1 + 0.001 * 81) / (1 - 0.999**2)
    mu = (0.9 * 0.1 * 1 + 0.1 * 9 / nu**0.5) / (1 - 0.9**2)
    expected = 1 - 0.1 * 1.0 - 0.1 * mu
    assert parameter.tolist() == pytest.approx([expected] * 3, rel=1e-4)


def test_clipping_is_per_tensor_and_lets_a_zero_tensor_move():
    parameter, opt = make(OptConfig(lr=0.1, warmup=0), value=0.0)
    step(opt, [3.0, 4.0, 0.0])
    clipped = opt.nu[0].div(0.001).sqrt()
    assert float(clipped.norm()) == pytest.approx(0.3 * 1e-3, rel=1e-4)
    assert parameter[:2].abs().min() > 0


def test_linear_and_cosine_end_at_a_tenth():
    for schedule in ("linear", "cosine"):
        config = OptConfig(lr=1.0, warmup=10, anneal=20, schedule=schedule)
        at = [float(learning_rate(config, torch.tensor(float(n)))) for n in range(30)]
        assert at[5] == pytest.approx(0.5)
        assert at[10] == pytest.approx(1.0)
        assert at[15] == pytest.approx(0.55)
        assert at[20] == at[29] == pytest.approx(0.1)


def test_a_schedule_that_ends_before_it_begins_is_refused():
    with pytest.raises(UserError, match=r"anneal. above 10"):
        OptConfig(schedule="cosine", warmup=10, anneal=10)


def test_weight_decay_touches_only_matching_names():
    config = OptConfig(lr=0.1, warmup=0, agc=0.0, wd=0.5)
    for name, after in (("a.weight", 0.95), ("a.bias", 1.0)):
        parameter, opt = make(config, name=name)
        step(opt, [0.0] * 3)
        assert parameter.tolist() == pytest.approx([after] * 3)


def test_nesterov_looks_ahead():
    parameter, opt = make(OptConfig(lr=0.1, warmup=0, agc=0.0, nesterov=True))
    step(opt, [1.0] * 3)
    momentum = 0.1
    ahead = (0.9 * momentum + 0.1 * 1) / (1 - 0.9)  # plain momentum would give 1
    assert parameter.tolist() == pytest.approx([1 - 0.1 * ahead] * 3, rel=1e-4)


@pytest.mark.parametrize(
    ("loss", "grad"), [(float("nan"), 1.0), (1.0, float("nan")), (1.0, float("inf"))]
)
def test_an_update_that_is_not_finite_changes_nothing(loss, grad):
    parameter, opt = make(OptConfig(lr=0.1, warmup=0, wd=0.1))
    step(opt, [1.0, 2.0, 3.0])
    before = [x.clone() for x in (parameter, opt.nu[0], opt.mu[0], opt.step)]
    for count in (1, 2):
        ok, metrics = step(opt, [grad, 1.0, 1.0], loss)
        assert not ok
        assert float(metrics["opt/nonfinite_in_row"]) == count
        assert float(metrics["opt/skipped"]) == count
    after = (parameter, opt.nu[0], opt.mu[0], opt.step)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    if grad != 1.0:
        assert opt.nonfinite() == ["a.weight"]
    ok, metrics = step(opt, [1.0, 1.0, 1.0])
    assert ok
    assert float(metrics["opt/nonfinite_in_row"]) == 0
    assert float(metrics["opt/skipped"]) == 2
    assert opt.nonfinite() == []


def test_skipping_the_very_first_update_leaves_no_trace():
    parameter, opt = make()
    step(opt, [float("nan")] * 3)
    fresh, other = make()
    step(opt, [1.0, 2.0, 3.0])
    step(other, [1.0, 2.0, 3.0])
    assert torch.equal(parameter, fresh)


def test_loss_scale_halves_on_overflow_and_doubles_after_many_good_updates():
    _, opt = make(scaling=True)
    assert float(opt.scale) == 1e4
    ok, metrics = step(opt, [float("inf")] * 3)
    assert not ok
    assert float(opt.scale) == 5e3
    assert float(metrics["opt/nonfinite_in_row"]) == 0  # a smaller scale cures it
    for _ in range(opt.GOOD_STEPS):
        step(opt, [1.0] * 3)
    assert float(opt.scale) == 1e4
    for _ in range(60):
        _, metrics = step(opt, [float("inf")] * 3)
    assert float(opt.scale) == pytest.approx(opt.LEAST)
    assert float(metrics["opt/nonfinite_in_row"]) > 0


def test_scaled_gradients_are_the_plain_ones():
    parameter, opt = make(scaling=True)
    (grad,) = opt.gradients((parameter**2).sum())
    torch.testing.assert_close(grad, 2 * parameter.detach())


def test_state_round_trip():
    parameter, opt = make()
    step(opt, [1.0, 2.0, 3.0])
    saved = opt.state_dict()
    copy, other = make()
    copy.data.copy_(parameter.data)
    other.load_state_dict(saved)
    step(opt, [3.0, 2.0, 1.0])
    step(other, [3.0, 2.0, 1.0])
    assert torch.equal(parameter, copy)
