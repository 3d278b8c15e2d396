"""Facts about a fleet of two workers, healthy or with one thing wrong, without any process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.deploy.monitoring.facts import Facts
from headrace.deploy.run.redis_view import Snapshot
from headrace.schemas.accounts.process_state import ProcessState
from headrace.schemas.accounts.redis_keys import TOLD_SETTINGS
from headrace.schemas.settings.config import FleetConfig, LearnerSection

NOW = 1_795_280_000.0
RUN = Path("/runs/a")
AT = {"learner": "tcp://127.0.0.1:5702", "worker": "tcp://127.0.0.1:5701", "clients-0": "tcp://127.0.0.1:5801"}
GAUGES = {"unix_s": NOW, "env_steps_per_s": 900.0, "weights_seq": 7.0, "held_batches": 2.0, "held_bytes": 4096.0}
LEASE = {"epoch": 1, "connected": 1.0, "since_unix_s": NOW - 500, "committed_unix_s": NOW - 0.5}
WORKER = {"incarnation": 1, "pid": 70, "host": "here", "weights_seq": 7, "blocked": "", "unix_s": NOW - 0.5}
STILL = {"env_steps_per_s": 0.0}


def process(name: str, role: str, **changes: Any) -> ProcessState:
    slot = int(name.rpartition("-")[2]) if role == "worker" else None
    usual = {"slot": slot, "incarnation": 1, "pid": 70, "started_unix_s": NOW - 600}
    return ProcessState(name=name, role=role, **{**usual, **changes})


def healthy(**changes: Any) -> Facts:
    """A fleet of two workers that learns."""
    own = [("supervisor", "supervisor"), ("redis", "redis"), ("broker", "broker"), ("learner", "learner")]
    own += [("worker-0", "worker"), ("worker-1", "worker")]
    facts = Facts(
        unix_s=NOW,
        snapshot=Snapshot(
            fleet_id="demo",
            gauges=GAUGES,
            totals={"env_steps_total": 9000},
            workers={0: WORKER, 1: WORKER},
            lease=LEASE,
            reported_unix_s=NOW,
        ),
        processes={name: process(name, role) for name, role in own},
        config=FleetConfig(),
        endpoints=AT,
        run_dir=RUN,
        disk_free_bytes=1 << 40,
    )
    return replace(facts, **changes)


def told(facts: Facts | None = None, gauges: dict[str, float] | None = None, **changes: Any) -> Facts:
    """These facts with another snapshot."""
    facts = facts or healthy()
    return replace(facts, snapshot=replace(facts.snapshot, gauges={**GAUGES, **(gauges or {})}, **changes))


def having(name: str, facts: Facts | None = None, **changes: Any) -> Facts:
    """These facts with another state of one process; None: without it."""
    facts = facts or healthy()
    changed = facts.processes[name].model_copy(update=changes)
    return replace(facts, processes={**facts.processes, name: changed})


def without(*names: str, facts: Facts | None = None) -> Facts:
    facts = facts or healthy()
    return replace(facts, processes={name: one for name, one in facts.processes.items() if name not in names})


def blocked(by: str = "window", for_s: float = 20.0, slots: tuple[int, ...] = (0, 1)) -> dict[int, dict[str, Any]]:
    waits = {**WORKER, "blocked": by, "blocked_since_unix_s": NOW - for_s, "held_batches": 16}
    return {slot: waits if slot in slots else WORKER for slot in (0, 1)}


def stalled(for_s: float, lease: dict[str, Any] | None = None, by: str = "window") -> Facts:
    """All workers wait for a commit for `for_s` seconds."""
    lease = {**LEASE, "committed_unix_s": NOW - for_s, **(lease or {})}
    return told(gauges=STILL, workers=blocked(by, for_s), lease=lease)


def of_own_learner(facts: Facts) -> Facts:
    """These facts, of a fleet without a learner of its own."""
    config = FleetConfig(learner=LearnerSection(enabled=False))
    return replace(without("learner", facts=facts), config=config)


def by_redis_alone(facts: Facts) -> Facts:
    """These facts as a machine without the run directory has them."""
    assert facts.config is not None
    settings = {key: facts.config.value_of(key) for key in TOLD_SETTINGS}
    snapshot = replace(facts.snapshot, settings=settings)
    return replace(facts, config=None, run_dir=None, endpoints={}, snapshot=snapshot)
