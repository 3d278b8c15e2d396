"""Pages as a browser would read them."""

from __future__ import annotations

import base64
import hashlib
from html.parser import HTMLParser
from typing import Any

import orjson


class Page(HTMLParser):
    """What a browser would make of a page: its elements, its texts, and tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.style = ""
        self.scripts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open and self.open[-1] == "style":
            self.style += data
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def charts_of(page: Page) -> dict[str, Any]:
    """Return the charts of a report as they stand in it for its script."""
    (drawn,) = (text for text in page.scripts if text.startswith("{"))
    return dict(orjson.loads(drawn))


def assert_needs_nothing(page: Page) -> None:
    """The page is whole, loads nothing, and its policy allows its own style and scripts alone."""
    assert page.open == []
    assert {tag for tag, _ in page.elements}.isdisjoint({"link", "img", "iframe", "object", "base", "a"})
    names = {name for _, attributes in page.elements for name in attributes}
    assert [name for name in names if name.startswith("on") or name in ("style", "src", "href")] == []
    policy = next(one["content"] for one in page.named("meta") if "http-equiv" in one)
    is_data = ["type" in script for script in page.named("script")]
    scripts = [digest(script) for script, data in zip(page.scripts, is_data, strict=True) if not data]
    allowed = f"style-src {digest(page.style)}; script-src {' '.join(scripts) or chr(39) + 'none' + chr(39)}"
    assert policy == f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def digest(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
