"""Checks of single processes: dead, stopped, silent, or not ready yet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.deploy.monitoring.connecting import env_host_command
from headrace.deploy.monitoring.facts import Facts
from headrace.deploy.monitoring.finding_kinds import Finding, Observation, observe
from headrace.deploy.monitoring.processes import GONE, SUPERVISOR
from headrace.deploy.process.restarts import WINDOW_S
from headrace.deploy.report.progress import number
from headrace.schemas.accounts.process_state import ProcessState
from headrace.schemas.basics.printable import one_line
from headrace.schemas.peers.heartbeat_interval import heartbeat_interval, least_interval

SILENT_S = 3.0
"""Seconds without a sign of life after which a process is named, if the fleet takes no step."""

_MANY_DEATHS = 3
_LATELY_S = 300.0
"""Seconds for which a restart is told."""
_PHASES = ("loading", "building", "rebuilding")
"""Phases of a worker. Any other word names a long call of an env, a policy or a callback."""
_LATE_HEARTBEATS = 3
_LARGE_BYTES = 1 << 20
"""Bytes of a batch behind which a heartbeat may come late."""
_ENDED_KINDS = {"restarting": "process_restarting", "failed": "process_failed"}
NUMBER = re.compile(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?")
"""The numbers in an error: errors of one cause differ in them."""
_SILENT_KINDS = {"broker": "broker_silent", "learner": "learner_silent", "env-host": "env_host_silent"}

States = Mapping[int, Mapping[str, Any]]


def supervisor_check(facts: Facts) -> Iterator[Observation]:
    """Yield what is wrong with the supervisor."""
    state = facts.processes.get(SUPERVISOR)
    if state is not None and state.state == GONE:
        sentence = f"the supervisor (pid {state.pid}) and its processes are gone and noted no end; see its log"
        again = facts.in_run_dir("headrace up --resume")
        yield observe(facts, "supervisor_gone", SUPERVISOR, sentence, command=again)
    elif state is not None and state.is_stopped:
        yield _stopped(facts, state)


def between_lives(facts: Facts) -> Iterator[Observation]:
    """Yield the processes that have ended: restarting, fenced, failed, or in a crash loop; one for each cause."""
    ended: dict[tuple[str, str, str], list[ProcessState]] = {}
    for state in facts.processes.values():
        if state.state == "fenced":
            yield observe(facts, "learner_fenced", state.name, "a newer learner has taken over from the fleet's own")
            continue
        kind = "crash_loop" if _dies_often(facts, state) else _ENDED_KINDS.get(state.state)
        if kind:
            ended.setdefault((kind, *_cause(state)), []).append(state)
    for (kind, *_), states in ended.items():
        yield _ended(facts, kind, states)


def restarted(facts: Facts) -> Iterator[Finding]:
    """Yield the processes that were started again within the last minutes, and run; one for each cause."""
    again: dict[tuple[str, str], list[ProcessState]] = {}
    for state in facts.processes.values():
        lately = facts.unix_s - state.started_unix_s < _LATELY_S
        if state.state == "running" and state.restarts and lately and not _dies_often(facts, state):
            again.setdefault(_cause(state), []).append(state)
    for states in again.values():
        of, have, last = _in_words(facts, states)
        since = min(state.started_unix_s for state in states)
        whom, log = names_of([state.name for state in states]), facts.in_run_dir("tail", f"logs/{states[0].name}.log")
        yield Finding("restarted", "info", whom, f"{of} {have} started again ({last})", since, command=log)


def _cause(state: ProcessState) -> tuple[str, str]:
    """Return role and end of a process that has ended; ends of one cause are equal."""
    end, _, error = state.last_words.partition(": ")
    return state.role, f"{end}: {NUMBER.sub('#', error)}"


def _in_words(facts: Facts, states: Sequence[ProcessState]) -> tuple[str, str, str]:
    """Return who these processes of one role are, "has" or "have", and how the first one ended."""
    first, of, have, it = states[0], states[0].name, "has", "it"
    if len(states) > 1:
        of_all = sum(one.role == first.role for one in facts.processes.values())
        of, have, it = f"{len(states)} of {of_all} {first.role}s", "have", first.name
    return of, have, f"{it} ended with {first.last_words:.100}" if first.last_words else f"{it} has ended"


def _ended(facts: Facts, kind: str, states: Sequence[ProcessState]) -> Observation:
    """Return the observation that these processes of one role have ended for one cause."""
    of, have, last = _in_words(facts, states)
    if kind == "crash_loop":
        deaths = sum(state.recent_deaths for state in states)
        sentence = f"{of} {have} ended {deaths} times within {WINDOW_S:g} s of running; the last time {last}"
    elif kind == "process_restarting":
        sentence = f"waiting for {of} to start again ({last})"
    else:
        sentence = f"{of} {have} failed: {last}"
    slots = tuple(state.slot for state in states if state.slot is not None)
    names = names_of([state.name for state in states])
    return observe(
        facts, kind, names, sentence, command=facts.in_run_dir("tail", f"logs/{states[0].name}.log"), slots=slots
    )


def stuck(facts: Facts, states: States) -> dict[str, Observation]:
    """Return an observation by name for each process that lives but does nothing.

    The supervisor's states judge the fleet's own processes. The broker's `states` judge workers started elsewhere; they
    are empty if the broker's report is old.
    """
    found = {state.name: _why_stuck(facts, state, states) for state in facts.processes.values()}
    elsewhere = {slot: state for slot, state in states.items() if f"worker-{slot}" not in facts.processes}
    found |= {f"worker-{slot}": _why_stuck_elsewhere(facts, slot, state) for slot, state in elsewhere.items()}
    return {name: one for name, one in found.items() if one is not None}


def not_ready(facts: Facts, states: States) -> Iterator[Observation]:
    """Yield the fleet's own workers that load, that build their envs, or that the broker does not know."""
    workers = [state for state in facts.processes.values() if state.role == "worker" and state.state == "running"]
    loading = [state for state in workers if state.doing == "loading"]
    building = [state for state in workers if state.doing == "building"]
    if loading:
        whom, age_s = names_of([state.name for state in loading]), _age(facts, loading)
        sentence = f"waiting for {whom} to load ({age_s:.0f} s so far)"
        yield observe(facts, "worker_loading", whom, sentence, age_s)
    if building:
        yield _building(facts, building)
    if facts.is_old or not facts.snapshot.gauges:
        return
    for state in [s for s in workers if s.doing not in _PHASES and s.slot not in states and not _has_left(facts, s)]:
        sentence = f"waiting for {state.name} (pid {state.pid}) to join the broker"
        for_s = facts.unix_s - max(state.started_unix_s, facts.snapshot.started_unix_s or 0.0)
        yield observe(facts, "worker_not_joined", state.name, sentence, for_s)


