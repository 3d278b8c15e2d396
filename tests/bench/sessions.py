"""Cost of 200 workers to one broker: a real broker with a real Redis, and 200 sessions of workers over real sockets.

The workers have no envs: each ships prebuilt batches at a fixed rate. Figures are the broker's processor time, which
other programs on the machine disturb little. What a phase costs without its messages is measured first, and taken off.

PYTHONPATH=tests python -m bench.sessions [--workers 200] [--seconds 5]
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.books import redis_server
from bench.memory import resident_mib
from bench.processes import FLEET_ID, FORKED, Processes, until_terminated
from bench.table import Row, show
from bench.transport import Load
from bench.turns import cpu_s
from headrace.deploy.run.redis_view import FleetView
from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.ledger import HeldBatch, WorkerTotals
from headrace.schemas.accounts.worker_figures import TIME_PARTS
from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch, encode_batch
from headrace.schemas.chunks.module_spaces import module_spaces_to_json
from headrace.schemas.messages import Heartbeat, WorkerHello
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.settings.config_loading import build_config
from headrace.workers.fleet.link import BrokerLink
from headrace.workers.fleet.session import SessionState, WorkerSession
from headrace.workers.fleet.weights import WeightsReceiver
from headrace.workers.fleet.window import SessionLimits, Shipment

SMALL = Load("CartPole", (4,), "<f4", 16, 4, None)
LARGE = Load("pixels", (84, 84, 4), "|u1", 1, 4, None)
LOADS = (SMALL, LARGE)
MODULES = {f"load_{number}": load for number, load in enumerate(LOADS)}
"""A module plays each load, since a fleet's module has one observation space."""
PERIODS_S = (0.5, 5.0)
"""Seconds between two batches of one worker, by load."""
IDLE = -1

_PROCESSES = 4
_PUMP_S = 0.02
_JOIN_S = 120.0
_WARM_S = 1.0

Figures = dict[str, tuple[float, str]]


def measure(workers: int = 200, seconds: float = 5.0) -> list[Row]:
    """One row for each figure."""
    with Processes() as processes, redis_server(processes.folder) as url:
        figures = _figures(processes, url, workers, seconds)
    return [
        Row("sessions", name, f"{workers} workers", unit, *[value] + 3 * [0.0])
        for name, (value, unit) in figures.items()
    ]


def _figures(processes: Processes, url: str, workers: int, seconds: float) -> Figures:
    config = build_config({"learner": {"enabled": False}})
    pid, endpoints = processes.start_broker(config, url)
    broker, figures = _Watched(pid, url), Figures()
    alone = broker.over(seconds)
    figures["broker without workers"] = _per_s(alone.cpu_s, alone)
    spans: Any = FORKED.Value("i", IDLE)
    shares = [len(range(number, workers, _PROCESSES)) for number in range(_PROCESSES)]
    before = broker.now()
    for share in shares:
        processes.start(_work, endpoints.worker, share, spans)
    with EpisodeStream(endpoints.learner) as stream, FleetView(url, FLEET_ID) as view:
        _await_workers(view, workers)
        joined = broker.now() - before
        figures["session, until all are there"] = 1e6 * (joined.cpu_s - alone.share(joined)) / workers, "us"
        figures["session, resident"] = 1024 * joined.resident_mib / workers, "KiB"
        figures["session, descriptors"] = joined.descriptors / workers, ""
        idle = broker.over(seconds)
        beats = workers * idle.wall_s / config.broker.heartbeat_interval_s
        figures["heartbeat"] = 1e6 * (idle.cpu_s - alone.share(idle)) / beats, "us"
        figures["heartbeat, bytes"] = float(sum(map(len, _beat().frames()))), ""
        figures |= _redis_figures(idle, "heartbeats alone")
        for number, load in enumerate(LOADS):
            figures |= _of_batches(broker, idle, stream, spans, number, load, seconds)
    return figures


