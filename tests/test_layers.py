"""The layer rule: schemas below all, workers, broker and learner apart, deploy above; and light imports stay light."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


def _lint(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(LINT_IMPORTS), "--config", str(config), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_code_keeps_all_import_contracts(root: Path, tmp_path: Path) -> None:
    result = _lint(root / "pyproject.toml", tmp_path)
    assert result.returncode == 0, result.stdout[-3000:]
    assert "0 broken" in result.stdout


def test_lint_imports_finds_a_forbidden_import(root: Path, tmp_path: Path) -> None:
    """The same contracts over a copy of the code, under another name, in which the broker imports a worker."""
    packages = ("schemas", "broker", "workers", "learner_stub", "deploy")
    for name in packages:
        shutil.copytree(root / name, tmp_path / "copied" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "copied" / "__init__.py").touch()
    (tmp_path / "copied" / "broker" / "bad.py").write_text("import copied.workers\nimport torch\n")
    for file in (tmp_path / "copied").rglob("*.py"):
        file.write_text(file.read_text().replace("headrace.", "copied."))
    config = tmp_path / "pyproject.toml"
    contracts = (root / "pyproject.toml").read_text().replace("headrace.", "copied.")
    config.write_text(contracts.replace('root_packages = ["headrace"]', 'root_packages = ["copied"]'))
    result = _lint(config, tmp_path)
    assert result.returncode == 1, result.stdout[-3000:] + result.stderr[-2000:]
    assert "copied.broker.bad -> copied.workers" in result.stdout
    assert "copied.broker.bad -> torch" in result.stdout


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("headrace.schemas.chunks.batch", {"torch", "gymnasium", "zmq", "redis"}),
        ("headrace.schemas.settings.config", {"torch", "gymnasium", "zmq", "redis"}),
        ("headrace.broker.process", {"torch", "gymnasium"}),
        ("headrace.learner_stub", {"gymnasium"}),
        ("headrace.deploy.command.cli", {"torch", "gymnasium"}),
        ("headrace.workers.serving.client", {"torch", "gymnasium"}),
    ],
)
def test_light_modules_do_not_load_heavy_packages(module: str, heavy: set[str]) -> None:
    """As a process sees it: also imports inside of functions that run at import time, and those of dependencies."""
    code = f"import sys, {module}; print(*sorted({sorted(heavy)!r} & sys.modules.keys()))".replace("[", "{").replace(
        "]", "}"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
