"""`make docs` builds, with every warning an error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
for package in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
    pytest.importorskip(package, reason=f"{package} is not installed; `make docs` installs the extra docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built as `make docs` does, but elsewhere."""
    recipe = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "-m sphinx" in line)
    folder = tmp_path_factory.mktemp("docs")
    arguments = recipe.split("-m sphinx ")[1].replace("docs/_build/html", f"{folder}/html").split()
    assert {"-W", "--keep-going", "-n"} <= set(arguments)
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *arguments, "-d", f"{folder}/doctrees"],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-4000:]
    return folder / "html"


def test_every_page_is_built(site: Path) -> None:
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts]
    assert len(pages) > 20
    assert [page for page in pages if not (site / page.with_suffix(".html")).exists()] == []


def test_generated_parts_are_in_their_pages(site: Path) -> None:
    assert 'id="sampling.num_envs"' in (site / "reference" / "configuration.html").read_text()
    assert "headrace keys init" in (site / "reference" / "commands.html").read_text()
    assert "EpisodeStream" in (site / "reference" / "python-api.html").read_text()
    assert "GET" in (site / "reference" / "protocol.html").read_text()


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:)?//', page.read_text())
        assert loaded == [], page
