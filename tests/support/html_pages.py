"""Pages as a browser would read them."""

from __future__ import annotations

import base64
import hashlib
from html.parser import HTMLParser


class Page(HTMLParser):
    """What a browser would make of a page: its elements, its texts, and tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.style = ""
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

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def assert_needs_nothing(page: Page) -> None:
    """The page is whole, runs nothing, loads nothing, and its policy allows its own style alone."""
    assert page.open == []
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "link", "img", "iframe", "object", "base", "a"})
    names = {name for _, attributes in page.elements for name in attributes}
    assert [name for name in names if name.startswith("on") or name in ("style", "src", "href")] == []
    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    policy = next(one["content"] for one in page.named("meta") if "http-equiv" in one)
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    for svg in page.named("svg"):
        assert svg.get("aria-label") or svg.get("aria-hidden"), "a drawing that a screen reader cannot name"
