"""Injection of each kind of fault. An injection returns the function that undoes it.

A fault that cannot be injected at its moment (its target is between two lives) is skipped, and the report says so.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Callable
from typing import Any

import redis

from headrace.broker.redis.client import REDIS_FAILURES, connect
from headrace.deploy.annexes.chaos import truth
from headrace.deploy.annexes.chaos.processes import FleetProcesses, send
from headrace.deploy.annexes.chaos.recorder import SLOW
from headrace.deploy.annexes.chaos.relay import LinkState
from headrace.deploy.annexes.chaos.schedule import Event, Kind

Undo = Callable[[], None]

REDIS_TIMEOUT_S = 1.0
SLOW_BATCH_S = 0.2
_NOWHERE = ("127.0.0.1", 1)


class SkippedError(Exception):
    """A fault that cannot be injected now. Its text says why. It never leaves this package."""


def inject(event: Event, target: FleetProcesses) -> Undo:
    """Inject a fault; return the function that undoes it. Raises `SkippedError`."""
    return _FAULTS[event.kind](event, target)


# -- processes --------------------------------------------------------------------------------------------------------


def _kill(event: Event, target: FleetProcesses) -> Undo:
    """Kill all targets at one instant: their pids are known before the first signal is sent."""
    for pid in _pids(event, target):
        send(pid, signal.SIGKILL)
    return lambda: None


def _stop(event: Event, target: FleetProcesses) -> Undo:
    pids = _pids(event, target)
    for pid in pids:
        send(pid, signal.SIGSTOP)

    def undo() -> None:
        for pid in pids:
            send(pid, signal.SIGCONT)

    return undo


def _pids(event: Event, target: FleetProcesses) -> list[int]:
    found = {name: target.pid(name) for name in event.targets}
    if missing := [name for name, pid in found.items() if pid is None]:
        raise SkippedError(f"{' and '.join(missing)} did not run")
    return [pid for pid in found.values() if pid is not None]


# -- links and learner ------------------------------------------------------------------------------------------------


def _link(event: Event, target: FleetProcesses) -> Undo:
    links = [target.links[name] for name in event.targets]
    for link in links:
        link.set(LinkState.REFUSES if event.kind is Kind.CUT else LinkState.HOLDS)

    def undo() -> None:
        for link in links:
            link.set(LinkState.FORWARDS)

    return undo


def _slow(event: Event, target: FleetProcesses) -> Undo:
    order = target.folders.record / SLOW
    aside = order.with_suffix(".new")
    aside.write_text(str(SLOW_BATCH_S))
    aside.rename(order)
    return lambda: order.unlink(missing_ok=True)


# -- Redis ------------------------------------------------------------------------------------------------------------


def _flush(event: Event, target: FleetProcesses) -> Undo:
    return _ask_redis(target, lambda client: client.flushall())


def _replace(event: Event, target: FleetProcesses) -> Undo:
    """Kill Redis. The server that the supervisor starts next finds none of its data."""
    pid = target.pid("redis")
    if pid is None:
        raise SkippedError("redis did not run")
    data = target.folders.fleet / "redis" / "appendonlydir"
    aside = data.with_suffix(".lost")
    with contextlib.suppress(FileNotFoundError):  # a server that has just started has not made it yet
        data.rename(aside)  # before its end: the next server may start at once
    send(pid, signal.SIGKILL)
    shutil.rmtree(aside, ignore_errors=True)
    return lambda: None


def _full(event: Event, target: FleetProcesses) -> Undo:
    """Make Redis refuse writes for lack of memory."""
    _ask_redis(target, lambda client: client.config_set("maxmemory", 1))
    return _later(target, lambda client: client.config_set("maxmemory", 0))


def _read_only(event: Event, target: FleetProcesses) -> Undo:
    """Make Redis a replica of a server that does not exist."""
    _ask_redis(target, lambda client: client.replicaof(*_NOWHERE))
    return _later(target, lambda client: client.replicaof("NO", "ONE"))


def _ask_redis(target: FleetProcesses, ask: Callable[[redis.Redis], Any]) -> Undo:
    url = target.page().redis_url
    if not url:
        raise SkippedError("fleet.json named no Redis")
    with contextlib.closing(connect(url, REDIS_TIMEOUT_S)) as client:
        try:
            ask(client)
        except REDIS_FAILURES as error:
            raise SkippedError(f"Redis did not answer ({type(error).__name__})") from error
    return lambda: None


def _later(target: FleetProcesses, ask: Callable[[redis.Redis], Any]) -> Undo:
    """Return a function that undoes a fault in Redis. A dead server needs no undo: a restart removes the fault."""

    def undo() -> None:
        with contextlib.suppress(SkippedError):
            _ask_redis(target, ask)

    return undo


# -- envs -------------------------------------------------------------------------------------------------------------


def _env(event: Event, target: FleetProcesses) -> Undo:
    truth.give_order(target.folders.truth, event.detail)
    return lambda: None


_FAULTS: dict[Kind, Callable[[Event, FleetProcesses], Undo]] = {
    Kind.KILL: _kill,
    Kind.STOP: _stop,
    Kind.CUT: _link,
    Kind.STALL: _link,
    Kind.SLOW: _slow,
    Kind.FLUSH: _flush,
    Kind.REPLACE: _replace,
    Kind.FULL: _full,
    Kind.READ_ONLY: _read_only,
    Kind.ENV: _env,
}
