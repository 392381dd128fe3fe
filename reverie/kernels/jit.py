"""`jit` compiles a Triton function, whose code is not type-checked."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import triton

__all__ = ["jit"]

if TYPE_CHECKING:  # for mypy, it is only a decorator
    from typing import no_type_check as jit
else:

    def jit(function: Any) -> Any:
        return triton.jit(inspect.unwrap(function))  # tests wrap it with type checks
