"""Finds the limit of a running fleet's pace: its learner, its envs, its policy, or the way between them.

The learner and the workers measure for how much of their time they wait for one another. The side that waits least is
the limit. Each sentence has one place: `headrace up`, `why`, `top`, the page and the report show the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.deploy.monitoring.facts import Facts
from headrace.deploy.monitoring.finding_kinds import Finding, with_value
from headrace.deploy.monitoring.processes import SUPERVISOR
from headrace.deploy.report.progress import number
from headrace.schemas.accounts.ledger import Drop
from headrace.schemas.accounts.redis_keys import LEARNER_TIME, labelled
from headrace.schemas.accounts.worker_figures import TIME_PARTS
from headrace.schemas.basics.process_usage import own_cores
from headrace.schemas.messages.learner_messages import LEARNER_PARTS

_SETTLED_S = 15.0
"""Seconds after which the time of a start no longer counts in the shares, which cover 10 s."""
_WAITS = 0.2
"""Share of its time from which on a side counts as waiting for the other one."""
_BUSY, _MOST = 0.9, 0.5
_DROPS = tuple(labelled("dropped_agent_steps_total", "reason", reason) for reason in (Drop.OVERFLOW, Drop.STALE))

_OF_LEARNER = {
    "train": ("trains", "a shorter update or a faster device helps, and more workers do not"),
    "decode": ("reads batches for", "larger batches help: raise sampling.rollout_fragment_length"),
    "publish": ("publishes for", "publish less often, or smaller weights"),
}
"""Part of the learner's time -> what it does, and what helps."""

_OF_WORKERS = {
    "env": ("the envs are the limit", "in envs", "{more}"),
    "inference": (
        "the policy in the workers is the limit",
        "on choosing actions",
        "a smaller module helps, or a larger sampling.num_envs, which share a forward pass; {more}",
    ),
    "connectors": ("the connectors in the workers are the limit", "in connectors", "cheaper connectors help; {more}"),
    "serialise": (
        "the shipping of chunks is the limit",
        "on cutting, encoding and sending them",
        'a larger sampling.rollout_fragment_length helps, or sampling.infos = "none"; {more}',
    ),
    "other": ("the workers are the limit", "on callbacks, weights and bookkeeping", "{more}"),
}
"""Part of the workers' time -> who is the limit, how their time is spent, and what helps."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The limit of a fleet's pace: `sentence` names the limit and gives its shares, `remedy` says what would help."""

    sentence: str
    remedy: str

    def in_words(self) -> str:
        """Return both as sentences."""
        return ". ".join(part[:1].upper() + part[1:] for part in (self.sentence, self.remedy)) + "."


def find_bottleneck(facts: Facts, findings: Sequence[Finding]) -> Bottleneck | None:
    """Return what limits the pace; None if nothing clearly does, an error stands in the way, or data is too little."""
    learner, workers = _learner_shares(facts), _worker_shares(facts)
    if not learner or not workers or not _goes_on(facts) or any(one.severity == "error" for one in findings):
        return None
    idle, blocked = learner["wait"], workers["wait"]
    if slow := next((one for one in findings if one.kind == "group_slow"), None):
        what = f"the workers wait {_percent(blocked)} of their time"
        return Bottleneck(f"the reader of {slow.whom} is the limit: {what}", "a quicker reader helps")
    if max(idle, blocked) < _WAITS:
        return _slow_learner(learner, "and steps are dropped") if _drops(facts) else None
    if idle <= blocked / 3:
        return _slow_learner(learner, f"and the workers wait {_percent(blocked)} of theirs")
    if any(one.whom == "learner" for one in findings):
        return None  # it pauses: the shares of its time are older than the workers'
    if blocked <= idle / 3:
        return _slow_workers(facts, workers, idle)
    return _between(facts, idle, blocked) if min(idle, blocked) >= _WAITS else None


def _slow_learner(shares: Mapping[str, float], sign: str) -> Bottleneck:
    busy = max(_OF_LEARNER, key=lambda part: shares[part])
    does, remedy = _OF_LEARNER[busy]
    what = f"it {does} {_percent(shares[busy])} of its time, waits for data {_percent(shares['wait'])}, {sign}"
    return Bottleneck(f"the learner is the limit: {what}", remedy)


def _slow_workers(facts: Facts, shares: Mapping[str, float], idle: float) -> Bottleneck:
    busy = max(_OF_WORKERS, key=lambda part: shares[part])
    who, spent, remedy = _OF_WORKERS[busy]
    who = who if shares[busy] >= _MOST else "the workers are the limit"
    what = f"the workers spend {_percent(shares[busy])} of their time {spent}"
    sentence = f"{who}: {what}, and the learner waits for data {_percent(idle)} of its time"
    return Bottleneck(sentence, remedy.format(more=_more_workers(facts, in_envs=busy == "env")))


