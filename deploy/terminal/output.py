"""Output options that every command has: how much it prints, and in what form."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from enum import StrEnum

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


def chosen_output() -> Output:
    """Return the output options of this process's command line."""
    return _chosen


def wants_tracebacks() -> bool:
    """Return whether expected errors are shown with their tracebacks."""
    return _chosen.verbose or bool(os.environ.get("HEADRACE_DEBUG"))


def choose_output(*, verbose: bool, quiet: bool, log_format: LogFormat, no_color: bool) -> None:
    """Choose the output of this process; `no_color` also for its children. Raises `typer.BadParameter`."""
    global _chosen
    if no_color:
        os.environ["NO_COLOR"] = "1"  # rich reads it, in this process and in its children
    if verbose and quiet:
        raise typer.BadParameter("give --verbose or --quiet, not both")
    _chosen = Output(verbose, quiet, log_format)
