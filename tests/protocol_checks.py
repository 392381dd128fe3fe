"""Check that an object has all members of a protocol, with the same parameters."""

from __future__ import annotations

import inspect
from typing import Any


def check_members(instance: Any, protocol: type) -> None:
    """Assert that `instance` meets `protocol`, including its parameter names."""
    assert isinstance(instance, protocol)
    members = {
        name: member
        for base in reversed(protocol.__mro__)
        for name, member in vars(base).items()
        if not name.startswith("_") and base.__module__.startswith("reverie.")
    }
    for name, member in members.items():
        if inspect.isfunction(member):
            expected = parameters(member)
            actual = parameters(getattr(type(instance), name))
            assert actual == expected, f"{name} has {actual}, expected {expected}"
        else:
            assert not inspect.ismethod(getattr(instance, name)), name


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)
