"""The code blocks of a page, and the marks that stand before them as HTML comments.

    <!-- shown only: REASON -->          the next block is not run
    <!-- background until: PATH -->      the next shell block is one command, left running once PATH exists
    <!-- given: NAME ... -->             the next block finds these names, which `stand_ins.py` makes
    <!-- ports: NUMBER ... -->           anywhere: free ports take the place of these numbers in all blocks

A Python block whose first line is "# name.py" is a file of that name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

RUN = ("python", "sh", "toml", "json")
"""Languages of blocks that a test runs, or reads as what they are."""
_MARK = re.compile(r"<!--\s*([a-z ]+?):\s*(.*?)\s*-->", re.DOTALL)
_GENERATED = re.compile(r"^<!-- generated: .*?^<!-- end of generated -->$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is that of its first line of code, from 1."""

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str | None:
        """The name of the file that a Python block is."""
        found = _FILE.match(self.text) if self.language == "python" else None
        return found[1] if found else None

    @property
    def is_run(self) -> bool:
        return self.language in RUN and "shown only" not in self.marks

    def fault(self) -> str | None:
        """Return the fault of the block, or None if it is run or says why not."""
        unknown = self.marks.keys() - {"shown only", "background until", "given"}
        if unknown:
            return f"{self.page.name}:{self.line}: unknown mark {sorted(unknown)}"
        if self.is_run or len(self.marks.get("shown only", "").split()) > 1:
            return None
        return (
            f"{self.page.name}:{self.line}: {self.language or 'a'} block is not run; say why: <!-- shown only: ... -->"
        )


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, without those of Sphinx's own directives and those of its generated parts."""
    marks: dict[str, str] = {}
    found = []
    for token in MarkdownIt("commonmark").parse(written(page)):
        if token.type == "html_block":
            marks.update(_MARK.findall(token.content))
            continue
        if token.type == "fence" and not token.info.startswith("{"):
            assert token.map
            found.append(Block(page, token.map[0] + 2, token.info.strip(), token.content, _own(marks)))
        if token.nesting <= 0:
            marks = {}
    return found


def written(page: Path) -> str:
    """Return the text of a page with empty lines in the place of its generated parts."""
    return _GENERATED.sub(lambda part: "\n" * part[0].count("\n"), page.read_text(encoding="utf-8"))


def ports_of(page: Path) -> list[str]:
    """Return the numbers that stand for free ports on this page."""
    return [number for key, value in _MARK.findall(page.read_text()) if key == "ports" for number in value.split()]


def _own(marks: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in marks.items() if key != "ports"}


class Page:
    """The commands and blocks of a page, for tests that run some of them elsewhere."""

    def __init__(self, path: Path) -> None:
        self._blocks, self._text = blocks_of(path), path.read_text()

    def line(self, start: str) -> str:
        """Return the page's command that begins so, in a block or within a sentence, without its comment."""
        [found] = {
            line.partition(" #")[0].strip() for line in re.findall(rf"^{start}.*$|(?<=`){start}[^`]*", self._text, re.M)
        }
        return found

    def block_with(self, start: str) -> str:
        """Return the text of the only block that has a line which begins so."""
        [found] = [block.text for block in self._blocks if f"\n{start}" in f"\n{block.text}"]
        return found

    def block(self, language: str) -> str:
        """Return the text of the only block in this language."""
        [found] = [block.text for block in self._blocks if block.language == language]
        return found
