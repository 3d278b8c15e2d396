"""The broker's metrics of the fleet for Redis: rates and windows from batch headers, the rest from the core."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.broker.batches.broker_observer import BrokerObserver
from headrace.broker.batches.life_figures import RecentUsage
from headrace.broker.batches.source import Source, StoredBatch
from headrace.broker.reports.env_error_totals import EnvErrors
from headrace.broker.reports.report import Report
from headrace.broker.reports.task_figures import TaskFigures
from headrace.broker.reports.worker_metrics import WorkerMetrics
from headrace.broker.reports.worker_rows import fleet_figures, row_figures, told_counters
from headrace.broker.sessions.core import BrokerCore
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.aborted_episodes import AbortedWindow, doubt
from headrace.schemas.accounts.lag_buckets import LAG_BOUNDS, LAG_BUCKETS, up_to
from headrace.schemas.accounts.ledger import Discard, Settled
from headrace.schemas.accounts.lifetime_counters import (
    ABORTED_EPISODES,
    ACCEPTED_BYTES,
    COMMITTED_BYTES,
    FENCED_LIVES,
    without_row_counters,
)
from headrace.schemas.basics.bounds import Version
from headrace.schemas.basics.process_usage import own_usage
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.chunks.module_spaces import MOST_MODULES
from headrace.schemas.messages import Skip

EPISODE_WINDOW = 100
RATE_WINDOW_S = 5.0
_MOST_HOST = 255
"""Characters of a host's name: the most that DNS allows."""


