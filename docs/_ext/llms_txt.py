"""Writes `llms.txt` beside the pages: what the project is, and each page with its address, by group."""

from __future__ import annotations

from pathlib import Path

from sphinx.addnodes import toctree
from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the file with Sphinx."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}


def write(app: Sphinx, error: Exception | None) -> None:
    """Write the file, for builds of HTML that succeeded."""
    if error is not None or app.builder.name != "html":
        return
    index = app.env.get_doctree("index")
    summary = (
        next(index.findall(lambda node: node.tagname == "paragraph"))
        .astext()
        .replace("\n", " ")
    )
    lines = [f"# {app.config.project}", "", f"> {summary}"]
    for group in index.findall(toctree):
        lines += ["", f"## {group['caption']}", ""]
        pages = [page for _, page in group["entries"]]
        lines += [
            f"- [{app.env.titles[page].astext()}]({app.builder.get_target_uri(page)})"
            for page in pages
        ]
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
