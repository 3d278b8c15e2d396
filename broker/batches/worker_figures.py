"""Figures of workers from their heartbeats, for their rows in Redis and for the gauges that sum them up.

A heartbeat has cumulative values, so the broker takes the difference to an earlier one of the same life.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.env_errors import MOST_GROUPS, EnvErrorGroup
from headrace.schemas.accounts.lifetime_counters import SAMPLED_BYTES, WORKER_WAIT
from headrace.schemas.accounts.worker_figures import BLOCKED_BY, TIME_PARTS, ServingFigures, TimeByPart
from headrace.schemas.basics.process_usage import Usage
from headrace.schemas.messages import Heartbeat

if TYPE_CHECKING:
    from headrace.broker.batches.source import Source

WINDOW_S = 10.0
"""Seconds over which shares and rates are taken."""
_MOST_POINTS = 64
MOST_BYTES_PER_S = 1 << 36
"""Bytes of arrays that count of a life that began with this broker: more than the memory of one machine moves."""


class _Recent:
    """Cumulative values at their times: the newest, and those before it within `WINDOW_S`, at least one."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, Any]] = deque(maxlen=_MOST_POINTS)
        self._rate = (-1.0, 0.0)
        """(time, rate) as last asked for: a report asks for it in the worker's row and in gauges."""

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
        if self._rate[0] != now:
            self._rate = now, self._measure(now)
        return self._rate[1]

    def _measure(self, now: float) -> float:
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
        self.envs_lost = 0
        self.env_hosts: tuple[int, int] | None = None
        self.env_host_versions: list[str] = []
        self.serving: ServingFigures | None = None
        self.env_errors: dict[str, EnvErrorGroup] = {}
        """By fingerprint, groups of failures of its envs that were told since `take_env_errors`."""
        self.time_share: dict[str, float] = {}
        """The share of its recent time by part, which sum to 1; empty before two heartbeats have told it."""
        self.bytes_shipped: tuple[int, int] | None = None
        """(bytes of arrays, bytes of messages) of its batches, as the worker reports them; None before its first
        report.
        """
        self.window: tuple[int, int] | None = None
        """(batches, bytes) that the worker keeps; None before its first report."""
        self.waited_s: dict[str, float] = {}
        """Seconds that the worker waited in this life, by reason."""
        self.usage = RecentUsage()
        self.envs_usage = RecentUsage()
        self._blocked = ""
        self._times = _Recent()
        self._steps = _Recent()
        self._requests = _Recent()

    def take(self, beat: Heartbeat, now: float) -> None:
        """Take the figures in a heartbeat."""
        if beat.blocked != self._blocked:
            self._blocked, self.blocked_since = beat.blocked, now if beat.blocked else None
        self.envs_lost, self.env_hosts, self.serving = beat.envs_lost, beat.env_hosts, beat.serving
        self.env_host_versions = beat.env_host_versions
        self.bytes_shipped = max(filter(None, (beat.bytes_shipped, self.bytes_shipped)), default=None)
        self.window = beat.window
        self.usage.take(beat.usage, now)
        self.envs_usage.take(beat.envs_usage, now)
        for reason, seconds in beat.waited_s.items():
            self.waited_s[reason] = max(seconds, self.waited_s.get(reason, 0.0))
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


def row_figures(source: Source, now: float, unix_s: float) -> dict[str, Any]:
    """Return what a worker's row in Redis tells of its steps, time, envs and clients."""
    figures, row = source.figures, dict[str, Any]()
    row["env_steps"] = source.steps
    row["env_steps_per_s"] = round(figures.env_steps_per_s(now), 3)
    row["episodes"] = source.totals.episodes
    if figures.bytes_shipped is not None:
        row["array_bytes"], row["sent_bytes"] = figures.bytes_shipped
    if figures.window is not None:
        row["window_batches"], row["window_bytes"] = figures.window
    for prefix, usage in (("", figures.usage), ("envs_", figures.envs_usage)):
        row |= {prefix + name: value for name, value in usage.figures(now).items()}
    row["num_envs"], row["envs_lost"] = source.num_envs, figures.envs_lost
    if source.met_at is not None:
        row["joined_unix_s"] = round(unix_s - (now - source.met_at), 3)
    if figures.blocked_since is not None:
        row["blocked_since_unix_s"] = round(unix_s - (now - figures.blocked_since), 3)
    if figures.time_share:
        row["time_share"] = {part: round(share, 4) for part, share in figures.time_share.items()}
    if figures.env_hosts is not None:
        connected, wanted = figures.env_hosts
        row["env_hosts"] = {"connected": connected, "wanted": wanted, "versions": figures.env_host_versions}
    if (serving := figures.serving) is not None:
        row["serving"] = {
            "clients": serving.clients,
            "requests_per_s": round(figures.requests_per_s(now), 3),
            "latency_p50_s": serving.latency_p50_s,
            "latency_p95_s": serving.latency_p95_s,
        }
    return row


def told_counters(source: Source, now: float) -> dict[str, int]:
    """Return the lifetime counters of a life that its heartbeats tell, within what its time allows."""
    figures, lived_s = source.figures, source.seconds_since_met(now) + 1.0
    array_bytes, _ = figures.bytes_shipped or (0, 0)
    counters = {SAMPLED_BYTES: array_bytes}
    counters |= {keys.labelled(WORKER_WAIT, "reason", reason): int(s) for reason, s in figures.waited_s.items()}
    if not source.native:  # nobody knows how long it has lived; the types of the fields bound it
        return counters
    most = {SAMPLED_BYTES: int(MOST_BYTES_PER_S * lived_s)}
    return {name: min(count, most.get(name, int(lived_s))) for name, count in counters.items()}


def fleet_figures(live: Iterable[Source], now: float) -> dict[str, float]:
    """Return the gauges that sum up live workers."""
    sources = list(live)
    reasons = (source.blocked for source in sources if source.blocked)
    blocked = Counter(reason if reason in BLOCKED_BY else "other" for reason in reasons)
    gauges: dict[str, float] = {"workers": len(sources)}
    gauges |= {keys.labelled("workers_blocked", "reason", reason): count for reason, count in blocked.items()}
    windows = [source.figures.window or (0, 0) for source in sources]
    gauges["window_batches"], gauges["window_bytes"] = (float(sum(each)) for each in zip((0, 0), *windows, strict=True))
    told = [source.figures.time_share for source in sources if source.figures.time_share]
    for part in TIME_PARTS if told else ():
        mean = sum(shares[part] for shares in told) / len(told)
        gauges[keys.labelled("worker_time_share", "part", part)] = mean
    arrays, sent = map(sum, zip((0, 0), *(s.figures.bytes_shipped or (0, 0) for s in sources), strict=True))
    if sent:
        gauges["compression_ratio"] = arrays / sent
    return gauges | _clients([source.figures for source in sources], now)


def _clients(figures: Sequence[WorkerFigures], now: float) -> dict[str, float]:
    """Return the gauges of policy servers; none where no worker serves. Busy servers weigh more in the latencies."""
    serving = [(own.serving, own.requests_per_s(now)) for own in figures if own.serving is not None]
    if not serving:
        return {}
    rate = sum(rate for _, rate in serving)
    gauges = {"clients": float(sum(own.clients for own, _ in serving)), "client_requests_per_s": rate}
    if rate > 0:
        for quantile, name in (("0.5", "latency_p50_s"), ("0.95", "latency_p95_s")):
            weighted = sum(getattr(own, name) * own_rate for own, own_rate in serving)
            gauges[keys.labelled("client_latency_s", "quantile", quantile)] = weighted / rate
    return gauges