def _of_batches(
    broker: _Watched, idle: _Spent, stream: EpisodeStream, spans: Any, number: int, load: Load, seconds: float
) -> Figures:
    """Let all workers ship batches of this load, and return what one costs beyond what idle sessions cost."""
    spans.value = number
    _take_for(stream, _WARM_S)
    before, own = broker.now(), time.process_time()
    taken = _take_for(stream, seconds)
    own, spent = time.process_time() - own, broker.now() - before
    spans.value = IDLE
    _take_for(stream, _WARM_S)
    assert taken, f"no batch of {load.name} came"
    batch = load.batch(0)
    name = f"batch of {sum(map(len, encode_batch(batch, _header(0, 1, 1, batch)))) / 1e6:.2f} MB"
    return {
        name: (1e6 * (spent.cpu_s - idle.share(spent)) / taken, "us"),
        f"{name}, the learner's part": (1e6 * own / taken, "us"),
        f"{name}, rate": (taken / spent.wall_s, "1/s"),
        f"{name}, resident": (spent.resident_at_end_mib, "MiB"),
        **_redis_figures(spent, name),
    }


def _redis_figures(spent: _Spent, name: str) -> Figures:
    return {
        f"{name}, Redis": _per_s(spent.redis_cpu_s, spent),
        f"{name}, Redis, commands": (spent.commands / spent.wall_s, "1/s"),
        f"{name}, Redis, input": (spent.redis_bytes / spent.wall_s / 1e3, "kB/s"),
    }


def _per_s(cpu_s: float, spent: _Spent) -> tuple[float, str]:
    return 1e6 * cpu_s / spent.wall_s, "us/s"


def _take_for(stream: EpisodeStream, seconds: float) -> int:
    """Take batches for this time; return their number."""
    taken, until = 0, time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        taken += stream.next(timeout_s=left) is not None
    return taken


def _await_workers(view: FleetView, workers: int) -> None:
    deadline = time.monotonic() + _JOIN_S
    while len(view.read().rows) < workers:
        assert time.monotonic() < deadline, f"not all {workers} workers joined"
        time.sleep(0.2)


# -- what the broker has used -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Spent:
    """Time and memory that the broker and Redis have used, in an interval or until now."""

    wall_s: float
    cpu_s: float
    resident_mib: float
    descriptors: int
    redis_cpu_s: float
    redis_bytes: float
    commands: float
    resident_at_end_mib: float

    def __sub__(self, before: _Spent) -> _Spent:
        return _Spent(
            self.wall_s - before.wall_s,
            self.cpu_s - before.cpu_s,
            self.resident_mib - before.resident_mib,
            self.descriptors - before.descriptors,
            self.redis_cpu_s - before.redis_cpu_s,
            self.redis_bytes - before.redis_bytes,
            self.commands - before.commands,
            self.resident_mib,
        )

    def share(self, other: _Spent) -> float:
        """Return the processor time that this would have been in the time of `other`."""
        return self.cpu_s * other.wall_s / self.wall_s


class _Watched:
    """A broker's process, and its Redis."""

    def __init__(self, pid: int, url: str) -> None:
        self._pid = pid
        self._redis = FleetView(url, FLEET_ID)

    def now(self) -> _Spent:
        """Return all that was used until now."""
        info: dict[str, Any] = self._redis._reader.client.info()
        resident = resident_mib(self._pid)
        return _Spent(
            time.perf_counter(),
            cpu_s([self._pid]),
            resident,
            len(list(Path(f"/proc/{self._pid}/fd").iterdir())),
            info["used_cpu_user"] + info["used_cpu_sys"],
            info["total_net_input_bytes"],
            info["total_commands_processed"],
            resident,
        )

    def over(self, seconds: float) -> _Spent:
        """Return what is used in this time."""
        before = self.now()
        time.sleep(seconds)
        return self.now() - before


# -- workers without envs ---------------------------------------------------------------------------------------------


