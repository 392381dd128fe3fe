"""How annotations of `reverie` are checked while tests run; see `conftest.py`."""

from __future__ import annotations

import ast
import io
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, Protocol, TextIO

import jaxtyping
from beartype import BeartypeConf, BeartypeHintOverrides, beartype

check = beartype(
    conf=BeartypeConf(
        # An int is accepted for a float, as everywhere else in Python.
        is_pep484_tower=True,
        # A captured stdout is a text stream too.
        hint_overrides=BeartypeHintOverrides({TextIO: io.TextIOBase}),
        # Readers of damaged files catch `TypeError`.
        violation_type=TypeError,
    )
)


def install_hooks() -> None:
    """Check types in all modules of `reverie`, and shapes where they are annotated.

    A call that checks shapes costs several times as much as one that checks types.
    """
    root = Path(__file__).parent.parent
    modules = [
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in sorted((root / "reverie").rglob("*.py"))
        if path.stem != "__init__" and "jaxtyping" in path.read_text("utf-8")
    ]
    sys.meta_path.insert(0, TypeHook())
    jaxtyping.install_import_hook(modules, "typecheck.check")


class TypeHook(MetaPathFinder):
    """Load modules of `reverie` with `check` as the decorator of their functions."""

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
        tree = _Decorate(unknown).visit(tree)
        first = next(
            i for i, node in enumerate([*tree.body, None]) if not _is_header(node)
        )
        tree.body[first:first] = ast.parse("import typecheck as _typecheck").body
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _Decorate(ast.NodeTransformer):
    """Add the decorator to functions, except for those inside of functions.

    Functions whose annotations have `unknown` names, which exist for mypy only, stay
    as they are.
    """

    def __init__(self, unknown: set[str]):
        self.unknown = unknown

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
        if not names & self.unknown:
            decorator = ast.parse("_typecheck.check", mode="eval").body
            node.decorator_list.append(decorator)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef


def _is_header(node: ast.stmt | None) -> bool:
    """Whether a statement is a docstring or an import of `__future__`."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def accept_plain_protocols() -> None:
    """Accept any object for a protocol of `reverie` without `runtime_checkable`.

    Such a protocol (`Agent`, `Feed`, ...) is checked by mypy. At run time Python raises
    for it, and beartype would refuse every function that names one.
    """
    meta: Any = type(Protocol)
    original_check = meta.__instancecheck__

    def is_instance(cls: Any, instance: object) -> bool:
        ours = cls.__module__.split(".")[0] == "reverie"
        plain = ours and getattr(cls, "_is_protocol", False)
        if plain and not getattr(cls, "_is_runtime_protocol", False):
            return True
        return original_check(cls, instance)

    meta.__instancecheck__ = is_instance
