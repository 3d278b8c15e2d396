"""Figures of one life of a worker, from its heartbeats.

A heartbeat has cumulative values, so the broker takes the difference to an earlier one of the same life.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from headrace.schemas.accounts.env_errors import MOST_GROUPS, EnvErrorGroup
from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.accounts.worker_figures import TIME_PARTS, TimeByPart
from headrace.schemas.basics.process_usage import Usage
from headrace.schemas.messages import Heartbeat

WINDOW_S = 10.0
"""Seconds over which shares and rates are taken."""
_MOST_POINTS = 64
_NO_BEAT = Heartbeat(slot=0, incarnation=1, totals=WorkerTotals())


class _Recent:
    """Cumulative values at their times: the newest, and those before it within `WINDOW_S`, at least one."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, Any]] = deque(maxlen=_MOST_POINTS)

    def add(self, now: float, value: Any) -> None:
        points = self._points
        points.append((now, value))
        while len(points) > 2 and points[1][0] < now - WINDOW_S:
            points.popleft()

    def ends(self) -> tuple[tuple[float, Any], tuple[float, Any]] | None:
        """Return the oldest and the newest; None before there are two."""
        return (self._points[0], self._points[-1]) if len(self._points) > 1 else None

    def rate(self, now: float) -> float:
        """Return the rate at which a count grows. The rate falls once no value has come for two mean intervals."""
        ends = self.ends()
        if ends is None:
            return 0.0
        (first_at, first), (last_at, last) = ends
        gap = (last_at - first_at) / (len(self._points) - 1)
        span = last_at - first_at if now - last_at <= 2 * gap else now - first_at
        return max(0.0, float(last - first)) / span if span > 0 else 0.0


class RecentUsage:
    """Processor time and memory of a process, or of several together."""

    def __init__(self) -> None:
        self.cpu_s = _Recent()
        self.rss_bytes: int | None = None
        """Resident bytes; None where the newest message does not tell them."""

    def take(self, told: Usage | None, now: float) -> None:
        """Take the newest."""
        if told is not None:
            self.cpu_s.add(now, told[0])
        self.rss_bytes = told[1] if told is not None else None

    def figures(self, now: float) -> dict[str, float]:
        """Return the figures by their names in Redis; empty where they were not told."""
        if self.rss_bytes is None:
            return {}
        return {"cpu_share": round(self.cpu_s.rate(now), 4), "rss_bytes": self.rss_bytes}


class WorkerFigures:
    """The figures of one life of a worker."""

    def __init__(self) -> None:
        self.blocked_since: float | None = None
        """Since when it has waited, at least, and no batch of it was accepted; None while it does not wait."""
        self.beat = _NO_BEAT
        """The newest heartbeat; one that tells nothing before the first."""
        self.env_failed_at = 0.0
        """Time at which the broker heard of the newest failure of its envs."""
        self.env_errors: dict[str, EnvErrorGroup] = {}
        """By fingerprint, groups of failures of its envs that were told since `take_env_errors`."""
        self.time_share: dict[str, float] = {}
        """The share of its recent time by part, which sum to 1; empty before two heartbeats have told it."""
        self.usage = RecentUsage()
        self.envs_usage = RecentUsage()
        self._times = _Recent()
        self._steps = _Recent()
        self._requests = _Recent()

    def take(self, beat: Heartbeat, now: float) -> None:
        """Take the figures in a heartbeat."""
        before, self.beat = self.beat, beat
        if beat.blocked != before.blocked:
            self.blocked_since = now if beat.blocked else None
        if beat.env_failures > before.env_failures:
            self.env_failed_at = now
        self.usage.take(beat.usage, now)
        self.envs_usage.take(beat.envs_usage, now)
        if beat.env_error is not None:
            self.note_env_error(beat.env_error)
        if beat.time_s:
            self._times.add(now, beat.time_s)
            if ends := self._times.ends():
                self.time_share = _shares(ends[0][1], ends[1][1])
        if beat.serving is not None:
            self._requests.add(now, beat.serving.requests)

    def note_env_error(self, group: EnvErrorGroup) -> None:
        """Note a report of one group. Its counts are cumulative."""
        if group.fingerprint in self.env_errors or len(self.env_errors) <= MOST_GROUPS:
            self.env_errors[group.fingerprint] = group

    def take_env_errors(self) -> list[EnvErrorGroup]:
        """Return the groups that were reported since the last call."""
        told, self.env_errors = list(self.env_errors.values()), {}
        return told

    def stepped(self, env_steps: int, now: float) -> None:
        """Note the env steps of the life as of a batch that was accepted.

        The worker went on, although it may say that it waits in the heartbeats before and after the batch.
        """
        self._steps.add(now, env_steps)
        if self.blocked_since is not None:
            self.blocked_since = now

    def env_steps_per_s(self, now: float) -> float:
        """Return the rate of env steps in accepted batches."""
        return self._steps.rate(now)

    def requests_per_s(self, now: float) -> float:
        """Return the rate of clients' requests."""
        return self._requests.rate(now)


def _shares(first: TimeByPart, last: TimeByPart) -> dict[str, float]:
    spent = {part: max(0.0, last.get(part, 0.0) - first.get(part, 0.0)) for part in TIME_PARTS}
    whole = sum(spent.values())
    return {part: seconds / whole for part, seconds in spent.items()} if whole > 0 else {}