class FleetMetrics(BrokerObserver):
    """Collects metrics from the header of each accepted batch, and makes the report."""

    def __init__(self, core: BrokerCore) -> None:
        self.core = core
        self._episodes: deque[tuple[float, int]] = deque(maxlen=EPISODE_WINDOW)
        self._aborted: deque[tuple[float, int]] = deque(maxlen=EPISODE_WINDOW)
        """(return, length) of the newest aborted episodes."""
        self._ends = AbortedWindow(EPISODE_WINDOW)
        self._arrivals: deque[tuple[float, int]] = deque()
        """(time, env steps) of each recent batch."""
        self._env_steps: dict[tuple[int, int], int] = {}
        """Env steps of each source as of its last batch."""
        self._counted: defaultdict[tuple[int, int], Counter[str]] = defaultdict(Counter)
        """Counters of each life that is not folded, by the batches that this broker accepted."""
        self._counted_before: dict[tuple[int, int], Mapping[str, int]] = {}
        """Counters of each life that an earlier broker reported."""
        self._slots: set[int] = set()
        """Slots with a worker, as of the last report."""
        self._agent_returns: dict[str, deque[float]] = {}
        self._agent_lengths: dict[str, deque[int]] = {}
        """The lengths of the same episodes; of fewer where workers do not tell them."""
        self._policies: dict[str, dict[str, Any]] = {}
        """Statistics of each module's returns, as of the last report."""
        self._changed_policies: set[str] = set()
        self._accepted_lag = [0] * LAG_BUCKETS
        """Agent steps of accepted batches by lag, since this broker started."""
        self.workers = WorkerMetrics()
        self.env_errors = EnvErrors()
        self.tasks = TaskFigures(EPISODE_WINDOW)
        self._events: list[dict[str, Any]] = []
        self._usage = RecentUsage()
        self._granted_epoch = 0
        """The newest learner epoch that this broker has given out."""
        self._lease_since = 0.0
        self._lease_epoch = 0
        self._seen: dict[tuple[int, int], str] = {}
        self._incarnations_before: dict[int, int] = {}

    def continue_from(self, counters: Mapping[tuple[int, int], Mapping[str, int]]) -> None:
        """Go on from the counters that an earlier broker reported, which must not go back."""
        self._counted_before |= {life: without_row_counters(values) for life, values in counters.items()}

    def accepted(self, source: Source, held: StoredBatch, told: BatchHeader | Skip) -> None:
        """Count a batch. A SKIP counts only for the rate of its worker."""
        source.figures.stepped(source.steps, held.at)
        if not isinstance(told, BatchHeader):
            return
        self._accepted_lag[bisect_left(LAG_BOUNDS, _lag(told, self.core.weights))] += told.steps
        self._episodes.extend(told.episodes)
        self._ends.add(*told.ends)
        if told.aborted:
            self._aborted.extend(told.aborted)
            self._counted[source.key][ABORTED_EPISODES] += len(told.aborted)
        if told.agent_returns and len(told.modules) == 1:
            self._observe_agents(told.modules[0], told.agent_returns, told.agent_lengths)
        for module_id, earned, length in told.frozen_agents:
            self._observe_agents(module_id, [earned], [length])
        for task, episodes, returns, lengths in told.ended_by_task if told.seq > source.batches_before else ():
            self.tasks.add_ended(task, episodes, returns, lengths)
        key, env_steps = source.key, told.totals.steps_of_envs
        # The first batch that a new broker gets from an old worker does not show how fast the worker is.
        before = self._env_steps.get(key, 0 if told.seq == 1 else env_steps)
        self._arrivals.append((held.at, max(0, env_steps - before)))
        self._env_steps[key] = env_steps
        self._counted[key][ACCEPTED_BYTES] += held.nbytes

    def settled(self, source: Source, batches: Sequence[StoredBatch], before: Settled) -> None:
        """Count the bytes of batches that the learner has committed."""
        chunks = source.settled.committed[1] - before.committed[1]
        self._counted[source.key][COMMITTED_BYTES] += _committed_bytes(batches, chunks)

    def counters_of(self, source: Source) -> dict[str, int]:
        """Return the lifetime counters of a life that its ledger row does not have, without those that are 0."""
        before = self._counted_before.get(source.key, {})
        own: Mapping[str, int] = self._counted.get(source.key, {})
        is_sure = source.met_at is not None or source.closed  # else it was superseded, and how it ended comes later
        told = {FENCED_LIVES: int(is_sure and source.end_reason == Discard.FENCED)} | told_counters(source)
        counters = {name: before.get(name, 0) + count for name, count in own.items()}
        counters |= {name: max(before.get(name, 0), count) for name, count in told.items()}
        return {**before, **{name: count for name, count in counters.items() if count}}

    def _observe_agents(self, module_id: str, returns: Sequence[float], lengths: Sequence[int]) -> None:
        if module_id not in self._agent_returns and len(self._agent_returns) >= MOST_MODULES:
            return
        self._agent_returns.setdefault(module_id, deque(maxlen=EPISODE_WINDOW)).extend(returns)
        self._agent_lengths.setdefault(module_id, deque(maxlen=EPISODE_WINDOW)).extend(lengths)
        self._changed_policies.add(module_id)

    def mean_return(self) -> float:
        """Return the mean return of the newest `EPISODE_WINDOW` episodes; minus infinity where it decides nothing."""
        if len(self._episodes) < EPISODE_WINDOW or doubt(*self._ends.counts):
            return -math.inf
        return sum(returned for returned, _ in self._episodes) / EPISODE_WINDOW

    def report(self, now: float) -> Report:
        """Make the report of what has changed since the last one, and forget the events in it.

        The broker's loop waits for this call, so it only gathers values. The reporter's thread turns them into text.
        """
        core, changed = self.core, self.core.take_changed()
        self._note_learner()
        self._note_events(changed)
        for source in changed:
            if source.metrics:
                self.workers.take(source.slot, source.incarnation, source.metrics)
            for group in source.figures.take_env_errors():
                self.tasks.add_failures(group.tasks, self.env_errors.take(*source.key, group, time.time()))
        events, self._events = self._events, []
        live = {source.slot for source in core.live()}
        gone, self._slots = self._slots - live, live
        rows, unix_s = (source.ledger_row() for source in changed), round(time.time(), 3)
        return Report(
            rows=[row for row in rows if row is not None],
            counters={source.key: self.counters_of(source) for source in changed},
            folded=core.folding.take_news(),
            gauges=self._gauges(now),
            workers={
                source.slot: _worker_state(source, core.weights, now, unix_s)
                for source in changed
                if source.peer is not None
            },
            workers_gone=gone,
            lease=self._lease(now),
            incarnations=dict(core.state.incarnations),
            runner_state=dict(core.state.counters),
            policies=self._policy_returns(),
            metrics=self.workers.merged(),
            metric_sums=self.workers.sums(),
            env_errors=self.env_errors.rows(),
            task_figures=self.tasks.rows(),
            events=events,
            refused=core.refusals.most(),
        )

    def forget(self, sources: Iterable[Source]) -> None:
        """Forget lives that were folded. Their counters are in the folded lives."""
        for source in sources:
            for known in (self._counted, self._counted_before, self._env_steps, self._seen):
                known.pop(source.key, None)

    def _gauges(self, now: float) -> dict[str, float]:
        core = self.core
        while self._arrivals and self._arrivals[0][0] < now - RATE_WINDOW_S:
            self._arrivals.popleft()
        span = max(now - self._arrivals[0][0], 0.5) if self._arrivals else 1.0
        held = core.store.held()
        gauges: dict[str, float] = {
            "unix_s": time.time(),
            "env_steps_per_s": sum(steps for _, steps in self._arrivals) / span,
            "weights_seq": core.weights[1],
            "learner_epoch": core.state.epoch,
            "messages_refused": core.refusals.total,
            "held_batches": len(held),
            "held_bytes": core.store.nbytes,
            "held_agent_steps": sum(batch.steps for batch in held),
            "oldest_unsettled_age_s": now - min((batch.at for batch in held), default=now),
        }
        live = core.live()
        gauges |= fleet_figures(live, now) | _spread_of_workers(live, now)
        gauges |= {keys.labelled(keys.SESSIONS_REVOKED, "key", key): count for key, count in core.revoked.items()}
        if core.workers.last_close_at < math.inf:
            gauges["lost_lives_close_unix_s"] = time.time() + max(0.0, core.workers.last_close_at - now)
        gauges |= _of_episodes("episode", self._episodes) | {"episodes_window": len(self._episodes)}
        gauges["episodes_window_aborted"] = self._ends.counts[1]
        aborted = _of_episodes("aborted", self._aborted).items()
        gauges |= {name: value for name, value in aborted if name.endswith("_mean")}
        gauges["aborted_window"] = len(self._aborted)
        gauges |= {keys.labelled(keys.ACCEPTED_LAG, "le", le): steps for le, steps in up_to(self._accepted_lag)}
        measures = core.learners.measures
        gauges |= measures.consumed_lag()
        self._usage.take(own_usage(), now)
        gauges |= _of_process("broker", self._usage, now)
        if core.has_learner:
            gauges |= measures.time_share() | _of_process("learner", measures.usage, now)
        return gauges

    def _policy_returns(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of each module's returns. Only those with news are computed again."""
        for module_id in self._changed_policies:
            self._policies[module_id] = _spread(self._agent_returns[module_id], self._agent_lengths[module_id])
        self._changed_policies.clear()
        return dict(self._policies)

    def _lease(self, now: float) -> dict[str, Any]:
        core = self.core
        if core.state.epoch != self._lease_epoch:
            self._lease_epoch, self._lease_since = core.state.epoch, time.time()
        lease = {
            "unix_s": time.time(),
            "epoch": core.state.epoch,
            "token": core.state.learner_token,
            "since_unix_s": self._lease_since,
            "connected": int(core.has_learner),
        }
        learner = core.learners.lease
        if learner is None:  # Redis keeps what an earlier broker told of it
            return lease
        hello = learner.hello
        lease |= {"headrace_version": hello.headrace_version, "heard_unix_s": time.time() - (now - learner.heard_at)}
        lease |= {"host": hello.host[:_MOST_HOST], "pid": hello.pid, "program": hello.program}
        lease |= core.learners.measures.threads() | {"waiting": int(learner.waits(now))}
        since = learner.committed_at
        return lease if since is None else lease | {"committed_unix_s": time.time() - (now - since)}

    def note_start(self) -> None:
        """Note that a broker starts, and the highest incarnations that it knows: these lives have joined before."""
        self._incarnations_before = dict(self.core.state.incarnations)
        self._note("broker")

    def _note_learner(self) -> None:
        """Note a new learner. A learner that reconnects to a new broker keeps its epoch, and is not a new one."""
        lease = self.core.learners.lease
        if lease is not None and lease.granted and lease.epoch > self._granted_epoch:
            self._granted_epoch = lease.epoch
            self._note("learner", epoch=lease.epoch)

    def _note_events(self, sources: Iterable[Source]) -> None:
        for source in sources:
            state = source.end_reason or ("joined" if source.peer is not None else "lost")
            before = self._seen.get(source.key)
            if before is None and source.met_at is None and state in ("lost", Discard.FENCED, Discard.SHUTDOWN):
                continue  # known from Redis only: its worker may come back, or left an earlier broker in order
            if before != state and (before is not None or self._is_news(source, state)):
                self._note(state, slot=source.slot, incarnation=source.incarnation)
                if state in (Discard.WORKER_KILLED, Discard.FENCED) and source.met_at is not None:
                    self._ends.add(0, source.num_envs)  # the open episodes that nobody tells of
            self._seen[source.key] = state

    def _is_news(self, source: Source, state: str) -> bool:
        """Return whether the first known state of a life began under this broker, and not earlier."""
        if state == "joined":
            return source.incarnation > self._incarnations_before.get(source.slot, 0)
        return state == "lost" or source.restored is None

    def _note(self, event: str, **fields: int) -> None:
        self._events.append({"event": event, **fields, "unix_s": time.time()})


def _committed_bytes(settled: Iterable[StoredBatch], chunks: int) -> int:
    """Return the bytes of batches that are settled now, `chunks` of them committed.

    The learner may have left out some chunks. Which ones is not known, so these count like the others.
    """
    given = [held for held in settled if not held.dropped]
    most = sum([held.chunks for held in given])
    return sum([held.nbytes for held in given]) * min(chunks, most) // most if most else 0


def _of_process(role: str, usage: RecentUsage, now: float) -> dict[str, float]:
    return {keys.labelled(f"process_{name}", "role", role): value for name, value in usage.figures(now).items()}


def _spread_of_workers(live: Sequence[Source], now: float) -> dict[str, float]:
    """Return the quantiles of the rates of workers; empty for fewer than `MANY_WORKERS` workers."""
    if len(live) < keys.MANY_WORKERS:
        return {}
    spread = quantiles([source.figures.env_steps_per_s(now) for source in live])
    return {keys.labelled(keys.WORKER_RATE, "quantile", at): rate for at, rate in spread.items()}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the quantiles of one or more values, by the value of their label, with linear interpolation."""
    ranked = sorted(values)
    return {label: _at(ranked, float(label) * (len(ranked) - 1)) for label in keys.QUANTILES}


def _at(ranked: Sequence[float], place: float) -> float:
    below = int(place)
    above, part = min(below + 1, len(ranked) - 1), place - below
    return ranked[below] * (1.0 - part) + ranked[above] * part


def _lag(header: BatchHeader, newest: Version) -> int:
    """Return by how many versions a batch is behind, by the newest weights in it, as `ChunkBatch.lag` counts.

    The weights of an earlier learner are behind all versions of the present one.
    """
    if header.learner_epoch > newest[0]:
        return 0  # this broker has not heard of these weights yet
    return newest[1] if header.learner_epoch < newest[0] else max(0, newest[1] - header.weights_seq)


def _spread(returns: Sequence[float], lengths: Sequence[int]) -> dict[str, Any]:
    others = {"agents": len(returns), "quantiles": quantiles(returns)}
    return _means("len", lengths) | _means("return", returns) | others


def _means(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_mean": sum(values) / len(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def _of_episodes(name: str, episodes: Iterable[tuple[float, int]]) -> dict[str, float]:
    """Return the gauges of these (return, length) pairs: means, extremes and quantiles; empty for none."""
    gauges: dict[str, float] = {}
    for part, values in zip(("return", "len"), zip(*episodes, strict=True), strict=False):
        gauges |= _means(f"{name}_{part}", values)
        field = f"{name}_{part}_quantile"
        gauges |= {keys.labelled(field, "quantile", at): own for at, own in quantiles(values).items()}
    return gauges


def _worker_state(source: Source, newest: Version, now: float, unix_s: float) -> dict[str, Any]:
    names = ("incarnation", "host", "pid", "headrace_version", "blocked", "accepted")
    beat = source.figures.beat
    state = row_figures(source, now, unix_s) | {name: getattr(source, name) for name in names}
    state |= {
        "weights_epoch": source.weights[0],
        "weights_seq": source.weights[1],
        "weights_behind": max(0, newest[1] - source.weights[1]) if source.weights[0] == newest[0] else -1,
        "settled": source.settled.seq,
        "held_batches": len(source.held),
        "env_silence_s": round(beat.env_silence_s, 3),
        "env_call": beat.env_call,
        "unix_s": unix_s,
    }
    if beat.env_failures:
        state |= {"env_failures": beat.env_failures, "env_failure": beat.env_failure}
        state["env_failure_age_s"] = now - source.figures.env_failed_at
    if beat.tasks_refused:
        state["tasks_refused"] = beat.tasks_refused
    return state
