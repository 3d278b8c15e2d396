"""Makes reStructuredText of our docstrings: plain text with `names` in backticks, lists by dashes, indented drawings.

Whatever reStructuredText would read as markup is escaped, so that a docstring never breaks the build.
In signatures arrays are `NDArray`s again, as the code has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_CODE = re.compile(r"`([^`]+)`")
_MARKUP = re.compile(r"([*|_\\])")
_ARRAY = re.compile(
    r"~?(?:numpy\.)?ndarray\[tuple\[~?(?:typing\.)?Any, \.\.\.\], ~?(?:numpy\.)?dtype\[(~?[\w.]+)\]\]"
)


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
    """Yield a paragraph with code in double backticks; a dash begins an item, whose further lines are indented."""
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


def _with_arrays(signature: str | None) -> str | None:
    return None if signature is None else _ARRAY.sub(r"NDArray[\1]", signature)


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""

    def on_docstring(
        _app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]
    ) -> None:
        lines[:] = to_rst(lines)

    def on_signature(
        _app: Any,
        _what: str,
        _name: str,
        _object: Any,
        _options: Any,
        arguments: str | None,
        returns: str | None,
    ) -> tuple[str | None, str | None]:
        return _with_arrays(arguments), _with_arrays(returns)

    app.connect("autodoc-process-docstring", on_docstring)
    app.connect("autodoc-process-signature", on_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
