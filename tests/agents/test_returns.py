"""Lambda-returns by hand."""

from __future__ import annotations

import torch

from reverie.agents.returns import lambda_return


def ret(reward, boot, last, term, disc=0.5, lam=0.5):
    rows = (
        torch.tensor([row], dtype=torch.float32) for row in (reward, boot, last, term)
    )
    return lambda_return(*rows, disc, lam)[0].tolist()


def test_three_steps():
    # R1 = r2 + d * ((1 - lam) * b2 + lam * b2); R0 = r1 + d * ((1 - lam) * b1 + lam R1)
    r1 = 2 + 0.5 * 8
    r0 = 1 + 0.5 * (0.5 * 4 + 0.5 * r1)
    assert ret([9, 1, 2], [0, 4, 8], [0, 0, 0], [0, 0, 0]) == [r0, r1]


def test_a_truncated_step_keeps_its_bootstrap_and_cuts_the_trace():
    assert ret([0, 1, 50], [0, 4, 50], [0, 1, 0], [0, 0, 0])[0] == 1 + 0.5 * 4


def test_nothing_after_a_terminal_reaches_back():
    assert ret([0, 1, 50], [0, 4, 50], [0, 1, 0], [0, 1, 0])[0] == 1
