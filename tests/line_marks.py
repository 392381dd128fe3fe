"""Lines of `reverie` that tests execute, recorded at a small cost.

Before Python 3.12, coverage.py is called for each line that Python executes, also in
torch, so that tests take half as long again. The import hook of the tests, in
`typecheck.py`, adds an assignment before each statement instead:

    _executed[12] = 1
    statement_in_line_12()

`conftest.py` stops the tracer of coverage.py and adds the marked lines to its data.
Processes that tests start have no hook and are traced.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

executed: dict[str, bytearray] = {}
"""A byte for each line of a file, 1 if the line was executed."""


def executed_lines() -> dict[str, list[int]]:
    """Executed lines by file."""
    return {
        path: [line for line, mark in enumerate(marks) if mark]
        for path, marks in executed.items()
    }


def mark_lines(tree: ast.Module, path: str) -> None:
    """Add the assignments to a module, after its docstring and `__future__` imports."""
    count = len(Path(path).read_bytes().splitlines()) + 1
    executed.setdefault(path, bytearray(count))
    for node in reversed(list(ast.walk(tree))):  # inner blocks first
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block:
                setattr(node, field, _with_marks(block))
        if isinstance(node, ast.Try | ast.TryStar):
            _mark_heads(node.handlers, [handler.lineno for handler in node.handlers])
        elif isinstance(node, ast.Match):
            _mark_heads(node.cases, [case.pattern.lineno for case in node.cases])
    start = f"from line_marks import executed as _all\n_executed = _all[{path!r}]"
    index = header_length(tree)
    tree.body[index:index] = ast.parse(start).body


def header_length(tree: ast.Module) -> int:
    """Number of statements that must stay first in a module."""
    body = [*tree.body, None]
    return next(i for i, node in enumerate(body) if not _stays_first(node))


def _mark_heads(branches: Sequence[Any], heads: list[int]) -> None:
    """Mark `except` or `case` lines: a branch that runs was compared after others."""
    for i, branch in enumerate(branches):
        branch.body[:0] = [_mark(line) for line in heads[: i + 1]]


def _with_marks(block: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a block, with a mark before each one that may have one."""
    marked: list[ast.stmt] = []
    waiting: list[int] = []
    for node in block:
        waiting += [item.lineno for item in getattr(node, "decorator_list", [])]
        waiting.append(node.lineno)
        if not _stays_first(node):
            marked += [_mark(line) for line in waiting]
            waiting = []
        marked.append(node)
    return marked + [_mark(line) for line in waiting]


def _stays_first(node: ast.stmt | None) -> bool:
    """Whether a statement is a docstring or an import of `__future__`."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _mark(line: int) -> ast.stmt:
    """`_executed[line] = 1`, at the line that it marks."""
    place = {"lineno": line, "end_lineno": line, "col_offset": 0, "end_col_offset": 0}
    marks = ast.Name("_executed", ast.Load(), **place)
    index = ast.Constant(line, **place)
    target = ast.Subscript(marks, index, ast.Store(), **place)
    return ast.Assign([target], ast.Constant(1, **place), **place)
