"""Cost of 200 workers to one broker: a real broker with a real Redis, and 200 sessions of workers over Unix sockets.

The workers have no envs: each ships prebuilt batches at a fixed rate. Figures are the broker's processor time, which
other programs on the machine disturb little. What a phase costs without its messages is measured first, and taken off.

With `--lives`, each slot first has so many lives, each of one batch that the learner commits. Then the books are
measured: an idle broker, its reports, `headrace audit` and `ps`, and a broker that is killed. `bench.books` measures
the same without sockets.

PYTHONPATH=tests python -m bench.sessions [--workers 200] [--seconds 5] [--lives 10]
"""

from __future__ import annotations

import argparse
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from bench.books import redis_server
from bench.memory import resident_mib
from bench.processes import FLEET_ID, FORKED, Processes, until_terminated
from bench.table import Row, show
from bench.transport import Load
from bench.turns import cpu_s
from headrace.broker.sessions.core import BrokerCore
from headrace.deploy.report.audit import audit
from headrace.deploy.run.redis_view import FleetView
from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts import redis_keys
from headrace.schemas.accounts.ledger import HeldBatch, WorkerTotals
from headrace.schemas.accounts.worker_figures import TIME_PARTS
from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch, encode_batch
from headrace.schemas.chunks.module_spaces import module_spaces_to_json
from headrace.schemas.messages import Heartbeat, WorkerHello
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.peers.heartbeat_interval import least_interval
from headrace.schemas.settings.config_loading import build_config
from headrace.workers.fleet.link import FleetLink
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

MARKS = {
    "idle, of one core": 10.0,
    "report, in the loop": 20.0,
    "report, longest in the loop": 20.0,
    "audit --strict": 1000.0,
    "ps": 1000.0,
    "kill of the broker until all are back": 3000.0,
    "kill of the broker until Redis says so": 3000.0,
}
"""The most of each figure of books, in its unit."""

_PROCESSES = 4
_PUMP_S = 0.0004
"""Seconds between two turns of a process, for each worker in it: so that all together leave the broker its core."""
_JOIN_S = 120.0
_WARM_S = 1.0
_LIVES_S = 300.0

Figures = dict[str, tuple[float, str]]


def measure(workers: int = 200, seconds: float = 5.0) -> list[Row]:
    """One row for each figure."""
    with Processes() as processes, redis_server(processes.folder) as url:
        figures = _figures(processes, url, workers, seconds)
    return [
        Row("sessions", name, f"{workers} workers", unit, *[value] + 3 * [0.0])
        for name, (value, unit) in figures.items()
    ]


def measure_books(workers: int = 1000, lives: int = 10, seconds: float = 10.0) -> list[Row]:
    """One row for each figure of the books of `workers` slots with so many lives."""
    with Processes() as processes, redis_server(processes.folder) as url:
        figures = _figures_of_books(processes, url, workers, lives, seconds)
    rows = []
    for name, (value, unit) in figures.items():
        most = MARKS.get(name)
        ratio = value / most if most else 0.0
        case = f"{workers} workers x {lives} lives"
        rows.append(Row("sessions", name, case, unit, value, ratio, ratio, ratio, most=1.0 if most else None))
    return rows


def _figures(processes: Processes, url: str, workers: int, seconds: float) -> Figures:
    config = build_config({"learner": {"enabled": False}})
    pid, endpoints = processes.start_broker(config, url)
    broker, figures = _Watched(pid, url), Figures()
    alone = broker.over(seconds)
    figures["broker without workers"] = _per_s(alone.cpu_s, alone)
    spans: Any = FORKED.Value("i", IDLE)
    shares = [[None] * len(range(number, workers, _PROCESSES)) for number in range(_PROCESSES)]
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
        beats = workers * idle.wall_s / least_interval(config.broker.lease_s)
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


# -- the books of many lives ------------------------------------------------------------------------------------------


