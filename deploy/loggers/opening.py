"""Builds the loggers that a config names, each with its thread."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from contextlib import suppress

from headrace.deploy.loggers import Logger, RunInfo
from headrace.deploy.loggers.logger_thread import LoggerThread
from headrace.deploy.loggers.row_files import FileLogger, JsonlFile
from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.errors import ConfigError, words_of
from headrace.schemas.settings.config import LoggingSection
from headrace.schemas.settings.plugins import load_object

log = logging.getLogger("headrace.supervisor")

BUILT_IN = {"tensorboard": "TensorBoardLogger", "wandb": "WandbLogger", "mlflow": "MlflowLogger"}
"""Name in `logging.loggers`, which is also that of the extra and of the package -> class in `{name}_logger.py`."""


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
    found: Callable[[RunInfo], Logger]
    if name not in BUILT_IN:
        found = load_object(name, "logging.loggers")
        return found
    try:
        importlib.import_module(name)
    except ImportError as error:
        advice = f"install it (pip install 'headrace[{name}]'), or leave {name} out"
        raise ConfigError(
            f"the package {name} cannot be imported ({error}); {advice}", key="logging.loggers"
        ) from error
    module = importlib.import_module(f"headrace.deploy.annexes.loggers.{name}_logger")
    found = getattr(module, BUILT_IN[name])
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
