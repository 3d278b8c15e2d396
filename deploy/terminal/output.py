"""Output options that every command has: how much it prints, and in what form."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer


class LogFormat(StrEnum):
    """The form of log lines: text for people, json for machines."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Output:
    """The choice of log level and log format on the command line."""

    verbose: bool = False
    quiet: bool = False
    log_format: LogFormat = LogFormat.TEXT

    @property
    def level(self) -> int:
        """Return the lowest level of log records that are printed."""
        return logging.DEBUG if self.verbose else logging.WARNING if self.quiet else logging.INFO


_chosen = Output()

_Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", "--debug", help="Debug logs, and tracebacks of expected errors.")
]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings, errors and the result.")]
_LogFormat = Annotated[
    LogFormat, typer.Option("--log-format", help="Form of log lines: text to read, or a JSON object a line.")
]
_NoColor = Annotated[bool, typer.Option("--no-color", help="No colors; as if NO_COLOR were set.")]
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "verbose": (_Verbose, False),
    "quiet": (_Quiet, False),
    "log_format": (_LogFormat, LogFormat.TEXT),
    "no_color": (_NoColor, False),
}


def chosen_output() -> Output:
    """Return the output options of this process's command line."""
    return _chosen


def wants_tracebacks() -> bool:
    """Return whether expected errors are shown with their tracebacks."""
    return _chosen.verbose or bool(os.environ.get("HEADRACE_DEBUG"))


def with_output_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of this module to a command. The command's own function does not get them."""

    @wraps(command)
    def run(**given: Any) -> None:
        global _chosen
        own = {name: given.pop(name) for name in _OPTIONS}
        if own.pop("no_color"):
            os.environ["NO_COLOR"] = "1"  # rich reads it, in this process and in its children
        if own["verbose"] and own["quiet"]:
            raise typer.BadParameter("give --verbose or --quiet, not both")
        _chosen = Output(**own)
        command(**given)

    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters.values()
    parameters = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]
    for name, (kind, default) in _OPTIONS.items():
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
