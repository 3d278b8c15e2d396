"""Makes reStructuredText of our docstrings: plain text with `names` in backticks, lists by dashes, indented drawings.

Whatever reStructuredText would read as markup is escaped, so that a docstring never breaks the build.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_CODE = re.compile(r"`([^`]+)`")
_MARKUP = re.compile(r"([*|_\\])")


def to_rst(lines: list[str]) -> list[str]:
    """Return the lines of a docstring as reStructuredText."""
    return list(_blocks(lines))


def _blocks(lines: list[str]) -> Iterator[str]:
    text = "\n".join(lines).strip("\n")
    for paragraph in re.split(r"\n\s*\n", text):
        if re.match(r" {4,}", paragraph):
            yield from ("::", "", *paragraph.splitlines(), "")
        else:
            yield from (*_prose(paragraph), "")


def _prose(paragraph: str) -> Iterator[str]:
    """A paragraph with code in double backticks; a dash begins an item, and what follows it is indented."""
    inside = False
    escaped = _with_code(paragraph)
    for line in escaped.splitlines():
        if line.startswith("- "):
            yield from (("",) if not inside else ())
            inside = True
        yield line.strip() if not inside or line.startswith("- ") else f"  {line.strip()}"


def _with_code(text: str) -> str:
    parts = _CODE.split(text)
    plain, code = parts[::2], parts[1::2]
    result = _escape(plain[0])
    for span, rest in zip(code, plain[1:], strict=True):
        glued = rest[:1].isalnum()
        result += f"``{' '.join(span.split())}``" + ("\\ " if glued else "") + _escape(rest)
    return result


def _escape(text: str) -> str:
    return _MARKUP.sub(r"\\\1", text)


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""

    def on_docstring(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
        lines[:] = to_rst(lines)

    app.connect("autodoc-process-docstring", on_docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
