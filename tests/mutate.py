"""Mutation testing: change one operator, constant or call at a time, and see whether a test notices.

    python tests/mutate.py SEED [FIRST-]LAST [FOLDER ...]

The script works on a copy of the last commit. It runs the tests of `make check` but those of deploy and docs once under
coverage (`pip install coverage`), and finds all mutations of the lines that they cover. SEED puts these in an order;
FIRST and LAST are places in it. FOLDERs are parts of the product, by default broker, learner_stub, schemas and
workers/sampling. Against each mutation it runs the tests that cover its line. It prints each mutation that none of them
notices, and exits 1 if there is one. Such a survivor shows a missing test, or a line that has no effect. Tests that
fail without a mutation are left out. MUTATE_COPY=FOLDER keeps the copy and its coverage for the next call.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("broker", "learner_stub", "schemas", "workers/sampling")
CHECKED = "not (chaos or netns or slow or processes or long or thorough)"
"""The tests of `make check`."""
FAR = ("tests/deploy/", "tests/documentation/")
"""Folders of tests that say little of the lines that are mutated, and take long."""
MOST_TESTS = 60
"""Tests to run against a mutation. Those that cover the fewest lines go first, since they say the most of a line."""
PARTS = os.cpu_count() or 1
"""Processes that run the tests under coverage, each with a part of them."""
TIMEOUT_S = 180
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}
Tests = dict[str, dict[int, list[str]]]
"""By file and line, the tests that run it."""


@dataclass(frozen=True)
class Mutation:
    """A mutation: the source `old` at `line` of a file, and what takes its place."""

    file: str
    line: int
    column: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.old!r} -> {self.new!r}"

    def applied(self, source: str) -> str:
        """Return the mutated source."""
        lines = source.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        whole = source.encode()
        return (whole[:start] + self.new.encode() + whole[start + len(self.old.encode()) :]).decode()


def mutations(file: str, source: str) -> Iterator[Mutation]:
    """Yield the mutations of a file. Annotations, texts and `__all__` are left alone."""
    for node in _code(ast.parse(source)):
        for mutant in _mutants(node):
            old = ast.get_source_segment(source, node)
            new = ast.unparse(mutant)
            if old and old != new and isinstance(node, ast.expr | ast.stmt):
                yield Mutation(
                    file, node.lineno, node.col_offset, old, new if isinstance(node, ast.stmt) else f"({new})"
                )


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from _code(child)


def _mutants(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare | ast.BoolOp | ast.BinOp):
        operator = node.ops[0] if isinstance(node, ast.Compare) else node.op
        if (other := OPERATORS.get(type(operator))) is not None:
            mutant = copy.deepcopy(node)
            if isinstance(mutant, ast.Compare):
                mutant.ops[0] = other()  # type: ignore[call-overload]
            else:
                mutant.op = other()  # type: ignore[assignment]
            yield mutant
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()


class Copy:
    """A copy of the last commit, whose `headrace` its tests import."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failing: set[str] = set()
        """Tests that fail without a mutation."""
        if not folder.exists():
            subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, folder], check=True)
        self._environment = os.environ | {"PYTHONPATH": str(folder / ".types"), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, *command: str, timeout_s: float | None = None) -> int:
        """Run a module of Python in the copy, without output. Return its exit code; -1 if it takes too long."""
        try:
            return subprocess.run(
                [sys.executable, "-m", *command],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=timeout_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return -1

    def covered(self) -> Tests:
        """Return the tests by line, the most specific ones first."""
        data = self.folder / "build/coverage"
        if not data.exists():
            data.parent.mkdir(exist_ok=True)
            settings = self.folder / ".coveragerc"
            settings.write_text(
                "[run]\ndynamic_context = test_function\nsource = broker,learner_stub,schemas,workers\n"
                "data_file = build/coverage\n"
            )
            print("running the tests under coverage, which takes some minutes ...", flush=True)
            paths = sorted(path.relative_to(self.folder).as_posix() for path in self.folder.glob("tests/**/test_*.py"))
            near = [path for path in paths if not path.startswith(FAR)]
            with ThreadPoolExecutor() as threads:
                list(threads.map(lambda part: self._cover(part, near[part::PARTS]), range(PARTS)))
            self.run("coverage", "combine")
        for failed in self.folder.glob(".pytest_cache/*/v/cache/lastfailed"):
            self.failing |= {test.partition("[")[0] for test in json.loads(failed.read_text())}
        return self._read(data)

    def _cover(self, part: int, files: list[str]) -> None:
        pytest = ("pytest", "-p", "no:xdist", "-o", f"cache_dir=.pytest_cache/{part}", "-m", CHECKED)
        self.run("coverage", "run", "--parallel-mode", "-m", *pytest, *files)

    def _read(self, data: Path) -> Tests:
        from coverage.numbits import numbits_to_nums

        tests: Tests = defaultdict(lambda: defaultdict(list))
        rows = sqlite3.connect(data).execute(
            "select path, context, numbits from line_bits join file on file.id = file_id"
            " join context on context.id = context_id where context != ''"
        )
        found = [(path, context, numbits_to_nums(bits)) for path, context, bits in rows]
        sizes: dict[str, int] = defaultdict(int)
        for _, context, lines in found:
            sizes[context] += len(lines)
        for path, context, lines in sorted(found, key=lambda row: sizes[row[1]]):
            name = Path(path).resolve().relative_to(self.folder.resolve()).as_posix()
            for line in lines:
                tests[name][line].append(context)
        return tests

    def try_(self, mutation: Mutation, contexts: list[str]) -> str:
        """Run these tests against the mutation. Return what became of it: SURVIVED if all of them pass."""
        path = self.folder / mutation.file
        source = path.read_text()
        path.write_text(mutation.applied(source))
        try:
            tests = [test for test in map(self._test, contexts) if test]
            run = ("pytest", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", CHECKED, *tests[:MOST_TESTS])
            return {0: "SURVIVED", -1: "took too long"}.get(self.run(*run, timeout_s=TIMEOUT_S), "killed")
        finally:
            path.write_text(source)

    def _test(self, context: str) -> str:
        """Return the test's id; "" for a context that is none, and for a test that fails anyway."""
        module, _, function = context.rpartition(".")
        file = f"{module.replace('.', '/')}.py"
        test = f"{file}::{function}"
        is_test = function.startswith("test_") and test not in self.failing and (self.folder / file).exists()
        return test if is_test else ""


def main() -> int:
    seed, places, *folders = sys.argv[1:]
    first, _, last = places.rpartition("-")
    kept = os.environ.get("MUTATE_COPY")
    with tempfile.TemporaryDirectory() as scratch:
        tree = Copy(Path(kept or scratch) / "copy")
        tests = tree.covered()
        possible = [
            mutation
            for file in sorted(tests)
            if file.startswith(tuple(folders or FOLDERS))
            for mutation in mutations(file, (tree.folder / file).read_text())
            if any(map(tree._test, tests[file].get(mutation.line, ())))
        ]
        random.Random(int(seed)).shuffle(possible)
        chosen = list(enumerate(possible, start=1))[int(first or 1) - 1 : int(last)]
        survivors = 0
        for place, mutation in chosen:
            result = tree.try_(mutation, tests[mutation.file][mutation.line])
            survivors += result == "SURVIVED"
            print(f"{place} {result} {mutation}", flush=True)
    print(f"{survivors} of {len(chosen)} mutations survived, of {len(possible)} that are possible")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
