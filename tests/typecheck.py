"""Hook of tests that checks annotations of `reverie` and marks executed lines."""

from __future__ import annotations

import ast
import functools
import io
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, Protocol, TextIO

import jaxtyping
import line_marks
import torch
from beartype import BeartypeConf, BeartypeHintOverrides, beartype

check = beartype(
    conf=BeartypeConf(
        # An int is accepted for a float, as everywhere else in Python.
        is_pep484_tower=True,
        # A captured stdout is a text stream, and sizes are symbols while
        # `torch.export` traces a function.
        hint_overrides=BeartypeHintOverrides(
            {TextIO: io.TextIOBase, int: int | torch.SymInt}
        ),
        # Readers of damaged files catch `TypeError`.
        violation_type=TypeError,
    )
)


CALLS = 50
"""Calls of a function in a test whose shapes are checked."""
counts: list[list[int]] = []
"""The number of checked calls of each function; see `reset_counts`."""


def check_shapes(target: Any) -> Any:
    """Check types and shapes in the first calls of a function in each test.

    Checks took half of the time of tests that train, which call the same functions
    with the same types and shapes hundreds of times.
    """
    checked = jaxtyping.jaxtyped(target, typechecker=check)
    if isinstance(target, type):  # the constructor of a dataclass
        return checked
    count = [0]
    counts.append(count)

    @functools.wraps(target)
    def limited(*args: Any, **options: Any) -> Any:
        if count[0] >= CALLS:
            # sizes that are checked within the call are those of this call only
            with jaxtyping.jaxtyped("context"):
                return target(*args, **options)
        count[0] += 1
        return checked(*args, **options)

    return limited


def reset_counts() -> None:
    """Check the first calls again, in the next test."""
    for count in counts:
        count[0] = 0


def install_hook() -> None:
    """Check types in all modules of `reverie`, and shapes where they are annotated."""
    sys.meta_path.insert(0, ImportHook())


class ImportHook(MetaPathFinder):
    """Load modules of `reverie` with decorated functions and marked lines."""

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] != "reverie":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def path_stats(self, path: str) -> Any:
        raise OSError("no bytecode is cached, because it would have the decorators")

    def source_to_code(self, data: Any, path: Any, **options: Any) -> Any:
        tree = ast.parse(data, path)
        unknown = {
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for line in node.body
            if isinstance(line, ast.Import | ast.ImportFrom)
            for alias in line.names
        }
        line_marks.mark_lines(tree, path)
        shapes = b"jaxtyping" in data and Path(path).stem != "__init__"
        tree = _Decorate("check_shapes" if shapes else "check", unknown).visit(tree)
        first = line_marks.header_length(tree)
        tree.body[first:first] = ast.parse("import typecheck as _typecheck").body
        return compile(tree, path, "exec", dont_inherit=True)


class _Decorate(ast.NodeTransformer):
    """Add a function of this file to the decorators, outside of functions.

    Functions whose annotations have `unknown` names, which exist for mypy only, stay
    as they are, and so do kernels: Triton compiles their source, in their own module.
    """

    def __init__(self, decorator: str, unknown: set[str]):
        self.decorator = f"_typecheck.{decorator}"
        self.unknown = unknown

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        shapes = any(  # of the fields of a dataclass
            isinstance(line, ast.AnnAssign) and "Tensor" in ast.unparse(line.annotation)
            for line in node.body
        )
        if self.decorator == "_typecheck.check_shapes" and shapes:
            node.decorator_list.insert(0, self._decorator())
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: Any) -> Any:
        args = node.args
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
        hints = [arg.annotation for arg in (*every, args.vararg, args.kwarg) if arg]
        names = {
            name.id
            for hint in (*hints, node.returns)
            if hint
            for name in ast.walk(hint)
            if isinstance(name, ast.Name)
        }
        kernel = any(
            ast.unparse(decorator).removeprefix("triton.").startswith("jit")
            for decorator in node.decorator_list
        )
        if not kernel and not names & self.unknown:
            node.decorator_list.append(self._decorator())
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def _decorator(self) -> ast.expr:
        return ast.parse(self.decorator, mode="eval").body


def accept_plain_protocols() -> None:
    """Accept any object for a protocol of `reverie` without `runtime_checkable`.

    Such a protocol is checked by mypy. At run time Python raises for it, and beartype
    would refuse every function that names one.

    For the other protocols of `reverie`, attributes that an object forwards with
    `__getattr__` (wrappers of environments and feeds) count, as in Python 3.11. Newer
    versions of Python ignore them.
    """
    meta: Any = type(Protocol)
    original_check = meta.__instancecheck__

    def is_instance(cls: Any, instance: object) -> bool:
        ours = cls.__module__.split(".")[0] == "reverie"
        plain = ours and getattr(cls, "_is_protocol", False)
        if plain and not getattr(cls, "_is_runtime_protocol", False):
            return True
        if original_check(cls, instance):
            return True
        forwards = plain and hasattr(type(instance), "__getattr__")
        names = getattr(cls, "__protocol_attrs__", ())  # since Python 3.12
        return forwards and bool(names) and all(hasattr(instance, x) for x in names)

    meta.__instancecheck__ = is_instance