def _has_left(facts: Facts, state: ProcessState) -> bool:
    """Return whether the books of the worker's life are closed: it has left the broker, and its process is to end."""
    life = state.slot or 0, state.incarnation
    return life in facts.snapshot.rows and facts.snapshot.rows[life].closed


def joins_blocked(facts: Facts) -> Iterator[Observation]:
    """Yield that no peer can join the broker, and why."""
    if why := facts.snapshot.joins_blocked:
        log = facts.in_run_dir("tail", "logs/broker.log")
        yield observe(facts, "joins_blocked", "broker", f"no peer can join the broker: {one_line(why)}", command=log)


def lost_elsewhere(facts: Facts) -> Iterator[Observation]:
    """Yield the workers from elsewhere whose connection has ended and whose books are open."""
    snapshot = facts.snapshot
    newest: dict[int, int] = {}
    for slot, incarnation in snapshot.rows:
        newest[slot] = max(incarnation, newest.get(slot, 0))
    for slot, incarnation in newest.items():
        name = f"worker-{slot}"
        if name in facts.processes or slot in snapshot.workers or snapshot.rows[slot, incarnation].closed:
            continue
        sentence = f"{name} (incarnation {incarnation}) is lost: its connection ended without a word"
        yield observe(facts, "worker_lost", name, sentence)