def _work(endpoint: str, count: int, spans: Any) -> None:
    """Run `count` workers until SIGTERM. `spans` has the number of the load to ship now, or IDLE."""
    stopping = until_terminated()
    batches = [replace(load.batch(0), modules=(module,)) for module, load in MODULES.items()]
    with _workers(endpoint, count) as workers:
        while not stopping.is_set():
            began = time.monotonic()
            for worker in workers:
                worker.turn(began, spans.value, batches)
            stopping.wait(max(0.0, began + _PUMP_S - time.monotonic()))


@contextmanager
def _workers(endpoint: str, count: int) -> Iterator[list[MockWorker]]:
    workers = [MockWorker(endpoint, number / count) for number in range(count)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.link.close()


class MockWorker:
    """The session and the sockets of one worker. `phase`, from 0 to 1, spreads the workers over a period."""

    def __init__(self, endpoint: str, phase: float) -> None:
        hello = WorkerHello(fleet_id=FLEET_ID, token=os.urandom(8).hex(), host="bench", pid=os.getpid())
        limits = SessionLimits(window_batches=4, follows_learner=False)
        self.session = WorkerSession(hello, limits)
        self.session.read_counters = lambda: COUNTERS
        self.session.read_figures = lambda: {"time_s": TIMES}
        self.link = BrokerLink(FleetPlace(endpoint), self.session, WeightsReceiver(FLEET_ID))
        self._phase = phase
        self._load, self._ship_at = IDLE, math.inf
        self._introduced = False
        self._shipped = 0, 0

    def turn(self, now: float, load: int, batches: list[ChunkBatch]) -> None:
        """Do what is due: join, ship a batch, and carry messages."""
        self.link.pump()
        if self.session.state is SessionState.ACTIVE and not self._introduced:
            self._introduced = True
            self.session.introduce(
                spaces=module_spaces_to_json({module: load.spaces for module, load in MODULES.items()}),
                num_envs=16,
                cut_steps=1024,
            )
        if load != self._load:
            self._load = load
            self._ship_at = math.inf if load == IDLE else now + self._phase * PERIODS_S[load]
        if now >= self._ship_at and self.session.has_room():
            self._ship_at += PERIODS_S[load]
            self._ship(batches[load])

    def _ship(self, batch: ChunkBatch) -> None:
        session, (steps, chunks) = self.session, self._shipped
        self._shipped = steps + batch.steps, chunks + len(batch)
        seq = session.next_seq
        totals = WorkerTotals(
            seq=seq, stepped=self._shipped[0], shipped=self._shipped[0], shipped_chunks=self._shipped[1]
        )
        header = _header(session.slot or 0, session.incarnation, seq, batch, totals)
        frames = encode_batch(batch, header)
        held = HeldBatch(seq=seq, steps=batch.steps, chunks=len(batch))
        session.submit(Shipment(held, sum(map(len, frames)), frames, totals))


COUNTERS = {
    "num_env_steps_sampled_lifetime": 0,
    "num_episodes_lifetime": 0,
    "num_env_step_failures_lifetime": 0,
    "num_env_rebuilds_lifetime": 0,
    "num_env_steps_discarded_lifetime": 0,
    "num_agent_steps_sampled_lifetime": {"default_agent": 0},
    "num_module_steps_sampled_lifetime": {"default_policy": 0},
    "num_actions_by_agent_lifetime": {"default_agent": 0},
}
"""The counters that a runner of one agent tells in each heartbeat."""
TIMES = dict.fromkeys(TIME_PARTS, 1.5)


def _header(
    slot: int, incarnation: int, seq: int, batch: ChunkBatch, totals: WorkerTotals | None = None
) -> BatchHeader:
    return BatchHeader(
        fleet_id=FLEET_ID,
        slot=slot,
        incarnation=incarnation,
        seq=seq,
        steps=batch.steps,
        chunks=len(batch),
        modules=list(batch.modules),
        totals=totals or WorkerTotals(),
    )


def _beat() -> Heartbeat:
    return Heartbeat(slot=1000, incarnation=1, totals=WorkerTotals(), counters=COUNTERS, time_s=TIMES)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    show(measure(args.workers, args.seconds))
