"""The budget of `.ci/budget.toml`: what is counted, and that `make lint` fails above it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import TIMEOUT_S

PRODUCT = {
    "schemas/errors.py": "class FleetError(Exception): ...\nclass LostError(FleetError): ...\n",
    "broker/store/held.py": "from headrace.broker.ports.sockets import Sockets\nclass Batch: ...\n",
    "broker/ports/sockets.py": "class Sockets: ...\ndef held():\n    from headrace.broker.store import held\n"
    "    import headrace.deploy.watch.page\n",
    "deploy/watch/page.py": "import headrace.schemas.errors\n\nclass Batch: ...\n",
    "README.md": "Six words are in this page.\n<!-- generated: commands -->\nmany more\n<!-- end of generated -->\n",
    "pyproject.toml": '[project]\ndependencies = ["numpy", "pyzmq"]\n',
    ".ci/budget.toml": "[most]\n{most}\n[lines]\n[annexes]\nwatch = ['deploy/watch']\n",
}
COUNTED = {
    "lines of main house": 8,
    "lines of watch": 3,
    "rooms": 4,
    "arrows between rooms": 4,
    "pairs of rooms that import each other": 1,
    "imports of annexes by the main house": 1,
    "circles of imports": 1,
    "class names that stand twice": 1,
    "error classes": 2,
    "hard dependencies": 2,
    "words of docs": 6,
}


def budget(folder: Path, root: Path, most: str, *asked: str) -> tuple[int, list[str]]:
    for name, text in PRODUCT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("{most}", most))
    shutil.copy(root / ".ci" / "budget.py", folder / ".ci")
    subprocess.run("git init -q && git add -A", shell=True, cwd=folder, check=True, timeout=TIMEOUT_S)
    command = [sys.executable, ".ci/budget.py", *asked]
    result = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert not result.stderr
    return result.returncode, result.stdout.splitlines()


def test_figures_are_those_of_the_files_that_git_knows(tmp_path: Path, root: Path) -> None:
    code, told = budget(tmp_path, root, "")
    assert code == 0
    figures = {line[:44].strip(): int(line[44:53].replace(",", "")) for line in told}
    assert {name: figures[name] for name in COUNTED} == COUNTED


def test_a_figure_says_what_it_counts(tmp_path: Path, root: Path) -> None:
    assert budget(tmp_path, root, "", "class names that stand twice") == (0, ["Batch"])


@pytest.mark.parametrize(
    ("most", "said"),
    [
        ('"error classes" = 2', ""),
        ('"error classes" = 1', "error classes: 1 more than 1"),
        ('"kinds of errors" = 2', "kinds of errors stands in the budget, and is not measured"),
    ],
)
def test_the_budget_is_kept_or_the_last_line_says_by_what_not(most: str, said: str, tmp_path: Path, root: Path) -> None:
    code, told = budget(tmp_path, root, most)
    assert code == (1 if said else 0)
    assert told[-1] == f"FAILED .ci/budget.toml: {said}" or not said
