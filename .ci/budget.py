"""Measures how large the project is, and fails where it is larger than `.ci/budget.toml` allows.

Usage: python .ci/budget.py [FIGURE]

Prints each figure beside the most that it may be; with the name of a figure, what it counts. Lines are those of the
product's `.py` files: the folders of an annex count for that annex, all others for the main house. A room is a folder;
an arrow says that a room imports another one. Exit 0: within the budget. Exit 1: above it, and the last line says what.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("schemas/", "broker/", "workers/", "learner_stub/", "deploy/")
GENERATED = re.compile(r"^<!-- generated: .*?^<!-- end of generated -->$", re.MULTILINE | re.DOTALL)

Figures = dict[str, int | Collection[str]]
"""The items that count under each name, or their number."""


def main() -> int:
    """Print the table, or what one figure counts, and return the exit code."""
    budget = tomllib.loads((ROOT / ".ci" / "budget.toml").read_text())
    figures = measure(budget["annexes"])
    if sys.argv[1:]:
        print(*sorted(as_list(figures[sys.argv[1]])), sep="\n")
        return 0
    most: dict[str, int] = budget["most"] | {f"lines of {part}": lines for part, lines in budget["lines"].items()}
    wrong = [f"{name} stands in the budget, and is not measured" for name in most if name not in figures]
    for name, counted in figures.items():
        count = counted if isinstance(counted, int) else len(counted)
        print(f"{name:44} {count:>8,}" + (f"  of {most[name]:,}" if name in most else ""))
        if count > most.get(name, count):
            wrong.append(f"{name}: {count - most[name]:,} more than {most[name]:,}")
    if wrong:
        print("Cut as much elsewhere, or raise the number in .ci/budget.toml and say in the commit why.")
        print(f"FAILED .ci/budget.toml: {'; '.join(wrong)}")
    return 1 if wrong else 0


def as_list(counted: int | Collection[str]) -> Collection[str]:
    """Return what a figure counts, one by one."""
    return [f"{counted:,}"] if isinstance(counted, int) else counted


def measure(annexes: dict[str, list[str]]) -> Figures:
    """Return all figures. `annexes` has the folders of each annex."""
    sources = {path: text for path, text in tracked("*.py").items() if path.startswith(PRODUCT)}
    figures: Figures = {f"lines of {part}": lines for part, lines in lines_of_parts(sources, annexes).items()}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    imports = {path: set(imported(tree, trees)) - {path} for path, tree in trees.items()}
    arrows = {(room(path), room(other)) for path, others in imports.items() for other in others}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return figures | {
        "lines": sum(map(lines, sources.values())),
        "lines of tests": sum(map(lines, tracked("tests/*.py").values())),
        "files": sources,
        "rooms": {room(path) for path in sources},
        "arrows between rooms": {f"{a} -> {b}" for a, b in arrows if a != b},
        "pairs of rooms that import each other": {f"{a} <-> {b}" for a, b in arrows if a < b and (b, a) in arrows},
        "imports of annexes by the main house": {
            f"{path} -> {other}"
            for path, others in imports.items()
            for other in others
            if not path.endswith("__init__.py") and not annex(path, annexes) and annex(other, annexes)
        },
        "circles of imports": {" <-> ".join(sorted(group)) for group in circles(imports)},
        "class names that stand twice": repeated(node.name for node in classes if not node.name.startswith("_")),
        "file names that stand twice": repeated(Path(path).name for path in sources if not path.endswith("__.py")),
        "error classes": error_classes(classes),
        "settings": settings(),
        "hard dependencies": project["dependencies"],
        "words of docs": sum(len(GENERATED.sub("", text).split()) for text in tracked("*.md", "docs/*.md").values()),
    }


def tracked(*patterns: str) -> dict[str, str]:
    """Return the texts of the files that git knows, by path. CHANGELOG.md, which is history, is left out."""
    command = ["git", "ls-files", "--", *patterns, ":!CHANGELOG.md", ":!tests/*.md"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return {path: (ROOT / path).read_text() for path in listed if (ROOT / path).is_file()}


def lines(text: str) -> int:
    """Return the number of lines of a text."""
    return text.count("\n")


def lines_of_parts(sources: dict[str, str], annexes: dict[str, list[str]]) -> dict[str, int]:
    """Return the lines of the main house and of each annex."""
    found = dict.fromkeys(("main house", *annexes), 0)
    for path, text in sources.items():
        found[annex(path, annexes) or "main house"] += lines(text)
    return found


def annex(path: str, annexes: dict[str, list[str]]) -> str:
    """Return the annex of a file; "" for the main house."""
    homes = (name for name, folders in annexes.items() if path.startswith(tuple(f"{each}/" for each in folders)))
    return next(homes, "")


def room(path: str) -> str:
    """Return the folder of a file."""
    return str(Path(path).parent)


def imported(tree: ast.Module, known: Collection[str]) -> Iterator[str]:
    """Yield the files of the product that a file imports, also in functions and for types alone."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            path = name.removeprefix("headrace.").replace(".", "/")
            yield from (found for found in (f"{path}.py", f"{path}/__init__.py") if found in known)


def circles(imports: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the groups of files that import each other in a circle."""
    reached = {path: reach(path, imports) for path in imports}
    groups = {frozenset(other for other in reached[path] if path in reached[other]) for path in imports}
    return {group for group in groups if len(group) > 1}


def reach(start: str, imports: dict[str, set[str]]) -> set[str]:
    """Return the files that `start` imports, directly or not."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports[waiting.pop()] - found
        waiting += new
        found |= new
    return found


def repeated(names: Iterable[str]) -> set[str]:
    """Return the names that are given more than once."""
    return {name for name, count in Counter(names).items() if count > 1}


def error_classes(classes: list[ast.ClassDef]) -> set[str]:
    """Return the names of the classes of exceptions."""
    bases: dict[str, set[str]] = defaultdict(set)
    for node in classes:
        bases[node.name] |= {ast.unparse(base).rsplit(".", 1)[-1] for base in node.bases}
    found = {"Exception", "BaseException"}
    while new := {name for name, of in bases.items() if any(b in found or b.endswith("Error") for b in of)} - found:
        found |= new
    return found & bases.keys()


def settings() -> list[str]:
    """Return the names of a fleet's settings."""
    from headrace.schemas.settings.config import FleetConfig

    def names(model: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from names(kind, f"{prefix}{name}.")
            else:
                yield prefix + name

    return list(names(FleetConfig, ""))


if __name__ == "__main__":
    sys.exit(main())
