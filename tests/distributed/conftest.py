from __future__ import annotations

import pytest
from rank_group import RankGroup


@pytest.fixture(scope="session")
def ranks():
    """Three processes; `ranks.run(2, function)` runs a function on two of them."""
    group = RankGroup()
    yield group
    group.close()
