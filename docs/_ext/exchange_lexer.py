"""Colours the examples of the protocol page: a request or an answer a line, with JSON in it."""

from __future__ import annotations

from typing import Any, ClassVar

from pygments.lexer import RegexLexer
from pygments.token import Keyword, Name, Number, Punctuation, String, Text

_LANGUAGES = ("http", "zmq", "http-agents", "zmq-agents")


class ExchangeLexer(RegexLexer):
    """`PUT /v1/... {"observation": [1.0]}` and what is answered."""

    name = "Headrace exchange"
    tokens: ClassVar[dict[str, list[tuple[str, Any]]]] = {
        "root": [
            (r"^[A-Z_]+|^\d{3}", Keyword),
            (r"/[^\s]*", Name),
            (r'"[^"]*"(?=:)', Name.Tag),
            (r'"[^"]*"', String),
            (r"-?\d+(\.\d+)?", Number),
            (r"[{}\[\],:=]", Punctuation),
            (r".|\n", Text),
        ]
    }


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""
    for language in _LANGUAGES:
        app.add_lexer(language, ExchangeLexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
