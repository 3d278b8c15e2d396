"""Builds the loggers that a config names, each with its thread."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from headrace.deploy.loggers.logger_thread import LoggerThread
from headrace.deploy.loggers.protocol import Logger, RunInfo
from headrace.deploy.loggers.row_files import CsvFile, FileLogger, JsonlFile
from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.errors import ConfigError, words_of
from headrace.schemas.settings.config import LoggingSection
from headrace.schemas.settings.plugins import load_object

log = logging.getLogger("headrace.supervisor")

BUILT_IN = {"tensorboard": "TensorBoardLogger", "wandb": "WandbLogger", "mlflow": "MlflowLogger"}
"""Setting, which is also the name of the extra and of the package -> class in `{setting}_logger.py`."""


def open_loggers(section: LoggingSection, run: RunInfo, columns: Iterable[str]) -> list[LoggerThread]:
    """Build the loggers of both files, and those that `section` names, each with its thread.

    Raises `ConfigError` for a logger that cannot be built.
    """
    builders = [(name, _load_built_in(name)) for name in BUILT_IN if getattr(section, name)]
    builders += [(path, load_object(path, "logging.loggers")) for path in section.loggers]
    built: list[tuple[str, Logger]] = []
    try:
        for name, build in builders:
            built.append((name, _build(name, build, run)))
    except ConfigError:
        for _, logger in built:
            with suppress(Exception):  # the first error is the one to raise
                logger.close()
        raise
    files = [(file.path.name, FileLogger(file)) for file in open_files(run.run_dir, columns)]
    return [LoggerThread(name, logger) for name, logger in (*files, *built)]


def open_files(run_dir: Path, columns: Iterable[str]) -> tuple[JsonlFile, CsvFile]:
    """Return `metrics.jsonl` and `metrics.csv`, with the same rows in both unless the disk is full."""
    rows, table = JsonlFile(run_dir / "metrics.jsonl"), CsvFile(run_dir / "metrics.csv", columns)
    try:
        table.catch_up(rows)
    except OSError as error:
        log.error("%s cannot be compared with %s (%s)", table.path, rows.path, error.strerror or error)
    return rows, table


def _load_built_in(name: str) -> Callable[[RunInfo], Logger]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        advice = f"install it (pip install 'headrace[{name}]'), or leave --{name} out"
        raise ConfigError(
            f"the package {name} cannot be imported ({error}); {advice}", key=f"logging.{name}"
        ) from error
    module = importlib.import_module(f"headrace.deploy.loggers.{name}_logger")
    found: Callable[[RunInfo], Logger] = getattr(module, BUILT_IN[name])
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
