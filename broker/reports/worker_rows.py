"""Rows of workers in Redis, and the gauges and counters that sum them up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.broker.batches.life_figures import WorkerFigures
from headrace.broker.batches.source import Source
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.lifetime_counters import SAMPLED_BYTES, WORKER_WAIT
from headrace.schemas.accounts.worker_figures import BLOCKED_BY, TIME_PARTS


def row_figures(source: Source, now: float, unix_s: float) -> dict[str, Any]:
    """Return what a worker's row in Redis tells of its steps, time, envs and clients."""
    figures, beat, row = source.figures, source.figures.beat, dict[str, Any]()
    row["env_steps"] = source.steps
    row["env_steps_per_s"] = round(figures.env_steps_per_s(now), 3)
    row["episodes"] = source.totals.episodes
    if beat.bytes_shipped is not None:
        row["array_bytes"], row["sent_bytes"] = beat.bytes_shipped
    if beat.window is not None:
        row["window_batches"], row["window_bytes"] = beat.window
    for prefix, usage in (("", figures.usage), ("envs_", figures.envs_usage)):
        row |= {prefix + name: value for name, value in usage.figures(now).items()}
    row["num_envs"], row["envs_lost"] = source.num_envs, beat.envs_lost
    if source.met_at is not None:
        row["joined_unix_s"] = round(unix_s - (now - source.met_at), 3)
    if figures.blocked_since is not None:
        row["blocked_since_unix_s"] = round(unix_s - (now - figures.blocked_since), 3)
    if figures.time_share:
        row["time_share"] = {part: round(share, 4) for part, share in figures.time_share.items()}
    if beat.env_hosts is not None:
        connected, wanted = beat.env_hosts
        row["env_hosts"] = {"connected": connected, "wanted": wanted, "versions": beat.env_host_versions}
    if (serving := beat.serving) is not None:
        row["serving"] = {
            "clients": serving.clients,
            "requests_per_s": round(figures.requests_per_s(now), 3),
            "latency_p50_s": serving.latency_p50_s,
            "latency_p95_s": serving.latency_p95_s,
        }
    return row


def told_counters(source: Source) -> dict[str, int]:
    """Return the lifetime counters of a life that its heartbeats tell."""
    beat = source.figures.beat
    array_bytes, _ = beat.bytes_shipped or (0, 0)
    waits = {keys.labelled(WORKER_WAIT, "reason", reason): int(s) for reason, s in beat.waited_s.items()}
    return {SAMPLED_BYTES: array_bytes} | waits


def fleet_figures(live: Iterable[Source], now: float) -> dict[str, float]:
    """Return the gauges that sum up live workers."""
    sources = list(live)
    reasons = (source.blocked for source in sources if source.blocked)
    blocked = Counter(reason if reason in BLOCKED_BY else "other" for reason in reasons)
    gauges: dict[str, float] = {"workers": len(sources)}
    gauges |= {keys.labelled("workers_blocked", "reason", reason): count for reason, count in blocked.items()}
    windows = [source.figures.beat.window or (0, 0) for source in sources]
    gauges["window_batches"], gauges["window_bytes"] = (float(sum(each)) for each in zip((0, 0), *windows, strict=True))
    told = [source.figures.time_share for source in sources if source.figures.time_share]
    for part in TIME_PARTS if told else ():
        mean = sum(shares[part] for shares in told) / len(told)
        gauges[keys.labelled("worker_time_share", "part", part)] = mean
    arrays, sent = map(sum, zip((0, 0), *(s.figures.beat.bytes_shipped or (0, 0) for s in sources), strict=True))
    if sent:
        gauges["compression_ratio"] = arrays / sent
    return gauges | _clients([source.figures for source in sources], now)


def _clients(figures: Sequence[WorkerFigures], now: float) -> dict[str, float]:
    """Return the gauges of policy servers; none where no worker serves. Busy servers weigh more in the latencies."""
    serving = [(own.beat.serving, own.requests_per_s(now)) for own in figures if own.beat.serving is not None]
    if not serving:
        return {}
    rate = sum(rate for _, rate in serving)
    gauges = {"clients": float(sum(own.clients for own, _ in serving)), "client_requests_per_s": rate}
    if rate > 0:
        for quantile, name in (("0.5", "latency_p50_s"), ("0.95", "latency_p95_s")):
            weighted = sum(getattr(own, name) * own_rate for own, own_rate in serving)
            gauges[keys.labelled("client_latency_s", "quantile", quantile)] = weighted / rate
    return gauges
