"""Builds the loggers of a config, each with a thread: a slow one holds up neither the supervisor nor another."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from headrace.deploy.loggers import Logger, Row, RunInfo
from headrace.deploy.loggers.row_files import FileLogger, JsonlFile
from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.errors import ConfigError, words_of
from headrace.schemas.settings.config import LoggingSection
from headrace.schemas.settings.plugins import check_package, load_object

log = logging.getLogger("headrace.supervisor")

MOST_WAITING = 1000
"""Most rows that may wait for a slow logger. Beyond it the oldest are dropped."""
BUILT_IN = {"tensorboard": "TensorBoardLogger", "wandb": "WandbLogger", "mlflow": "MlflowLogger"}
"""Name in `logging.loggers`, which is also that of the extra and of the package -> class in `{name}_logger.py`."""


class LoggerThread:
    """Calls one logger from a thread of its own. `offer` never waits and never raises."""

    def __init__(self, name: str, logger: Logger) -> None:
        self.name = name
        self._logger = logger
        self._rows: deque[tuple[Row, int]] = deque(maxlen=MOST_WAITING)
        self._news = threading.Condition()
        self._closing = False
        self._failed = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def offer(self, row: Row, step: int) -> None:
        """Hand over a row."""
        with self._news:
            if self._failed:
                return
            if len(self._rows) == MOST_WAITING:
                self._dropped += 1
                if self._dropped == 1:
                    log.warning("logger %s is too slow: its oldest rows are dropped from now on", self.name)
            self._rows.append((row, step))
            self._news.notify()

    def begin_close(self) -> None:
        """Let the thread log what is left, close the logger and end."""
        with self._news:
            self._closing = True
            self._news.notify()

    def finish_close(self, deadline_s: float) -> None:
        """Wait for the end, `deadline_s` at most. Rows not logged by then are lost; a warning says how many."""
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            log.warning(
                "logger %s did not end within %g s and is abandoned; %d rows were left",
                self.name,
                deadline_s,
                len(self._rows),
            )
        elif self._dropped:
            log.warning("logger %s was too slow: %d rows were dropped", self.name, self._dropped)

    def _run(self) -> None:
        try:
            while (entry := self._next()) is not None:
                self._logger.log(*entry)
            self._logger.close()
        except BaseException as error:  # a user's code, or a package of others
            raise_stop(error)
            with self._news:
                self._failed = True
                self._rows.clear()
            log.error("logger %s failed and is switched off (%s)", self.name, words_of(error), exc_info=error)

    def _next(self) -> tuple[Row, int] | None:
        with self._news:
            self._news.wait_for(lambda: self._rows or self._closing)
            return self._rows.popleft() if self._rows else None


def open_loggers(section: LoggingSection, run: RunInfo) -> list[LoggerThread]:
    """Build the logger of `metrics.jsonl`, and those that `section` names, each with its thread.

    Raises `ConfigError` for a logger that cannot be built.
    """
    builders = [(name, _load(name)) for name in section.loggers]
    built: list[tuple[str, Logger]] = []
    try:
        for name, build in builders:
            built.append((name, _build(name, build, run)))
    except ConfigError:
        for _, logger in built:
            with suppress(Exception):  # the first error is the one to raise
                logger.close()
        raise
    file = JsonlFile(run.run_dir / "metrics.jsonl")
    return [LoggerThread(name, logger) for name, logger in ((file.path.name, FileLogger(file)), *built)]


def _load(name: str) -> Callable[[RunInfo], Logger]:
    if name in BUILT_IN:
        check_package(f"the logger {name}", name, name, key="logging.loggers")
        name = f"headrace.deploy.annexes.loggers.{name}_logger:{BUILT_IN[name]}"
    found: Callable[[RunInfo], Logger] = load_object(name, "logging.loggers")
    return found


def _build(name: str, build: Callable[[RunInfo], Logger], run: RunInfo) -> Logger:
    try:
        logger = build(run)
    except BaseException as error:
        raise_stop(error)
        raise ConfigError(f"logger {name} cannot be built ({words_of(error)})", key="logging") from error
    for method in ("log", "close"):
        if not callable(getattr(logger, method, None)):
            raise ConfigError(
                f"logger {name} has no method {method}; see headrace.deploy.loggers.Logger", key="logging"
            )
    return logger
