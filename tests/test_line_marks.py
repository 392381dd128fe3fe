"""Marked lines are those that coverage.py traces."""

from __future__ import annotations

import ast

import line_marks
import pytest
from coverage import Coverage

SOURCE = '''"""A module with every kind of statement that has a block."""

from __future__ import annotations

import functools


@functools.cache
@functools.lru_cache(
    maxsize=10
)
def choose(value):
    """The docstring stays the docstring."""
    if value == 1:
        return (
            "one"
        )
    elif value == 2:
        return "two"
    else:
        pass
    try:
        number = int(value)
    except KeyError:
        raise
    except ValueError:
        number = 0
    else:
        number += 1
    finally:
        done = True
    match number:
        case 0 if not done:
            return "never"
        case 0:
            text = "zero"
        case _:
            text = "many"
    for _ in range(2):
        continue
    else:
        text += "!"
    while number > 100:
        number -= 1
    with open(__file__) as file:
        text += file.readline()[:1]
    return text


class Pair:
    """Two fields."""

    first: int = 1
    """The first one."""
    second = [
        value for value in range(3)
        if value
    ]

    async def never(self):
        global unused
        return 3


assert choose.__doc__ and choose.__doc__.startswith("The docstring")
choose(1), choose("a"), choose("7")
'''


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text(SOURCE)
    yield path
    line_marks.executed.pop(str(path), None)


def missing_lines(path, source, lines=None) -> list[int]:
    """Lines that are not executed: as traced by coverage.py, or all but `lines()`."""
    coverage = Coverage(data_file=None, include=[str(path)], config_file=False)
    code = compile(source, str(path), "exec")
    values = {"__file__": str(path), "__name__": "sample"}
    if lines is None:
        with coverage.collect():
            exec(code, values)
    else:
        exec(code, values)
        coverage.get_data().add_lines(lines())
    return coverage.analysis2(str(path))[3]


def test_marked_lines_are_those_that_coverage_traces(module):
    tree = ast.parse(SOURCE)
    line_marks.mark_lines(tree, str(module))
    ast.fix_missing_locations(tree)
    missing = missing_lines(module, tree, line_marks.executed_lines)
    assert missing == missing_lines(module, SOURCE)
    source = SOURCE.splitlines()
    assert [source[line - 1].strip() for line in missing] == [
        'return "two"',
        "raise",
        'return "never"',
        "number -= 1",
        "return 3",
    ]


def test_a_second_import_keeps_the_marks(module):
    line_marks.mark_lines(ast.parse(SOURCE), str(module))
    line_marks.executed[str(module)][5] = 1
    line_marks.mark_lines(ast.parse(SOURCE), str(module))
    assert line_marks.executed_lines()[str(module)] == [5]
