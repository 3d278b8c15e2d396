"""The broker's metrics of the fleet for Redis: rates and windows from batch headers, the rest from the core."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.broker.core import BrokerCore
from headrace.broker.report import Report
from headrace.broker.source import Source
from headrace.broker.worker_metrics import WorkerMetrics
from headrace.schemas.batch import BatchHeader
from headrace.schemas.module_spaces import MOST_MODULES

EPISODE_WINDOW = 100
RATE_WINDOW_S = 5.0


class FleetMetrics:
    """Collects metrics from the header of each accepted batch, and makes the report."""

    def __init__(self, bytes_before: Mapping[tuple[int, int], Mapping[str, int]] | None = None) -> None:
        self._episodes: deque[tuple[float, int]] = deque(maxlen=EPISODE_WINDOW)
        self._arrivals: deque[tuple[float, int]] = deque()
        """(time, env steps) of each recent batch."""
        self._env_steps: dict[tuple[int, int], int] = {}
        """Env steps of each source as of its last batch."""
        self._bytes: dict[tuple[int, int], int] = {}
        self._agent_returns: dict[str, deque[float]] = {}
        """The newest returns of the agents of each module."""
        self.workers = WorkerMetrics()
        self._events: list[dict[str, Any]] = []
        self._lease_since = 0.0
        self._lease_epoch = 0
        self._seen: dict[tuple[int, int], str] = {}
        self.continue_from(bytes_before or {})

    def continue_from(self, counters: Mapping[tuple[int, int], Mapping[str, int]]) -> None:
        """Go on from the counters that an earlier broker reported, which must not go back."""
        for key, values in counters.items():
            self._bytes[key] = self._bytes.get(key, 0) + values.get("bytes_total", 0)

    def observe(self, header: BatchHeader, nbytes: int, now: float) -> None:
        """Count a batch that was accepted for the first time."""
        self._episodes.extend(header.episodes)
        if header.agent_returns and len(header.modules) == 1:
            self._observe_agents(header.modules[0], header.agent_returns)
        key, env_steps = (header.slot, header.incarnation), header.totals.steps_of_envs
        # The first batch that a new broker gets from an old worker does not show how fast the worker is.
        before = self._env_steps.get(key, 0 if header.seq == 1 else env_steps)
        self._arrivals.append((now, max(0, env_steps - before)))
        self._env_steps[key] = env_steps
        self._bytes[key] = self._bytes.get(key, 0) + nbytes

    def _observe_agents(self, module_id: str, returns: list[float]) -> None:
        if module_id not in self._agent_returns and len(self._agent_returns) >= MOST_MODULES:
            return
        self._agent_returns.setdefault(module_id, deque(maxlen=EPISODE_WINDOW)).extend(returns)

    def report(self, core: BrokerCore, now: float) -> Report:
        """Make the report of the state as of now, and forget the events in it."""
        self._note_events(core.sources.values())
        for source in core.sources.values():
            if source.metrics:
                self.workers.take(source.slot, source.incarnation, source.metrics)
        events, self._events = self._events, []
        return Report(
            rows=core.rows(),
            counters={key: {"bytes_total": value} for key, value in self._bytes.items()},
            gauges=self._gauges(core, now),
            workers={source.slot: _worker_state(source, core) for source in core.live()},
            lease=self._lease(core),
            incarnations=dict(core.state.incarnations),
            runner_state=dict(core.state.counters),
            policies={module_id: _spread(returns) for module_id, returns in self._agent_returns.items()},
            metrics=self.workers.merged(),
            metric_sums=self.workers.sums(),
            events=events,
        )

    def _gauges(self, core: BrokerCore, now: float) -> dict[str, float]:
        while self._arrivals and self._arrivals[0][0] < now - RATE_WINDOW_S:
            self._arrivals.popleft()
        span = max(now - self._arrivals[0][0], 0.5) if self._arrivals else 1.0
        oldest = core.store.oldest_held_at()
        gauges: dict[str, float] = {
            "env_steps_per_s": sum(steps for _, steps in self._arrivals) / span,
            "episodes_window": len(self._episodes),
            "weights_seq": core.weights[1],
            "learner_epoch": core.state.epoch,
            "held_batches": core.store.held_batches(),
            "oldest_unsettled_age_s": now - oldest if oldest is not None else 0.0,
        }
        if self._episodes:
            returns, lengths = zip(*self._episodes, strict=True)
            for name, values in (("episode_return", returns), ("episode_len", lengths)):
                gauges[f"{name}_mean"] = sum(values) / len(values)
                gauges[f"{name}_min"], gauges[f"{name}_max"] = min(values), max(values)
        return gauges

    def _lease(self, core: BrokerCore) -> dict[str, Any]:
        if core.state.epoch != self._lease_epoch:
            self._lease_epoch, self._lease_since = core.state.epoch, time.time()
        return {"epoch": core.state.epoch, "token": core.state.learner_token, "since_unix_s": self._lease_since}

    def _note_events(self, sources: Iterable[Source]) -> None:
        for source in sources:
            state = source.end_reason or ("joined" if source.peer is not None else "lost")
            if self._seen.get(source.key) not in (state, source.end_reason or None):
                event = {"event": state, "slot": source.slot, "incarnation": source.incarnation, "unix_s": time.time()}
                self._events.append(event)
            self._seen[source.key] = state


def _spread(returns: Sequence[float]) -> dict[str, float]:
    return {
        "return_mean": sum(returns) / len(returns),
        "return_min": min(returns),
        "return_max": max(returns),
        "agents": len(returns),
    }


def _worker_state(source: Source, core: BrokerCore) -> dict[str, Any]:
    return {
        "incarnation": source.incarnation,
        "host": source.host,
        "pid": source.pid,
        "weights_epoch": source.weights[0],
        "weights_seq": source.weights[1],
        "weights_behind": max(0, core.weights[1] - source.weights[1]) if source.weights[0] == core.weights[0] else -1,
        "blocked": source.blocked,
        "accepted": source.accepted,
        "settled": source.settled.seq,
        "held_batches": len(source.held),
    }
