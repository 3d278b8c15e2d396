"""Write into pages what is generated from the code: settings from the schema, commands from the command line itself.

    python docs/_ext/generated_pages.py     (`make docs` runs it first)

The generated part stands in the repository, so that it can be read there. A page says where, by two lines of their own:

    <!-- generated: settings -->
    <!-- end of generated -->
"""

from __future__ import annotations

import re
from pathlib import Path

from command_reference import commands_as_markdown
from exit_codes import exit_codes_as_markdown
from redis_reference import redis_keys_as_markdown
from settings_reference import runner_arguments_as_markdown, settings_as_markdown

PARTS = {
    "settings": settings_as_markdown,
    "commands": commands_as_markdown,
    "runner arguments": runner_arguments_as_markdown,
    "exit codes": exit_codes_as_markdown,
    "redis keys": redis_keys_as_markdown,
}
PLACE = re.compile(
    r"^(?P<start><!-- generated: (?P<what>[a-z ]+) -->\n).*?(?P<end>^<!-- end of generated -->$)",
    re.MULTILINE | re.DOTALL,
)


def fill(text: str) -> str:
    """Return the text of a page with its generated parts made anew. Raise `KeyError` for a part that does not exist."""
    return PLACE.sub(
        lambda place: (
            f"{place['start']}\n{PARTS[place['what']]().strip()}\n\n{place['end']}"
        ),
        text,
    )


if __name__ == "__main__":
    for page in Path(__file__).parents[1].rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        if fill(text) != text:
            page.write_text(fill(text), encoding="utf-8")
