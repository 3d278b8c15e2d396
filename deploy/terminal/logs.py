"""Logs: readable lines, or JSON lines for machines, each with role, slot and incarnation; and how much is printed."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import orjson
import typer

from headrace.deploy.terminal.std_streams import say

MOST_ALIKE, ALIKE_S = 10, 10.0
MOST_KINDS = 64
_FEW_LETTERS = 4
"""As in "%s: %s", "%d, %s"."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


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


@dataclass(frozen=True)
class Identity:
    """The process that writes the log."""

    fleet: str
    role: str
    slot: int | None = None
    incarnation: int | None = None


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object a line; `extra=` fields of a record become fields of the object."""

    def __init__(self, identity: Identity) -> None:
        super().__init__()
        self._identity = asdict(identity)

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line."""
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            **self._identity,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=repr, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()


def message_of(line: str) -> str:
    """Return the message of a line by `JsonLines`; any other line as it is."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return line
    return str(record["message"]) if isinstance(record, dict) and "message" in record else line


class Readable(logging.Formatter):
    """Formats a record as `12:03:55 worker 1.3 WARNING env 3 failed ...`."""

    def __init__(self, identity: Identity) -> None:
        super().__init__()
        place = "" if identity.slot is None else f" {identity.slot}"
        life = "" if identity.incarnation is None else f".{identity.incarnation}"
        self._who = f"{identity.role}{place}{life}"

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line, with its traceback below it if it has one."""
        level = "" if record.levelno == logging.INFO else f" {record.levelname}"
        text = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {self._who}{level} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


@dataclass(slots=True)
class _Kind:
    """Warnings with the same words."""

    began: float
    said: int = 0
    left_out: int = 0


class RepeatedWarnings:
    """Leaves out warnings that repeat, beyond ten with the same words in ten seconds.

    The tenth line says so, and the next line after the ten seconds has the count. Warnings with the same format string,
    before its arguments are filled in, count as the same words.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[tuple[str, int, str], _Kind] = {}

    def admit(self, record: logging.LogRecord) -> logging.LogRecord | None:
        """Return the record to write, with a remark on those left out. Return None to leave this one out."""
        if record.levelno < logging.WARNING:
            return record
        words, now = str(record.msg), self._clock()
        has_words = sum(character.isalpha() for character in words) > _FEW_LETTERS  # and not only placeholders
        key = record.name, record.levelno, words if has_words else record.getMessage()
        kind, remark = self._kinds.get(key), ""
        if kind is None or now - kind.began >= ALIKE_S:
            if kind is not None and kind.left_out:
                remark = f"{kind.left_out:,} like it were left out"
            self._kinds.pop(key, None)
            while len(self._kinds) >= MOST_KINDS:
                del self._kinds[next(iter(self._kinds))]  # the oldest
            kind = self._kinds[key] = _Kind(now)
        if kind.said >= MOST_ALIKE:
            kind.left_out += 1
            return None
        kind.said += 1
        if kind.said == MOST_ALIKE:
            remark = f"more like it are left out for up to {ALIKE_S:g} s"
        if not remark:
            return record
        told = copy(record)
        told.msg, told.args = "%s (%s)", (record.getMessage(), remark)
        return told


class _Stderr(logging.Handler):
    """Writes to the current `sys.stderr`, which a live display replaces by its own stream."""

    def __init__(self) -> None:
        super().__init__()
        self._repeated = RepeatedWarnings()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, unless it repeats."""
        told = self._repeated.admit(record)
        if told is not None:
            say(self.format(told), sys.stderr)


class _File(logging.FileHandler):
    """Writes to a file of the run directory. Lines that cannot be written (full disk) are only on stderr."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line, without the traceback that logging would print."""


def say_on_stderr(logger: str, level: int, message: str) -> None:
    """Log on stderr alone. No lock is taken that a thread may hold whose write to a file waits for the disk."""
    record = logging.makeLogRecord({"name": logger, "levelno": level, "levelname": logging.getLevelName(level)})
    record.msg = message
    for handler in logging.getLogger("headrace").handlers:
        if isinstance(handler, _Stderr):
            handler.handle(record)


def set_up_logging(identity: Identity, *, file: Path | None = None) -> None:
    """Send the records of all `headrace` loggers to stderr, and as JSON lines to `file` as well if one is named.

    The command line chooses level and form of what goes to stderr. The file gets all records of that level, and INFO.
    """
    output = chosen_output()
    logger = logging.getLogger("headrace")
    logger.setLevel(min(output.level, logging.INFO))
    logger.propagate = False
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    stderr = _Stderr()
    stderr.setLevel(output.level)
    stderr.setFormatter(JsonLines(identity) if output.log_format is LogFormat.JSON else Readable(identity))
    logger.addHandler(stderr)
    if file is not None:
        to_file = _File(file, delay=True)
        to_file.setFormatter(JsonLines(identity))
        logger.addHandler(to_file)
