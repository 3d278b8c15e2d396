"""Reports at each interval, the folding of finished lives, and the start from what earlier brokers left."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.broker.batches.broker_observer import BrokerObserver
from headrace.broker.files.books_file import EndedLives
from headrace.broker.files.lifetime_file import Lifetime
from headrace.broker.redis.rows import ReceivedRow
from headrace.broker.reports.group_reports import GroupReports, gauges_of
from headrace.broker.reports.metrics import FleetMetrics
from headrace.broker.reports.reporter import RedisReporter
from headrace.schemas.basics.bounds import Version
from headrace.schemas.errors import DecodeError, machine_error
from headrace.schemas.frames.wire import Buffer, decode
from headrace.schemas.messages import LearnerRow, WeightsHeader
from headrace.schemas.messages.weights import read_weights

log = logging.getLogger(__name__)

_SAVED_WAIT_S = 1.0
"""Seconds that a new broker waits for Redis before it serves. It restores later what Redis tells later."""


class FleetReports(BrokerObserver):
    """Goes on from what earlier brokers left, folds finished lives, and reports.

    - reporter: None without Redis.
    - keep_weights: takes the weights that Redis has.
    - goal: the mean return and the env steps that end the run; None for no such bound.
    """

    def __init__(
        self,
        metrics: FleetMetrics,
        ended: EndedLives,
        lifetime: Lifetime,
        reporter: RedisReporter | None,
        keep_weights: Callable[[WeightsHeader, list[Buffer]], object],
        interval_s: float,
        goal: tuple[float | None, float | None],
    ) -> None:
        self.metrics, self.reporter = metrics, reporter
        self._core = metrics.core
        self._groups = GroupReports(metrics.core)
        self._lifetime = lifetime
        self._keep_weights = keep_weights
        self._interval_s = interval_s
        self._goal = goal
        self._goal_reported = False
        self.tasks: dict[str, str] = {}
        self.saved_tasks = None if reporter is not None else b""
        """The tasks that Redis had, None before it has answered. It gets `tasks`, which are as in `Report`."""
        self._next_report = 0.0
        self._counters_of_ended = ended.counters_of()
        self._core.restore(ended.rows, {}, 0, lifetime.runner_state, ended.folded)
        for name, own in ended.groups.items():
            self._core.groups.restore(name, own.rows, own.folded)
        metrics.continue_from(self._counters_of_ended)
        self._restored = reporter is None or self._restore(_SAVED_WAIT_S)
        metrics.note_start()

    def published(self, version: Version, frames: list[Buffer]) -> None:
        """Hand the weights to the reporter."""
        if self.reporter is not None:
            self.reporter.offer_weights(version, frames)

    def logged(self, rows: Sequence[LearnerRow]) -> None:
        """Hand rows to the reporter. Without Redis they count as stored, since no process reads them."""
        if self.reporter is None:
            self._core.learners.rows_stored = (rows[-1].epoch, rows[-1].number)
        else:
            self.reporter.offer_rows([ReceivedRow(row, time.time(), self._core.store.steps) for row in rows])

    def tick(self, now: float) -> None:
        """Report when that is due, and at once when the goal is reached: the supervisor waits for that report."""
        if not self._goal_reported and self._is_at_goal():
            self._goal_reported, self._next_report = True, now
        if now >= self._next_report:
            self._next_report = now + self._interval_s
            self.report(now)

    def _is_at_goal(self) -> bool:
        mean_return, env_steps = self._goal
        if env_steps is not None and self._core.store.steps >= env_steps:
            return True
        return mean_return is not None and self.metrics.mean_return() >= mean_return

    def close(self, *, in_order: bool) -> None:
        """Report a last time. If the broker stops in order, the report says when, and marks lives with held batches."""
        for source in self._core.sources.values():
            if in_order and source.closed and source.held:
                source.stopped = True
                self._core.store.unreported.add(source.key)
        self.report(time.monotonic(), ended_unix_s=time.time() if in_order else None)
        if self.reporter is not None:
            self.reporter.close(2.0)

    def report(self, now: float, ended_unix_s: float | None = None) -> None:
        """Fold what may fold, and hand the reporter what has changed."""
        core, metrics, reporter = self._core, self.metrics, self.reporter
        self._restored = self._restored or self._restore(0.0)
        if self._restored:
            self._groups.fold(reporter)
        if reporter is None:
            rows = [source.ledger_row() for source in core.take_changed() if source.closed]
            core.folding.stored((row for row in rows if row is not None), durable=False)
        elif self._restored:
            core.folding.stored(reporter.take_closed_rows())
        if self._restored:
            metrics.forget(core.fold(metrics.counters_of))
        if reporter is None:
            return
        groups = self._groups.report(now) if self._restored else None
        blocked = _lacks_descriptors() or core.joins_blocked
        report = replace(metrics.report(now), joins_blocked=blocked, ended_unix_s=ended_unix_s, tasks=self.tasks)
        report = replace(report, groups=groups, gauges={**report.gauges, **gauges_of(groups or {})})
        if not self._restored:  # what runners counted before is not known yet, and must not be written over
            report = replace(report, runner_state={}, metric_sums=None, env_errors=None, tasks={}, task_figures=None)
        reporter.offer(report)
        core.learners.rows_stored = reporter.rows_stored

    def _restore(self, wait_s: float) -> bool:
        """Go on from what Redis remembers. Return whether Redis answered."""
        saved = self.reporter.take_saved(wait_s=wait_s) if self.reporter else None
        if saved is None:
            return False
        core, metrics, self.saved_tasks = self._core, self.metrics, saved.tasks
        core.restore(saved.rows.values(), saved.incarnations, saved.lease_epoch, saved.runner_state, saved.folded)
        for name, own in saved.groups.items():
            core.groups.restore(name, own.rows.values(), own.folded)
        known, is_folded = self._counters_of_ended, core.store.is_folded
        news = {key: own for key, own in saved.counters.items() if key not in known and key[1] and not is_folded(*key)}
        metrics.continue_from(news)
        metrics.workers.go_on_from(saved.metric_sums or self._lifetime.metric_sums)
        metrics.env_errors.go_on_from(saved.env_errors or self._lifetime.env_errors)
        metrics.tasks.go_on_from(saved.task_figures or self._lifetime.task_figures)
        if saved.weights is not None:
            try:
                header, _ = read_weights(decode(saved.weights.frames))
            except DecodeError as error:
                log.warning("the weights in Redis are not usable: %s", error)
            else:
                self._keep_weights(header, list(saved.weights.frames))
        return True


def _lacks_descriptors() -> str:
    """Return why no peer can be accepted, since no descriptor is free; "" if one is. libzmq tells no other part."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return str(machine_error(error) or error)
    return ""
