"""The state of a fleet as one JSON document. The page, `top` and `--json` show it, and compute no number of their own.

verdict, severity    one line, and "ok", "warning", "error", "ended" or "unknown"
bottleneck           what limits the pace and what helps, in words; "" where nothing clearly does
findings             what is wrong, worst first: cause, since when, limit, command
fleet                id, env, version, state, times, addresses
redis                whether its numbers are old, since when, and the server's own health
numbers              gauges and totals by their names in Redis, and a few sums of them
tiles                those that the page and `top` show, as texts: key, title, text, note
columns              of the table of workers: key (the member of a row), title, unit
labelled             those with a label: {name: {value of the label: number}}
ledger               agent steps from stepped to committed, with each loss by its name
policies, tasks      returns by module; figures by task
groups               consumer groups besides the learner's: their readers, lag and books
logged               metrics that callbacks logged
workers              a row for each slot, by slot
errors               failures of envs, grouped, the newest first
processes            a row for each process, with CPU and memory, those that tell of themselves included
learner              its lease, its newest logged row
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.deploy.annexes.watch.state.shown_figures import columns_of, tiles_of
from headrace.deploy.fleet.scale import asked_workers
from headrace.deploy.monitoring.bottleneck import find_bottleneck
from headrace.deploy.monitoring.facts import Facts, FactsReader
from headrace.deploy.monitoring.findings import Finding, find, verdict
from headrace.deploy.monitoring.losses import loss_of
from headrace.deploy.monitoring.processes import GONE, STOPPED
from headrace.deploy.report.progress import STALE_S, number
from headrace.deploy.run.redis_view import Snapshot
from headrace.schemas.accounts.consumer_groups import GroupRow
from headrace.schemas.accounts.figures import added_up
from headrace.schemas.accounts.ledger import FleetLedger, LedgerRow, add_up
from headrace.schemas.accounts.lifetime_counters import COUNTER_TABLE
from headrace.schemas.accounts.process_state import ProcessState
from headrace.schemas.accounts.redis_keys import unlabelled
from headrace.schemas.basics.bounds import OTHER_TASKS
from headrace.schemas.basics.printable import printable
from headrace.schemas.errors import RedisUnavailableError
from headrace.schemas.settings.config import MOST_WORKERS_ON_RAY

Document = dict[str, Any]

_SERVER_FIELDS = (
    "redis_version",
    "valkey_version",
    "server_name",
    "uptime_in_seconds",
    "used_memory",
    "maxmemory",
    "maxmemory_policy",
    "connected_clients",
    "instantaneous_ops_per_sec",
    "evicted_keys",
    "aof_enabled",
    "aof_last_write_status",
    "rdb_last_bgsave_status",
)
"""Fields of INFO that the page shows."""
_REDIS = "redis"
SLOW_S = 5.0
"""Seconds between two reads of what changes slowly."""
_COUNTERS = tuple(metric.name for metric in COUNTER_TABLE if not metric.label)
"""Counters that Redis lacks until they first count."""


@dataclass(frozen=True, slots=True)
class SlowFacts:
    """Facts that are read every few seconds only: INFO of Redis, and shares of CPUs.

    `server` is None if the Redis user may not call INFO. `cpu_shares` has the CPU seconds per second of each process.
    """

    server: Mapping[str, Any] | None = field(default_factory=dict)
    cpu_shares: Mapping[str, float] = field(default_factory=dict)


def fleet_state(facts: Facts, findings: list[Finding], slow: SlowFacts | None = None) -> Document:
    """Return the document. It has only JSON types. Text from peers is plain text, never markup."""
    slow, snapshot = slow or SlowFacts(), facts.snapshot
    by_name, by_label = _split(snapshot)
    line, limit = verdict(facts, findings), find_bottleneck(facts, findings)
    fleet, numbers, workers = _fleet(facts), by_name | _sums(facts), _workers(facts, slow)
    books = ledger(snapshot.fleet, snapshot.rows.values())
    of_books = {name: books[name] for name in ("lost", "lost_share")}
    return {
        "unix_s": facts.unix_s,
        "verdict": line,
        "severity": _severity(facts, findings, line),
        "bottleneck": limit.in_words() if limit is not None else "",
        "findings": [{**asdict(one), "for_s": _age_s(one.since_unix_s, facts.unix_s)} for one in findings],
        "fleet": fleet,
        "redis": _redis(facts, slow),
        "numbers": numbers,
        "tiles": tiles_of({**numbers, **of_books, "workers_wanted": fleet["workers_wanted"]}),
        "columns": columns_of(workers),
        "labelled": by_label,
        "ledger": books,
        "policies": [
            {"module": module, **numbers, "quantiles": dict(snapshot.policy_quantiles.get(module, {}))}
            for module, numbers in sorted(snapshot.policies.items())
        ],
        "tasks": tasks_of(snapshot.task_figures, facts.unix_s),
        "groups": groups_of({name: books.state for name, books in snapshot.groups.items()}, facts.unix_s),
        "logged": {name: metric.value for name, metric in sorted(snapshot.metrics.items())},
        "workers": workers,
        "errors": list(_env_errors(snapshot, facts.unix_s)),
        "processes": list(_processes(facts, slow, by_label)),
        "learner": _learner(facts),
        "garbage": list(snapshot.garbage[:20]),
    }


def _env_errors(snapshot: Snapshot, unix_s: float) -> Iterator[Document]:
    """Yield the groups of failures of envs, the newest first. What an env wrote has its control characters escaped."""
    for name, row in sorted(snapshot.errors.items(), key=lambda item: -item[1].last_unix_s):
        plain = {"fingerprint": name, **row.model_dump(mode="json", exclude={"lives"})}
        texts: Document = {fact: printable(text) for fact, text in plain.items() if isinstance(text, str)}
        if row.tasks:
            texts["tasks"] = [printable(task) for task in row.tasks]
        yield {**plain, **texts, "last_age_s": max(0.0, unix_s - row.last_unix_s)}


def tasks_of(figures: Mapping[str, Mapping[str, float]], unix_s: float) -> list[Document]:
    """Return the figures of each task, by name with numbers in their order, and those of all others together."""
    return [
        {"task": printable(task), **own, "last_age_s": max(0.0, unix_s - own.get("last_unix_s", unix_s))}
        for task, own in sorted(figures.items(), key=lambda item: _in_order(item[0]))
    ]


def groups_of(states: Mapping[str, GroupRow], unix_s: float) -> list[Document]:
    """Return the state of each consumer group, with its reader in words, what it has lost, and ages for times."""
    return [
        {
            "group": name,
            **state.model_dump(mode="json"),
            "reader": printable(f"{state.program}, pid {state.pid} on {state.host}") if state.pid else "",
            "lost": state.lost_steps,
            "committed_age_s": _age_s(state.committed_unix_s, unix_s),
        }
        for name, state in sorted(states.items())
    ]


def _in_order(task: str) -> tuple[bool, list[tuple[int, str]]]:
    parts = re.findall(r"\d+|\D+", task)
    return task == OTHER_TASKS, [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


class StateReader:
    """Reads the document repeatedly, and slow facts only every few seconds. One thread at a time."""

    def __init__(self, reader: FactsReader) -> None:
        self._reader = reader
        self.facts: Facts | None = None
        self._slow = SlowFacts()
        self._slow_at = -math.inf
        self._processes: Mapping[str, ProcessState] = {}

    def read(self) -> Document:
        """Return the document as of now. Waits some seconds at most. Raises what `FactsReader.read` raises."""
        self.facts = facts = self._reader.read()
        if time.monotonic() - self._slow_at >= SLOW_S and not facts.redis_error:
            self._read_slowly(facts)
        return fleet_state(facts, find(facts), self._slow)

    def _read_slowly(self, facts: Facts) -> None:
        self._slow_at = time.monotonic()
        server = self._slow.server
        if (view := self._reader.view) is not None:
            with suppress(RedisUnavailableError):
                server = view.server_info()
        shares = cpu_shares(self._processes, facts.processes)
        self._slow = SlowFacts(server, shares or self._slow.cpu_shares)
        self._processes = facts.processes


def cpu_shares(before: Mapping[str, ProcessState], now: Mapping[str, ProcessState]) -> dict[str, float]:
    """Return the CPU seconds per second of each process between two moments. Leave out processes started meanwhile."""
    shares = {}
    for name, state in now.items():
        earlier = before.get(name)
        if earlier is not None and earlier.pid == state.pid and state.unix_s > earlier.unix_s and state.pid:
            shares[name] = max(0.0, state.cpu_s - earlier.cpu_s) / (state.unix_s - earlier.unix_s)
    return shares


def ledger(books: FleetLedger, rows: Iterable[LedgerRow] = ()) -> Document:
    """Return books as a flow of agent steps: stepped, each loss, queued, and committed.

    `rows` split the queued steps into those with workers and those with the broker or the learner.
    """
    lives = list(rows)
    losses: list[Document] = [
        *(_loss("discarded", reason, steps, None) for reason, steps in books.discarded.items()),
        *(_loss("dropped", reason, steps, chunks) for reason, (steps, chunks) in books.dropped.items()),
    ]
    lost = sum(loss["agent_steps"] for loss in losses if loss_of(loss["kind"], loss["reason"]).by)
    return {
        "stepped": books.stepped,
        "committed": books.committed[0],
        "committed_chunks": books.committed[1],
        "committed_share": books.committed[0] / books.stepped if books.stepped else None,
        "queued": books.queued,
        "with_workers": sum(row.totals.open for row in lives),
        "with_broker_or_learner": sum(row.held[0] for row in lives),
        "losses": sorted((loss for loss in losses if loss["agent_steps"]), key=lambda loss: -loss["agent_steps"]),
        "undelivered": sum(loss["agent_steps"] for loss in losses),
        "lost": lost,
        "lost_share": lost / books.stepped if books.stepped else None,
        "balance": books.balance(),
    }


def _loss(kind: str, reason: str, steps: int, chunks: int | None) -> Document:
    meaning = loss_of(kind, reason).meaning
    return {"kind": kind, "reason": reason, "agent_steps": steps, "chunks": chunks, "meaning": meaning}


def _split(snapshot: Snapshot) -> tuple[Document, Document]:
    """Return two tables of gauges and totals: those without labels by name, the others by name and label value."""
    plain: Document = dict.fromkeys(_COUNTERS, 0) if snapshot.totals else {}
    labels: Document = {}
    for field_name, value in {**snapshot.totals, **snapshot.supervisor_totals, **snapshot.gauges}.items():
        name, label, text = unlabelled(field_name)
        if label:
            labels.setdefault(name, {})[text] = value
        else:
            plain[name] = value
    return plain, labels


def _severity(facts: Facts, findings: Sequence[Finding], line: str) -> str:
    if line.startswith("Ended"):
        return "ended"
    severities = {finding.severity for finding in findings}
    if facts.redis_error:
        return "error"
    return next((severity for severity in ("error", "warning") if severity in severities), "ok")


def _fleet(facts: Facts) -> Document:
    config, snapshot = facts.config, facts.snapshot
    supervisor = facts.processes.get("supervisor")
    return {
        "id": snapshot.fleet_id,
        "env": snapshot.env or (config.sampling.env if config is not None else ""),
        "version": snapshot.version,
        "workers_wanted": workers_wanted(facts),
        "state": supervisor.state if supervisor is not None else "",
        "started_unix_s": supervisor.started_unix_s if supervisor is not None else None,
        "reported_unix_s": snapshot.reported_unix_s,
        "ended_unix_s": snapshot.ended_unix_s,
        "run_dir": str(facts.run_dir) if facts.run_dir is not None else "",
        "endpoints": dict(facts.endpoints),
    }


def workers_wanted(facts: Facts) -> int | None:
    """Return how many workers the supervisor keeps here and on Ray: as configured, or as was asked for since."""
    if facts.config is None:
        return None
    folder, files = facts.run_dir, ("workers.json", "ray.json")
    asked, on_ray = (asked_workers(folder, name, MOST_WORKERS_ON_RAY) if folder else None for name in files)
    return (facts.config.fleet.workers if asked is None else asked) + (on_ray or 0)


def _redis(facts: Facts, slow: SlowFacts) -> Document:
    server = slow.server
    return {
        "error": facts.redis_error,
        "age_s": round(facts.redis_age_s, 1),
        "away_since_unix_s": facts.unix_s - facts.redis_age_s if facts.redis_error else None,
        "is_old": facts.is_old and facts.redis_age_s > STALE_S,
        "may_ask": server is not None,
        "server": {name: server[name] for name in _SERVER_FIELDS if name in server} if server else {},
    }


def _sums(facts: Facts) -> Document:
    """Return the few numbers that no gauge and no total has."""
    workers = facts.snapshot.workers.values()
    restarts: dict[str, int] = {}
    for state in facts.processes.values():
        restarts[state.role] = restarts.get(state.role, 0) + state.restarts
    return {
        "workers_connected": len(workers),
        "workers_blocked_now": sum(bool(worker.get("blocked")) for worker in workers),
        **added_up(workers),
        "restarts": sum(restarts.values()),
        "restarts_by_role": restarts,
    }


def _workers(facts: Facts, slow: SlowFacts) -> list[Document]:
    snapshot = facts.snapshot
    by_slot: dict[int, dict[tuple[int, int], LedgerRow]] = {}
    for (slot, incarnation), row in snapshot.rows.items():
        by_slot.setdefault(slot, {})[slot, incarnation] = row
    for slot, lives in snapshot.folded.items():
        by_slot.setdefault(slot, {})[slot, 0] = lives.row
    processes = {state.slot: state for state in facts.processes.values() if state.slot is not None}
    slots = sorted(by_slot.keys() | processes.keys() | snapshot.workers.keys())
    return [_worker(facts, slow, slot, processes.get(slot), by_slot.get(slot, {})) for slot in slots]


def _worker(
    facts: Facts,
    slow: SlowFacts,
    slot: int,
    process: ProcessState | None,
    rows: Mapping[tuple[int, int], LedgerRow],
) -> Document:
    """Return the newest state of a slot: the broker's report, its process, and the books of all its lives."""
    told = facts.snapshot.workers.get(slot, {})
    newest = rows.get(max(rows, default=(slot, 0)))
    steps = sum(row.totals.steps_of_envs for row in rows.values())
    state = process.state if process is not None else "connected" if told else "gone"
    state = "stopped by a signal" if process is not None and process.is_stopped else state
    doing = process.doing if process is not None else ""
    # What it did before it joined may be seconds old.
    shown = "" if told and doing in ("loading", "building") else doing
    waits = f"waits: {told['blocked']}" if told.get("blocked") else ""
    books = ledger(add_up(rows), rows.values())
    return {
        "env_steps_all": steps,
        "agent_steps_all": sum(row.totals.stepped for row in rows.values()),
        "episodes_all": sum(row.totals.episodes for row in rows.values()),
        "env_failures_all": sum(row.totals.env_failures for row in rows.values()),
        **told,
        "slot": slot,
        "name": f"worker-{slot}",
        "state": state,
        "status": "; ".join(said for said in (state, shown, waits) if said),
        "is_connected": bool(told),
        "incarnation": told.get("incarnation", newest.incarnation if newest is not None else 0),
        "lives": facts.snapshot.incarnations.get(slot, 0),
        "restarts": process.restarts if process is not None else None,
        "last_words": process.last_words if process is not None else "",
        "doing": doing,
        "silent_s": process.silent_s if process is not None else None,
        "cpu_share": slow.cpu_shares.get(f"worker-{slot}", told.get("cpu_share")),
        "rss_bytes": process.rss_bytes or None if process is not None else told.get("rss_bytes"),
        "ledger": books,
        "lost": books["lost"],
    }


