"""Fills pages with what is generated from the code: settings from the schema, commands from the command line itself.

A page says where by a line of its own: `<!-- generated: settings -->`.
"""

from __future__ import annotations

import re
from typing import Any

from command_reference import commands_as_markdown
from exit_codes import exit_codes_as_markdown
from redis_reference import redis_keys_as_markdown
from settings_reference import runner_arguments_as_markdown, settings_as_markdown

_PARTS = {
    "settings": settings_as_markdown,
    "commands": commands_as_markdown,
    "runner arguments": runner_arguments_as_markdown,
    "exit codes": exit_codes_as_markdown,
    "redis keys": redis_keys_as_markdown,
}
_PLACE = re.compile(r"^<!-- generated: (?P<what>[a-z ]+) -->$", re.MULTILINE)


def fill(text: str) -> str:
    """Return the text of a page with its generated parts. Raises `KeyError` for a part that does not exist."""
    return _PLACE.sub(lambda place: _PARTS[place["what"]](), text)


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""

    def on_source_read(_app: Any, _name: str, source: list[str]) -> None:
        source[0] = fill(source[0])

    app.connect("source-read", on_source_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
