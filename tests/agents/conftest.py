"""Fixtures of the agent tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def _without_onednn():
    """Disable oneDNN, which crashes on some machines in half precision."""
    before = torch.backends.mkldnn.set_flags(False)
    yield
    torch.backends.mkldnn.set_flags(*before)
