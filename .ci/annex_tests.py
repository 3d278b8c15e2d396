"""Prints which tests a change waits for, as arguments of pytest.

Usage: python .ci/annex_tests.py [ANNEX], such as env_hosts, or main_house

A test file belongs to the annexes whose modules it names; one that names none belongs to the main house. With ANNEX:
its test files. Without: where this branch and the working tree differ from `main` in files of annexes alone,
`--ignore` for the files that belong to other annexes only; nothing where the main house has changed.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAIN = "main house"
PRODUCT = ("schemas/", "broker/", "workers/", "learner_stub/", "deploy/")
ANNEXES: dict[str, list[str]] = tomllib.loads((ROOT / ".ci" / "budget.toml").read_text())["annexes"]


def main() -> int:
    """Print the arguments and return the exit code."""
    if sys.argv[1:]:
        name = " ".join(sys.argv[1:]).replace("_", " ")
        if name not in (MAIN, *ANNEXES):
            print(f"no annex is called {name!r}; there are {', '.join(ANNEXES)}", file=sys.stderr)
            return 2
        print(*(path for path, annexes in test_files().items() if name in (annexes or {MAIN})))
        return 0
    print(*left_out(changed()))
    return 0


def changed() -> list[str]:
    """Return the files in which this branch and the working tree differ from `main`, with the new ones."""
    base = _git("merge-base", "HEAD", "main")
    return [*_git("diff", "--name-only", base).split(), *_git("ls-files", "--others", "--exclude-standard").split()]


def left_out(paths: list[str]) -> list[str]:
    """Return `--ignore` for each test file that a change of these files does not touch."""
    touched = {annex_of(path) for path in paths if path.startswith(PRODUCT)}
    if None in touched or not touched:
        return []
    of_others = (path for path, annexes in test_files().items() if annexes and not annexes & touched)
    return [f"--ignore={path}" for path in of_others if path not in paths]


def annex_of(path: str) -> str | None:
    """Return the annex of a file; None for the main house."""
    for name, folders in ANNEXES.items():
        if path.startswith(tuple(f"{folder}/" for folder in folders)):
            return name
    return None


def test_files() -> dict[str, set[str]]:
    """Return the annexes of each test file."""
    modules = {name: [f"headrace.{folder.replace('/', '.')}" for folder in each] for name, each in ANNEXES.items()}
    texts = {path: (ROOT / path).read_text() for path in _git("ls-files", "tests/**/test_*.py").split()}
    return {
        path: {name for name, named in modules.items() if any(module in text for module in named)}
        for path, text in texts.items()
    }


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
