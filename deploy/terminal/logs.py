"""Logs: readable lines, or JSON lines for machines, each with role, slot and incarnation."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from headrace.deploy.terminal.output import LogFormat, chosen_output
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.basics.printable import printable

MOST_ALIKE, ALIKE_S = 10, 10.0
MOST_KINDS = 64
_FEW_LETTERS = 4
"""As in "%s: %s", "%d, %s"."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


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
        return printable(f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text)


@dataclass(slots=True)
class _Kind:
    """Warnings with the same words. `last` is the newest one that was left out."""

    began: float
    said: int = 0
    left_out: int = 0
    last: logging.LogRecord | None = None


class RepeatedWarnings:
    """Leaves out warnings that repeat: beyond ten with the same words in ten seconds they are counted.

    `due` returns a line with the count. Warnings with the same format string, before its arguments are filled in, count
    as the same words.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[tuple[str, int, str], _Kind] = {}

    def admit(self, record: logging.LogRecord) -> bool:
        """Return whether to write this record; otherwise count it."""
        if record.levelno < logging.WARNING:
            return True
        words = str(record.msg)
        kind = self._kinds.setdefault(
            (record.name, record.levelno, words if _has_words(words) else record.getMessage()), _Kind(self._clock())
        )
        if kind.said < MOST_ALIKE:
            kind.said += 1
            return True
        kind.left_out, kind.last = kind.left_out + 1, record
        return False

    @property
    def has_left_out(self) -> bool:
        """Return whether `due` has a line to return, now or later."""
        return any(kind.left_out for kind in self._kinds.values())

    def due(self, *, all_kinds: bool = False) -> list[logging.LogRecord]:
        """Return a line for each kind with left-out warnings whose ten seconds are over. Forget kinds that are over.

        `all_kinds`: also kinds whose time is not over.
        """
        now, lines = self._clock(), []
        for key, kind in list(self._kinds.items()):
            if all_kinds or now - kind.began >= ALIKE_S or len(self._kinds) > MOST_KINDS:
                del self._kinds[key]
                if kind.last is not None:
                    text = f"{kind.last.getMessage()} ({kind.left_out:,} like it were left out)"
                    line = {"name": key[0], "levelno": key[1], "levelname": kind.last.levelname, "msg": "%s"}
                    lines.append(logging.makeLogRecord({**line, "args": (text,)}))
        return lines


def _has_words(text: str) -> bool:
    """Return whether a format string has words of its own, and not only placeholders."""
    return sum(character.isalpha() for character in text) > _FEW_LETTERS


class _Stderr(logging.Handler):
    """Writes to the current `sys.stderr`, which a live display replaces by its own stream.

    While warnings are left out, a thread waits to write their count, in case that no other record comes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repeated = RepeatedWarnings()
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, after the lines that count left-out warnings."""
        self._write(self._repeated.due())
        if self._repeated.admit(record):
            self._write([record])
        elif self._timer is None:
            self._start_timer()

    def close(self) -> None:
        """Write the lines that count left-out warnings."""
        if self._timer is not None:
            self._timer.cancel()
        self._write(self._repeated.due(all_kinds=True))
        super().close()

    def _start_timer(self) -> None:
        timer = threading.Timer(ALIKE_S, self._count)
        timer.daemon = True
        with suppress(RuntimeError):  # no thread can start: the next record brings the count
            timer.start()
            self._timer = timer

    def _count(self) -> None:
        self.acquire()
        try:
            self._timer = None
            self._write(self._repeated.due())
            if self._repeated.has_left_out:
                self._start_timer()
        finally:
            self.release()

    def _write(self, records: Iterable[logging.LogRecord]) -> None:
        for record in records:
            say(self.format(record), sys.stderr)


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
