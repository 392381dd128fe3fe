"""Sums and concatenations over ranks, and their gradients."""

from __future__ import annotations

import torch

from reverie.distributed import collective

SEQUENCES = 5  # uneven on two and on three ranks


def batch() -> torch.Tensor:
    return (
        torch.arange(SEQUENCES * 2, dtype=torch.float64).reshape(SEQUENCES, 2) ** 2 / 7
    )


def local_loss(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's term of a loss that uses the batch mean and all pairs."""
    count = collective.global_count(len(x))
    mean = collective.all_reduce_with_grad(x.sum(0)) / count
    pairs = (x - mean) @ collective.all_gather_with_grad(x).T  # (own, all)
    return collective.mean_contribution(torch.logsumexp(pairs / 50, 1))


def loss_and_gradient() -> tuple[float, torch.Tensor]:
    with collective.synchronized():
        own = collective.set_batch(SEQUENCES)
        x = batch()[own.start : own.stop].requires_grad_()
        loss = local_loss(x)
        (grad,) = torch.autograd.grad(loss, x)
        total = collective.all_reduce_with_grad(loss.detach())
        return float(total), collective.all_gather(grad)


def flags_of_any_length() -> torch.Tensor:
    with collective.synchronized():
        return collective.all_gather(torch.arange(collective.rank() + 1) % 2 == 0)


def return_their_input() -> bool:
    """True if collectives return their input outside of `synchronized`."""
    x = torch.ones(2)
    return (
        collective.all_reduce_with_grad(x) is x
        and collective.all_gather_with_grad(x) is x
    )


def test_the_gradient_of_batch_statistics_is_that_of_one_process(ranks):
    expected_loss, expected_grad = loss_and_gradient()
    for count in (2, 3):
        for loss, grad in ranks.run(count, loss_and_gradient):
            assert abs(loss - expected_loss) < 1e-12
            torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-12)


def test_ranks_gather_flags_of_different_lengths(ranks):
    for flags in ranks.run(3, flags_of_any_length):
        assert flags.tolist() == [True, True, False, True, False, True]


def test_collectives_return_their_input_outside_of_an_update(ranks):
    assert return_their_input()
    assert all(ranks.run(2, return_their_input))


def test_sequences_are_divided_evenly():
    assert [tuple(x) for x in collective.split_batch(16, 3)] == [
        (0, 6, 16),
        (6, 11, 16),
        (11, 16, 16),
    ]
