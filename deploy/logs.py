"""Logs: readable lines, or JSON lines for machines, each with role, slot and incarnation."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from headrace.deploy.output import LogFormat, chosen_output
from headrace.deploy.std_streams import ignore_closed_reader

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


class _Stderr(logging.Handler):
    """Writes to the current `sys.stderr`, which a live display replaces by its own stream."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        with ignore_closed_reader(sys.stderr):
            print(self.format(record), file=sys.stderr, flush=True)  # noqa: T201


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
        to_file = logging.FileHandler(file, delay=True)
        to_file.setFormatter(JsonLines(identity))
        logger.addHandler(to_file)
