"""The reference of commands, from the command line itself: what `--help` knows, as a page."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from headrace.deploy.command.cli import app


def commands_as_markdown() -> str:
    """Return a section for each command of `headrace`, sorted as its help sorts them."""
    root = typer.main.get_command(app)
    return "\n".join(
        line for name, command in commands(root) for line in _section(name, command)
    )


def commands(group: Any, prefix: str = "headrace") -> Iterator[tuple[str, Any]]:
    """Yield the full name of each command below `group`, and the command.

    They are click's, whichever copy of click typer brings along.
    """
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def _section(name: str, command: Any) -> Iterator[str]:
    yield from (f"## {name}", "", inspect.cleandoc(command.help or ""), "")
    context = command.context_class(command, info_name=name)
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:
            option, meaning = record
            yield f"- `{option}`: {meaning}"
    yield ""
    if command.epilog:
        lines = [line.strip() for line in command.epilog.partition("\b\n")[2].splitlines()]
        yield from ("```sh", *lines, "```", "")