class _Loop:
    """Notes the turns and reports of a broker's loop for the bench. `Processes.start_broker` calls it in the loop."""

    def __init__(self) -> None:
        self.live: Any = FORKED.Value("i", 0)
        """Workers with a session, after each turn."""
        self.most_rows: Any = FORKED.Value("i", 0)
        """Lives with a row of their own in the last report."""
        self._reports: Any = FORKED.Array("d", 4096)
        self._count: Any = FORKED.Value("i", 0)

    def __call__(self, core: BrokerCore, report_s: float | None) -> None:
        self.live.value = len(core.workers.peers)
        if report_s is not None:
            self.most_rows.value = len(core.sources)
            self._reports[self._count.value % len(self._reports)] = report_s
            self._count.value += 1

    def reports(self) -> list[float]:
        """Return the seconds of each report since the last call."""
        count, self._count.value = self._count.value, 0
        return list(self._reports[: min(count, len(self._reports))])


def _figures_of_books(processes: Processes, url: str, workers: int, lives: int, seconds: float) -> Figures:
    config = build_config({"learner": {"enabled": False}})
    loop, spans = _Loop(), FORKED.Value("i", IDLE)
    run_dir = processes.folder / "run"
    run_dir.mkdir()
    pid, endpoints = processes.start_broker(config, url, run_dir=run_dir, note=loop)
    for first in range(_PROCESSES):
        processes.start(_work, endpoints.worker, range(first, workers, _PROCESSES), spans, lives)
    figures = Figures()
    began, own = time.perf_counter(), cpu_s([pid])
    with EpisodeStream(endpoints.learner) as stream, FleetView(url, FLEET_ID) as view:
        _await_last_lives(stream, loop, workers, lives)
        figures["all lives, wall"] = time.perf_counter() - began, "s"
        figures["a life, from HELLO to BYE"] = 1e3 * (cpu_s([pid]) - own) / workers / lives, "ms"
        loop.reports()
        broker = _Watched(pid, url)
        idle = _idle(broker, stream, seconds)
        reports = loop.reports()
        figures["idle, of one core"] = 100 * idle.cpu_s / idle.wall_s, "%"
        figures["idle, of Redis's core"] = 100 * idle.redis_cpu_s / idle.wall_s, "%"
        figures["report, in the loop"] = 1e3 * statistics.median(reports), "ms"
        figures["report, longest in the loop"] = 1e3 * max(reports), "ms"
        figures["resident"] = idle.resident_at_end_mib, "MiB"
        figures |= _commands(run_dir, url)
        steps = _steps_in_redis(view)
        ended = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        began, killed_unix_s, loop.live.value = time.perf_counter(), time.time(), 0
        select.select([ended], [], [])  # until then it has its ports
        os.close(ended)
        pid, _ = processes.start_broker(config, url, run_dir=run_dir, note=loop)
        figures["kill of the broker until it serves"] = 1e3 * (time.perf_counter() - began), "ms"
        used = cpu_s([pid])
        _pump_until(stream, lambda: loop.live.value == workers, "all workers are back")
        figures["kill of the broker until all are back"] = 1e3 * (time.perf_counter() - began), "ms"
        figures["all are back, the broker's part"] = 1e3 * (cpu_s([pid]) - used), "ms"
        _pump_until(stream, lambda: _reported_workers(view, killed_unix_s) == workers, "Redis knows of all workers")
        figures["kill of the broker until Redis says so"] = 1e3 * (time.perf_counter() - began), "ms"
        assert _steps_in_redis(view) == steps
        assert not (problems := audit(view.read())), problems[:3]
    return figures


def _await_last_lives(stream: EpisodeStream, loop: _Loop, workers: int, lives: int) -> None:
    """Take and commit the batch of each life, until all but the newest lives have folded."""
    taken = 0

    def done() -> bool:
        nonlocal taken
        batch = stream.next(0.0)
        taken += batch is not None and batch.steps > 0  # the others are markers
        return taken == workers * lives and loop.live.value == workers and loop.most_rows.value <= 2 * workers

    _pump_until(stream, done, "all lives are over and folded", _LIVES_S)


def _pump_until(stream: EpisodeStream, done: Callable[[], bool], what: str, most_s: float = _JOIN_S) -> None:
    deadline = time.monotonic() + most_s
    while not done():
        assert time.monotonic() < deadline, f"not so in {most_s} s: {what}"
        stream.pump(0.005)


def _idle(broker: _Watched, stream: EpisodeStream, seconds: float) -> _Spent:
    _take_for(stream, _WARM_S)
    before = broker.now()
    _take_for(stream, seconds)
    return broker.now() - before


