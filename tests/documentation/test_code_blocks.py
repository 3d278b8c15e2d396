"""Every code block of the README and of the documentation is run, or says why it is only shown."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from documentation.blocks import blocks_of, ports_of, written
from documentation.story import Story

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page.relative_to(ROOT)
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if "_build" not in page.relative_to(ROOT).parts
)
RUN = [page for page in PAGES if any(block.is_run for block in blocks_of(ROOT / page))]
FIRST = "README.md"
"""The only page among those that start processes that `make test` runs: a new user reads it first."""


def _marks(page: Path) -> list[pytest.MarkDecorator]:
    if not any(block.is_run and block.language == "sh" for block in blocks_of(ROOT / page)):
        return []
    return [pytest.mark.slow] if str(page) == FIRST else [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    assert [fault for block in blocks_of(ROOT / page) if (fault := block.fault())] == []


@pytest.mark.parametrize("page", [pytest.param(page, marks=_marks(page), id=str(page)) for page in RUN])
def test_the_blocks_of_a_page_run_in_their_order(page: Path, tmp_path: Path) -> None:
    with Story(tmp_path, ports_of(ROOT / page)) as story:
        for block in blocks_of(ROOT / page):
            if block.is_run:
                story.run(block)


def test_a_block_that_is_not_run_needs_a_reason(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```text\nno mark\n```\n\n<!-- shown only: needs two machines -->\n```sh\nssh HOST\n```\n\n"
        "<!-- shown only: x -->\n```c\nint x;\n```\n\n<!-- shown always: needs a robot -->\n```python\nmove()\n```\n"
    )
    assert not blocks_of(page)[1].is_run
    faults = [block.fault() for block in blocks_of(page)]
    assert [fault is not None for fault in faults] == [True, False, True, True]
    assert faults[0] is not None
    assert faults[0].startswith("page.md:2:")


def test_a_block_that_fails_fails_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n\n```sh\nfalse\n```\n")
    with Story(tmp_path, []) as story:
        first, second, third = blocks_of(page)
        story.run(first)
        with pytest.raises(AssertionError):
            story.run(second)
        with pytest.raises(AssertionError, match=r"page\.md:10"):
            story.run(third)


def test_no_page_installs_headrace_from_an_index_that_does_not_have_it() -> None:
    pages = {page: written(ROOT / page) for page in PAGES if str(page) != "CHANGELOG.md"}
    assert [
        str(page) for page, text in pages.items() if re.search(r"pip install [^`\n]*\bheadrace(\[|\s|`)", text)
    ] == []
    first = blocks_of(ROOT / FIRST)[0].text.splitlines()
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    assert first[0] == f"git clone {source} && cd headrace"
    assert first[1].startswith("make run ")
