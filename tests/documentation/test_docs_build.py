"""`make docs` builds, with every warning an error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import TIMEOUT_S

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
        timeout=TIMEOUT_S,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-4000:]
    return folder / "html"


@pytest.mark.long
@pytest.mark.thorough
def test_every_page_is_built_whole_and_loads_nothing_from_elsewhere(site: Path) -> None:
    """One test, since each of several, run at once, would build all pages for itself."""
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts]
    assert len(pages) > 20
    assert [page for page in pages if not (site / page.with_suffix(".html")).exists()] == []
    for generated, page in {
        'id="sampling.num_envs"': "configuration.html",
        "headrace keys init": "commands.html",
        "EpisodeStream": "python-api.html",
        "GET": "protocol.html",
    }.items():
        assert generated in (site / "reference" / page).read_text()
    listed = re.findall(r"\]\((.*)\)", (site / "llms.txt").read_text())
    assert {page.with_suffix(".html").as_posix() for page in pages} - set(listed) == {"index.html"}
    for built in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:)?//', built.read_text())
        assert loaded == [], built
