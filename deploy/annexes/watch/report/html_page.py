"""One HTML page that needs nothing else: frame, style, tables and escaped text, for the reports of Headrace.

The page loads nothing. Its content security policy forbids that, and allows only its own style and scripts.
Functions take text and return HTML; names that end in `html` are HTML already.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence

Rows = Sequence[Sequence[str]]

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --dim: #5b6675; --paper: #ffffff; --card: #f5f7fa; --line: #d5dbe3;
--bad: #b00020; --warn: #8a5300; --good: #17692c; --c0: #1f6feb; --c1: #c2570c; --c2: #17803d; --c3: #8a3ffc;
--c4: #b3123f; --c5: #0b7285; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9f0; --dim: #9aa6b5; --paper: #10151c; --card: #19212b;
--line: #323d4b; --bad: #ff8a92; --warn: #f2b24c; --good: #6cd58a; --c0: #6ab0ff; --c1: #ff9d5c; --c2: #5fd38a;
--c3: #c19bff; --c4: #ff86a3; --c5: #5cc8dc; } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1rem; color: var(--ink);
background: var(--paper) }
h1 { font-size: 1.5rem; margin: .5rem 0; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
h3 { font-size: 1rem; margin: 0; font-weight: 600 } p { margin: .4rem 0; overflow-wrap: anywhere } .dim, figcaption,
caption { color: var(--dim) }
.bad { color: var(--bad) } .warn { color: var(--warn) } .good { color: var(--good) } .verdict { font-size: 1.15rem }
.scroll { overflow-x: auto; margin: .6rem 0 } .scroll:focus-visible, summary:focus-visible, a:focus-visible {
outline: 2px solid var(--c0); outline-offset: 2px }
table { border-collapse: collapse } caption { text-align: left; padding: .2rem 0 }
td, th { padding: .2rem .9rem .2rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
overflow-wrap: break-word } th { font-weight: 600; color: var(--dim) } td.n, th.n { text-align: right;
font-variant-numeric: tabular-nums; white-space: nowrap }
code, pre { background: var(--card); font: 13px/1.5 ui-monospace, monospace } code { padding: .1rem .3rem;
overflow-wrap: anywhere } pre { padding: .6rem; overflow-x: auto }
details { margin: .4rem 0 } summary { cursor: pointer; color: var(--dim) }
ul.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: .6rem; padding: 0;
list-style: none } ul.tiles li { background: var(--card); border-radius: 6px; padding: .5rem .8rem; min-width: 0 }
ul.tiles b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
@media (max-width: 40rem) { body { padding: .6rem } table { font-size: .85rem } td, th { padding-right: .5rem } }
@media print { body { max-width: none } ul.tiles li { border: 1px solid var(--line) } }
"""

_POLICY = "default-src 'none'; style-src {}; script-src {}; base-uri 'none'; form-action 'none'"


def page(title: str, parts_html: Iterable[str], style: str = "", scripts: Iterable[str] = ()) -> str:
    """Return a whole page: its title, the parts in their order, then the scripts. `style` is added to the own style."""
    style, scripts = STYLE + style, list(scripts)
    allowed = " ".join(map(_digest, scripts)) or "'none'"
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY.format(_digest(style), allowed)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(title)}</title><style>{style}</style></head><body><main>",
            *parts_html,
            "</main>",
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        )
    )


def _digest(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def text(value: object) -> str:
    """Return any value as text that is no markup. A lone surrogate, which UTF-8 lacks, becomes "?"."""
    return html.escape(str(value).encode(errors="replace").decode())


def paragraph(value: object, kind: str = "") -> str:
    """Return a paragraph. `kind` is one of the style's classes: bad, warn, good, dim, verdict."""
    return f'<p class="{kind}">{text(value)}</p>' if kind else f"<p>{text(value)}</p>"


def table(title: str, columns: Sequence[str], rows: Rows, words: int = 1) -> str:
    """Return a table that scrolls by itself where it is too wide. The first `words` columns are text, others numbers.

    It can be reached and scrolled by keyboard.
    """
    kinds = ["" if number < words else ' class="n"' for number in range(len(columns))]
    head = "".join(f'<th scope="col"{kind}>{text(column)}</th>' for kind, column in zip(kinds, columns, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{text(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(title)}"><table><caption>{text(title)}'
        f"</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def folded(summary: str, inner_html: str) -> str:
    """Return a part that opens when its summary is clicked."""
    return f"<details><summary>{text(summary)}</summary>{inner_html}</details>"


def tiles(facts: Iterable[tuple[str, str]]) -> str:
    """Return (name, value) pairs as tiles beside one another."""
    inner = "".join(f'<li><span class="dim">{text(name)}</span><b>{text(value)}</b></li>' for name, value in facts)
    return f'<ul class="tiles">{inner}</ul>'
