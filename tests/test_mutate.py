"""Mutations are valid Python, each with one change, and leave annotations and texts alone."""

from __future__ import annotations

import ast

from mutate import mutations

SOURCE = """
LIMIT: int = 5


def grow(x: list[int], é=True) -> int:
    \"\"\"Return 1 + 1.\"\"\"
    x.append(2)
    return len(x) + 1 if not x or x[0] < LIMIT else é
"""


def test_each_mutation_changes_one_operator_constant_or_call() -> None:
    found = {mutation.old: mutation.new for mutation in mutations("a.py", SOURCE)}
    assert found == {
        "5": "(6)",
        "True": "(False)",
        "x.append(2)": "pass",
        "2": "(3)",
        "len(x) + 1": "(len(x) - 1)",
        "1": "(2)",
        "not x or x[0] < LIMIT": "(not x and x[0] < LIMIT)",
        "not x": "(x)",
        "x[0] < LIMIT": "(x[0] <= LIMIT)",
        "0": "(1)",
    }
    for mutation in mutations("a.py", SOURCE):
        ast.parse(mutation.applied(SOURCE))