def names_of(names: Sequence[str]) -> str:
    """Return some names in few words."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _dies_often(facts: Facts, state: ProcessState) -> bool:
    lately = not state.started_unix_s or facts.unix_s - state.started_unix_s < WINDOW_S
    return state.recent_deaths >= _MANY_DEATHS and lately and state.state in ("running", "restarting")


def _stopped(facts: Facts, state: ProcessState) -> Observation:
    for_s = state.silent_s if state.silent_s > 0 else None
    sentence = f"waiting for {state.name} (pid {state.pid}), which is stopped"
    return observe(facts, "process_stopped", state.name, sentence, for_s, command=f"kill -CONT {state.pid}")


def _why_stuck(facts: Facts, state: ProcessState, states: States) -> Observation | None:
    """Return an observation of a running process that does nothing; None for a process with signs of life."""
    if not state.pid or state.state not in ("running", "draining") or state.role == SUPERVISOR:
        return None
    name, silent_s = f"{state.name} (pid {state.pid})", state.silent_s
    if state.is_stopped:
        return _stopped(facts, state)
    if state.slot is None:
        kind = _SILENT_KINDS.get(state.role, "")
        if not kind or silent_s <= SILENT_S:
            return None
        return observe(facts, kind, state.name, f"waiting for {name}, silent for {silent_s:.0f} s", silent_s)
    if silent_s > SILENT_S and state.doing not in _PHASES:
        does = state.doing or f"its env or a callback has not returned for {silent_s:.0f} s"
        sentence = f"waiting for {name}: {does}"
        return observe(facts, "env_hangs", state.name, sentence, silent_s)
    if silent_s > SILENT_S and state.doing == "rebuilding":
        sentence = f"waiting for {name}, which has been building an env again for {silent_s:.0f} s"
        return observe(facts, "env_rebuilding", state.name, sentence, silent_s)
    told = states.get(state.slot, {})
    if state.doing in _PHASES or told.get("incarnation") != state.incarnation:
        return None
    return _why_envs_silent(facts, state.name, name, told)


def _why_stuck_elsewhere(facts: Facts, slot: int, told: Mapping[str, Any]) -> Observation | None:
    key = f"worker-{slot}"
    name = f"{key} (pid {number(told.get('pid')):.0f} on {one_line(str(told.get('host', '')))})"
    if (silent_s := _late_s(facts, told)) > 0:
        sentence = f"waiting for {name}, silent for {silent_s:.0f} s: {_why_late(facts, slot, told)}"
        return observe(facts, "worker_late", key, sentence, silent_s)
    return _why_envs_silent(facts, key, name, told)


def _late_s(facts: Facts, told: Mapping[str, Any]) -> float:
    """Return for how long a worker from elsewhere has been silent; 0.0 while its next heartbeats may come."""
    silent_s = (facts.snapshot.reported_unix_s or 0.0) - number(told.get("unix_s"))
    lease_s = number(facts.setting("broker.lease_s")) or 10.0
    heartbeat_s = heartbeat_interval(least_interval(lease_s), lease_s, len(facts.snapshot.workers))
    return silent_s if silent_s > max(SILENT_S, _LATE_HEARTBEATS * heartbeat_s) else 0.0


def _why_late(facts: Facts, slot: int, told: Mapping[str, Any]) -> str:
    """Return the cause that the numbers of a silent worker, and of the others on its machine, leave."""
    host = one_line(str(told.get("host", "")))
    others = [w for key, w in facts.snapshot.workers.items() if key != slot and w.get("host") == told.get("host")]
    heard = sum(not _late_s(facts, other) for other in others)
    itself, network = "its process is stopped, or a call holds Python's lock", f"the network to {host} is slow or down"
    nbytes = number(told.get("sent_bytes")) / max(number(told.get("accepted")), 1.0)
    if nbytes >= _LARGE_BYTES:
        network += f" (its heartbeats wait behind batches of {nbytes / 2**20:.1f} MiB)"
    elif heard:
        return f"{itself}; it is not the network, as {heard} more of {host} answer"
    elif others:
        return f"so are all others of {host}: {network}, or that machine is stopped"
    return f"{network}, {itself}"


def _why_envs_silent(facts: Facts, key: str, name: str, told: Mapping[str, Any]) -> Observation | None:
    silent_s = number(told.get("env_silence_s"))
    if silent_s <= SILENT_S:
        return None
    if _is_remote(facts) and isinstance(told.get("env_hosts"), Mapping) and not hosts_of(told)[0]:
        sentence = f"waiting for {name}: no env host serves its envs, for {silent_s:.0f} s"
        return observe(facts, "no_env_hosts", key, sentence, silent_s, command=host_command(facts))
    call = one_line(str(told.get("env_call", "")))
    sentence = f"waiting for {name}: {call or f'none of its envs has answered for {silent_s:.0f} s'}"
    limit = re.search(r"\((?:2 \* )?(env_\w+_timeout_s) = ", call)
    return observe(facts, "envs_silent", key, sentence, silent_s, limit=f"sampling.{limit[1]}" if limit else "")


def _building(facts: Facts, building: list[ProcessState]) -> Observation:
    whom, age_s = names_of([state.name for state in building]), _age(facts, building)
    if not _is_remote(facts):
        num_envs = number(facts.setting("sampling.num_envs"))
        what = f"{num_envs:.0f} envs each" if num_envs else "its envs"
        sentence = f"waiting for {whom} to build {what} ({age_s:.0f} s so far)"
        return observe(facts, "worker_building", whom, sentence, age_s)
    if facts.setting("fleet.env_hosts"):
        sentence = f"waiting for the env hosts of {whom} ({age_s:.0f} s so far)"
        return observe(facts, "worker_building", whom, sentence, age_s)
    sentence = f"waiting for env hosts for {whom}"
    return observe(facts, "no_env_hosts", whom, sentence, age_s, command=host_command(facts))


def _is_remote(facts: Facts) -> bool:
    return bool(facts.setting("sampling.env_placement") == "remote")


def hosts_of(told: Mapping[str, Any]) -> tuple[float, float]:
    """Return how many env hosts a worker has, and how many its envs need; zeros if its envs need no host."""
    hosts = told.get("env_hosts")
    return (number(hosts.get("connected")), number(hosts.get("wanted"))) if isinstance(hosts, Mapping) else (0.0, 0.0)


def host_command(facts: Facts) -> str:
    """Return the command that starts an env host; "" without the fleet's settings."""
    config, run_dir = facts.config, facts.run_dir
    return "" if config is None or run_dir is None else env_host_command(config, facts.endpoints, run_dir)


def _age(facts: Facts, states: Sequence[ProcessState]) -> float:
    return max(max(0.0, facts.unix_s - state.started_unix_s) for state in states)