def _between(facts: Facts, idle: float, blocked: float) -> Bottleneck:
    """Return what makes the learner and the workers wait for each other."""
    waits = f"the learner waits {_percent(idle)} of its time, and the workers wait {_percent(blocked)} of theirs"
    if facts.setting("serving.enabled"):
        return Bottleneck(f"the clients are the limit: {waits}", "more clients help, or quicker ones")
    if facts.setting("sampling.synchronous"):
        return Bottleneck(
            f"learner and workers take turns: {waits}", "sampling.synchronous = false lets them work at the same time"
        )
    used = facts.snapshot.gauges.get(labelled("process_cpu_share", "role", "broker"), 0.0)
    if tight := _tight_limit(facts):
        has = f"it has room for {tight[1]:.0f} of the batches of each worker"
        return Bottleneck(f"the broker is the limit: {waits}; {has}", f"raise {with_value(facts, tight[0])}")
    if used >= _BUSY:
        return Bottleneck(
            f"the broker is the limit: {waits}; its process uses {_percent(used)} of a core",
            "larger batches help: raise sampling.rollout_fragment_length; or use several brokers",
        )
    if busy := _busy_cores(facts):
        return Bottleneck(f"the cores are the limit: {waits}; {busy}", "fewer workers help, or another machine")
    window = with_value(facts, "worker.window_batches")
    if facts.config is not None and facts.config.worker.window_batches is None:
        window = "worker.window_batches, else it follows the learner's updates"
    return Bottleneck(
        f"the way between learner and workers is the limit: {waits}",
        f"a larger window helps ({window}), or a faster network",
    )


def _tight_limit(facts: Facts) -> tuple[str, float] | None:
    """Return the setting by which the broker has less room for a worker than its own window, and for how many batches.

    None where the workers' windows are the tighter limit.
    """
    if facts.setting("broker.overflow") == "drop_oldest":
        return None
    workers = max(1, len(facts.snapshot.workers))
    seen = [facts.snapshot.gauges, *(values for _, values in facts.recent)]
    batch = max((one.get("window_bytes", 0.0) / max(1.0, one.get("window_batches", 0.0)) for one in seen), default=0.0)
    most_batches, most_bytes = (number(facts.setting(f"broker.max_held_{unit}")) for unit in ("batches", "bytes"))
    rooms = {"broker.max_held_batches": most_batches // workers} if most_batches else {}
    rooms |= {"broker.max_held_bytes": most_bytes // workers // batch} if most_bytes and batch else {}
    limit = min(rooms, key=lambda name: rooms[name], default="")
    window = number(facts.setting("worker.window_batches"))
    return (limit, max(1.0, rooms[limit])) if limit and rooms[limit] < window else None


def _more_workers(facts: Facts, *, in_envs: bool) -> str:
    if busy := _busy_cores(facts):
        return f"{busy}, so more workers need another machine"
    own = ' or sampling.env_placement = "process"' if facts.setting("sampling.env_placement") == "inline" else ""
    return f"more workers{own if in_envs else ''} may use idle cores"


def _busy_cores(facts: Facts) -> str:
    """Return that this machine, where the fleet was started, has more to do than its cores can; "" if it has not."""
    cores = own_cores()
    is_busy = facts.run_dir is not None and os.getloadavg()[0] >= cores
    return f"all {cores} cores of this machine are busy" if is_busy else ""


def _learner_shares(facts: Facts) -> dict[str, float]:
    """Return the learner's shares by part; empty for one that came a moment ago, or has not told them."""
    gauges, lease = facts.snapshot.gauges, facts.snapshot.lease
    shares = {part: gauges.get(labelled(LEARNER_TIME, "part", part), -1.0) for part in LEARNER_PARTS}
    told = lease.get("connected") and _is_settled(facts, lease.get("since_unix_s")) and min(shares.values()) >= 0.0
    return shares if told else {}


def _worker_shares(facts: Facts) -> dict[str, float]:
    """Return the workers' mean shares by part; empty while half of them came a moment ago, or have not told them."""
    rows = facts.snapshot.workers.values()
    told: list[Mapping[str, Any]] = [
        shares
        for row in rows
        if isinstance(shares := row.get("time_share"), Mapping) and _is_settled(facts, row.get("joined_unix_s"))
    ]
    if not told or 2 * len(told) < len(rows):
        return {}
    return {part: sum(number(shares.get(part)) for shares in told) / len(told) for part in TIME_PARTS}


def _is_settled(facts: Facts, since_unix_s: Any) -> bool:
    since = number(since_unix_s)
    return bool(since) and (facts.snapshot.reported_unix_s or 0.0) - since >= _SETTLED_S


def _goes_on(facts: Facts) -> bool:
    """Return whether the fleet runs and has taken steps in the last two minutes: a long update may hold it up."""
    supervisor = facts.processes.get(SUPERVISOR)
    if facts.is_old or (supervisor is not None and supervisor.state != "running"):
        return False
    before = facts.recent[0][1].get("env_steps_total", 0) if facts.recent else 0
    return facts.snapshot.totals.get("env_steps_total", 0) > before


def _drops(facts: Facts) -> bool:
    """Return whether steps were dropped in the last two minutes because the learner did not take them in time."""
    now, before = facts.snapshot.totals, facts.recent[0][1] if facts.recent else {}
    return any(now.get(name, 0) > before.get(name, 0) for name in _DROPS)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
