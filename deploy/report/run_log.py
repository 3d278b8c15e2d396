"""The log of a run: makes its rows during the run and hands them to all loggers. Waits only at the end."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from headrace.deploy.loggers import Row, RunInfo
from headrace.deploy.loggers.logger_thread import open_loggers
from headrace.deploy.loggers.row_files import JsonlFile
from headrace.deploy.report.run_rows import evaluation_row, fleet_row, learner_row
from headrace.deploy.run.redis_view import LearnerRowView, Snapshot
from headrace.schemas.settings.config import FleetConfig

log = logging.getLogger("headrace.supervisor")

CLOSE_S = 10.0
HURRIED_CLOSE_S = 1.0


class RunLog:
    """Rows of one `headrace up`, within `with`. Raises `ConfigError` for a logger that cannot be built.

    Leaves out rows of learners that an earlier run in the directory has already logged.
    """

    def __init__(self, config: FleetConfig, fleet_id: str, run_dir: Path) -> None:
        run = RunInfo(fleet_id, run_dir, config.model_dump(mode="json", exclude={"redis": {"url"}}))
        self._interval_s = config.logging.interval_s
        self._began, self._began_unix_s = time.monotonic(), time.time()
        self._next_fleet_row = 0.0
        self._logged_report = self._began_unix_s
        """Unix time (s) of the last broker report that was logged. Reports from before this run count as logged."""
        self._gauges: Mapping[str, float] = {}
        """The gauges of the fleet's last row."""
        self._newest = _newest_learner_row(JsonlFile(run_dir / "metrics.jsonl"))
        self.close_s = CLOSE_S
        """Seconds that all loggers together may take to end."""
        self._loggers = open_loggers(config.logging, run)

    def observe(
        self,
        snapshot: Snapshot | None,
        restarts: Mapping[str, int],
        learner_rows: Iterable[LearnerRowView],
        evaluations: Iterable[Mapping[str, Any]] = (),
        *,
        last: bool = False,
    ) -> None:
        """Log all new rows of the learner, all evaluations, and one row of the fleet if it is time, or the last one.

        Each report of the broker is logged once. While the broker or Redis is away, there is no new report to log.
        """
        for view in learner_rows:
            if view.identity > self._newest:
                self._newest = view.identity
                if view.values:
                    self._offer(learner_row(view, self._began_unix_s))
        for told in evaluations:
            self._offer(evaluation_row(told, snapshot, self._began_unix_s))
        now = time.monotonic()
        if snapshot is None or snapshot.reported_unix_s is None or not (last or now >= self._next_fleet_row):
            return
        reported, logged = snapshot.reported_unix_s, self._logged_report
        if reported > logged or (reported != logged and logged > time.time()):  # the clock may have been set back
            self._logged_report = reported
            self._next_fleet_row = now + self._interval_s
            self._offer(fleet_row(snapshot, restarts, time.time(), now - self._began, self._gauges))
            self._gauges = snapshot.gauges

    def _offer(self, row: Row) -> None:
        step = int(row["env_steps"])
        for logger in self._loggers:
            logger.offer(row, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close all loggers. Waits `close_s` seconds at most, and names those that take longer."""
        for logger in self._loggers:
            logger.begin_close()
        deadline = time.monotonic() + self.close_s
        for logger in self._loggers:
            logger.finish_close(max(0.0, deadline - time.monotonic()))


def _newest_learner_row(file: JsonlFile) -> tuple[int, int]:
    """Return (epoch, number) of the last row of a learner in the file; (0, 0) without one."""
    try:
        newest = deque(file.rows(b'"learner_row":'), maxlen=1)
        epoch, _, number = str(newest[0]["learner_row"] if newest else "0-0").partition("-")
        return int(epoch), int(number)
    except (OSError, ValueError, KeyError):
        log.warning("%s: its last row of a learner cannot be read; rows may come twice", file.path)
        return (0, 0)