def _processes(facts: Facts, slow: SlowFacts, labelled: Document) -> Iterator[Document]:
    """Yield the supervisor's processes, and broker, learner and Redis from elsewhere with what they tell themselves."""
    for state in facts.processes.values():
        age_s = None if state.state in (STOPPED, GONE) else _age_s(state.started_unix_s or None, facts.unix_s)
        yield {**state.model_dump(mode="json"), "cpu_share": slow.cpu_shares.get(state.name), "age_s": age_s}
    shares, sizes = (dict(labelled.get(f"process_{name}", {})) for name in ("cpu_share", "rss_bytes"))
    if slow.server and "used_memory_rss" in slow.server:
        sizes[_REDIS] = slow.server["used_memory_rss"]
    roles = {state.role for state in facts.processes.values()}
    for role in ("broker", "learner", _REDIS):
        if role in roles or role not in sizes:
            continue
        state = ProcessState(name=role, role=role, rss_bytes=max(0, int(number(sizes[role]))))
        yield {**state.model_dump(mode="json"), "cpu_share": shares.get(role), "age_s": None}


def _learner(facts: Facts) -> Document:
    lease, row = facts.snapshot.lease, facts.learner_row
    return {
        "epoch": lease.get("epoch"),
        "is_connected": None if "connected" not in lease else bool(lease["connected"]),
        "since_unix_s": lease.get("since_unix_s"),
        "committed_unix_s": lease.get("committed_unix_s"),
        "committed_age_s": _age_s(lease.get("committed_unix_s"), facts.unix_s),
        "logged_unix_s": row.unix_s if row is not None else None,
        "logged": dict(row.values) if row is not None else {},
    }


def _age_s(since_unix_s: float | None, unix_s: float) -> float | None:
    return None if since_unix_s is None else round(max(0.0, unix_s - since_unix_s), 1)