def _reported_workers(view: FleetView, after_unix_s: float) -> int:
    """Return the live workers by a report that was made after this time; 0 before one."""
    key = redis_keys.key_name(FLEET_ID, redis_keys.GAUGES)
    unix_s, workers = view._reader.client.hmget(key, "unix_s", "workers")
    return int(float(workers)) if unix_s and float(unix_s) > after_unix_s else 0


def _steps_in_redis(view: FleetView) -> list[int]:
    totals = view.read().totals
    return [totals[f"{what}agent_steps_total"] for what in ("", "accepted_", "committed_")]


def _commands(run_dir: Path, url: str) -> Figures:
    """Return the seconds of `audit` and `ps` as commands, and of one that only starts Python."""
    fleet = {"redis_url": url, "fleet_id": FLEET_ID, "state": "running", "supervisor_pid": os.getpid()}
    (run_dir / "fleet.json").write_bytes(orjson.dumps(fleet))
    place = ["--run-dir", str(run_dir)]
    figures = Figures()
    for name, words in (
        ("start", ["--version"]),
        ("audit --strict", ["audit", "--strict", *place]),
        ("ps", ["ps", *place]),
    ):
        took = []
        for _ in range(3):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-m", "headrace.deploy", *words], check=True, capture_output=True)
            took.append(time.perf_counter() - began)
        figures[name] = 1e3 * statistics.median(took), "ms"
    return figures


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


def _work(endpoint: str, slots: Sequence[int | None], spans: Any, lives: int = 0) -> None:
    """Run a worker for each slot until SIGTERM. `spans` has the number of the load to ship now, or IDLE.

    `lives`: each slot has so many, each of one batch. The last one stays.
    """
    stopping = until_terminated()
    batches = [replace(load.batch(0), modules=(module,)) for module, load in MODULES.items()]
    with _workers(endpoint, slots) as workers:
        while not stopping.is_set():
            began = time.monotonic()
            for number, worker in enumerate(workers):
                worker.turn(began, spans.value, batches)
                if lives and worker.live(batches[0], is_last=worker.incarnation == lives):
                    workers[number] = MockWorker(endpoint, worker.phase, worker.slot, worker.incarnation + 1)
            stopping.wait(max(0.0, began + _PUMP_S * len(workers) - time.monotonic()))


@contextmanager
def _workers(endpoint: str, slots: Sequence[int | None]) -> Iterator[list[MockWorker]]:
    workers = [MockWorker(endpoint, number / len(slots), slot) for number, slot in enumerate(slots)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.link.close()


class MockWorker:
    """The session and the sockets of one worker. `phase`, from 0 to 1, spreads the workers over a period.

    slot: None: the broker gives it one.
    """

    def __init__(self, endpoint: str, phase: float, slot: int | None = None, incarnation: int = 1) -> None:
        hello = WorkerHello(
            fleet_id=FLEET_ID,
            token=os.urandom(8).hex(),
            slot=slot,
            incarnation=incarnation if slot is not None else 0,
            host="bench",
            pid=os.getpid(),
        )
        limits = SessionLimits(window_batches=4, follows_learner=False)
        self.session = WorkerSession(hello, limits)
        self.session.read_counters = lambda: COUNTERS
        self.session.read_figures = lambda: {"time_s": TIMES}
        self.link = FleetLink(FleetPlace(endpoint), self.session, WeightsReceiver(FLEET_ID))
        self.phase, self.slot, self.incarnation = phase, slot, incarnation
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
            self._ship_at = math.inf if load == IDLE else now + self.phase * PERIODS_S[load]
        if now >= self._ship_at and self.session.has_room():
            self._ship_at += PERIODS_S[load]
            self._ship(batches[load])

    def live(self, batch: ChunkBatch, *, is_last: bool) -> bool:
        """Ship this life's one batch, and leave once it is settled. Return whether the life is over."""
        session = self.session
        if session.state is SessionState.LEFT:
            self.link.close()
            return True
        if session.state is SessionState.ACTIVE and self._introduced and session.welcome is not None:
            if not self._shipped[0]:
                self._ship(batch)
            elif not session.window() and not is_last:
                session.leave("shutdown")
        return False

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
    parser.add_argument("--lives", type=int, default=0)
    args = parser.parse_args()
    if args.lives:
        show(measure_books(args.workers, args.lives, args.seconds))
    else:
        show(measure(args.workers, args.seconds))
