"""Cost of the books at a thousand slots with ten lives each: the broker's own code with a real Redis, no sockets.

The messages of workers and learner go straight into the core. Figures are processor time, which other programs on the
machine disturb little; "wall" marks those that are not.

PYTHONPATH=tests python -m bench.books [--slots 1000] [--lives 10]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from bench.table import Row, show
from headrace.broker.batches.folding import MOST_AT_ONCE
from headrace.broker.process import open_broker
from headrace.broker.reports.fleet_reports import FleetReports
from headrace.deploy.report.audit import audit
from headrace.deploy.run.redis_server import prepare_redis, wait_ready
from headrace.deploy.run.redis_view import FleetView
from headrace.schemas.accounts.ledger import Settled, WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.chunks.module_spaces import module_spaces_to_json
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.messages import (
    Bye,
    Commit,
    Heartbeat,
    LearnerHello,
    SourcePosition,
    WorkerHello,
)
from headrace.schemas.peers.heartbeat_interval import least_interval
from headrace.schemas.settings.config import FleetConfig

FLEET = "books"
SPACES = module_spaces_to_json(
    {"default_policy": Spaces(observation=Box(shape=(1,), dtype="<f4"), action=Discrete(n=2))}
)
LEARNER = b"lL"
STEPS = 100
MARKS = {
    "report, in the loop": (20.0, "ms"),
    "heartbeat": (100.0, "us"),
    "audit, from the shell": (1000.0, "ms"),
    "ps, read of Redis": (1000.0, "ms"),
    "restart, all back": (3000.0, "ms"),
    "idle, of one core": (10.0, "%"),
}
"""The most of each figure, and its unit. Figures without a mark are printed too."""


def measure(slots: int = 1000, lives: int = 10) -> list[Row]:
    """One row for each figure."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder, redis_server(Path(folder)) as url:
        figures = _figures(Path(folder), url, slots, lives)
    rows = []
    for name, (value, unit) in figures.items():
        most, _ = MARKS.get(name, (None, unit))
        ratio = value / most if most else 0.0
        case = f"{name}, {slots:,} x {lives}"
        rows.append(Row("books", case, "broker", unit, value, ratio, ratio, ratio, most=1.0 if most else None))
    return rows


def _figures(run_dir: Path, url: str, slots: int, lives: int) -> dict[str, tuple[float, str]]:
    fleet = Sessions(run_dir, url, slots)
    figures: dict[str, tuple[float, str]] = {}
    for _ in range(lives):
        fleet.live()
        fleet.report()
        fleet.await_redis()
    for _ in range(1 + lives * slots // MOST_AT_ONCE):  # old lives fold
        fleet.report()
        fleet.await_redis()
    in_loop, to_redis = [], []
    for _ in range(5):
        fleet.work()
        in_loop.append(1000 * fleet.report())
        to_redis.append(1000 * fleet.await_redis())
    figures["report, in the loop"] = statistics.median(in_loop), "ms"
    figures["report, longest in the loop"] = max(in_loop), "ms"
    figures["report, to its end in Redis, wall"] = statistics.median(to_redis), "ms"
    figures["report of no change, in the loop"] = 1000 * fleet.report(), "ms"
    figures["heartbeat"] = 1e6 * statistics.median(fleet.beat() for _ in range(5)) / slots, "us"
    figures["idle, of one core"] = 100 * fleet.idle(4.0), "%"
    with FleetView(url, FLEET) as view:
        figures["longest stop of Redis, wall"] = _slowest_ms(view), "ms"
        began = time.thread_time()
        snapshot = view.read()
        problems = audit(snapshot)
        figures["audit, without its start"] = 1000 * (time.thread_time() - began), "ms"
        assert not problems, problems[:3]
        assert snapshot.fleet.committed[0] == STEPS * slots * (lives + 5), snapshot.fleet
        read = getattr(view, "workers", view.read)
        began = time.thread_time()
        read()
        figures["ps, read of Redis"] = 1000 * (time.thread_time() - began), "ms"
    (run_dir / "fleet.json").write_bytes(orjson.dumps({"redis_url": url, "fleet_id": FLEET, "state": "running"}))
    command = [sys.executable, "-m", "headrace.deploy", "audit", "--strict", "--run-dir", str(run_dir)]
    began = _cpu_of_children()
    subprocess.run(command, check=True, capture_output=True)
    figures["audit, from the shell"] = 1000 * (_cpu_of_children() - began), "ms"
    began = time.process_time()
    fleet.restart()
    figures["restart, all back"] = 1000 * (time.process_time() - began), "ms"
    fleet.close()
    return figures


class Sessions:
    """A broker, and what a learner and workers say to it."""

    def __init__(self, run_dir: Path, url: str, slots: int, config: FleetConfig | None = None) -> None:
        self._run_dir = run_dir
        self._config = config or FleetConfig()
        self._url = url
        self._slots = slots
        self._life = 0
        self._settled: dict[tuple[int, int], tuple[int, Settled]] = {}
        self._start()

    def _start(self) -> None:
        self.broker = open_broker(self._config, FLEET, self._run_dir, self._url)
        self.core = self.broker.core
        self._reports = next(one for one in self.core.observers if isinstance(one, FleetReports))
        position = [
            SourcePosition(slot=slot, incarnation=life, settled=told, ended=life < self._life)
            for (slot, life), (_, told) in self._settled.items()
        ]
        hello = LearnerHello(token="L", channel="stream", window_batches=1 << 16, window_bytes=1 << 40)
        self._say(LEARNER, hello.model_copy(update={"position": position}))

    def _say(self, peer: bytes, message: object) -> None:
        self.core.receive(peer, message, time.monotonic())  # type: ignore[arg-type]
        self.core.take_outbox()

    def _peer(self, slot: int) -> bytes:
        return b"w%d/%d" % (slot, self._life)

    def live(self) -> None:
        """End a life in every slot, which the learner takes, and begin the next with a batch that it commits."""
        ended = []
        for slot in range(self._slots):
            if self._life:
                seq, settled = self._settled[slot, self._life]
                totals = _totals(seq)
                self._say(
                    self._peer(slot),
                    Bye(slot=slot, incarnation=self._life, totals=totals, settled=settled, reason="shutdown"),
                )
                ended.append(SourcePosition(slot=slot, incarnation=self._life, settled=settled, ended=True))
        self._say(LEARNER, Commit(epoch=self.core.state.epoch, position=ended, consumed_batches=1 << 40))
        self._life += 1
        for slot in range(self._slots):
            self._say(self._peer(slot), self._hello(slot))
        self.work()

    def _hello(self, slot: int) -> WorkerHello:
        token, hello = f"{slot}/{self._life}", self._settled.get((slot, self._life), (0, Settled()))
        return WorkerHello(
            fleet_id=FLEET,
            token=token,
            slot=slot,
            incarnation=self._life,
            host="bench",
            pid=1000 + slot,
            spaces=SPACES,
            settled=hello[1],
            totals=_totals(hello[0]),
        )

    def work(self) -> None:
        """Ship a batch from each worker, and commit it."""
        now, position = time.monotonic(), []
        for slot in range(self._slots):
            seq, settled = self._settled.get((slot, self._life), (0, Settled()))
            header = BatchHeader(
                fleet_id=FLEET,
                slot=slot,
                incarnation=self._life,
                seq=seq + 1,
                steps=STEPS,
                chunks=1,
                totals=_totals(seq + 1),
            )
            frames: list[bytes] = [b"frame"]
            self.core.receive_batch(self._peer(slot), header, frames, 1000, now)  # type: ignore[arg-type]
            settled = settled.add((STEPS, 1), {})
            self._settled[slot, self._life] = seq + 1, settled
            position.append(SourcePosition(slot=slot, incarnation=self._life, settled=settled))
        self.core.take_outbox()
        self._say(LEARNER, Commit(epoch=self.core.state.epoch, position=position, consumed_batches=1 << 40))

    def beat(self) -> float:
        """Let each worker say a heartbeat; return the seconds of all."""
        began = time.thread_time()
        for slot in range(self._slots):
            seq, settled = self._settled[slot, self._life]
            beat = Heartbeat(slot=slot, incarnation=self._life, totals=_totals(seq), settled=settled.seq)
            self._say(self._peer(slot), beat)
        return time.thread_time() - began

    def report(self) -> float:
        """Report as the broker's loop does; return the seconds that the loop stood still."""
        began = time.thread_time()
        self._reports.report(time.monotonic())
        return time.thread_time() - began

    def await_redis(self) -> float:
        """Wait until the report is in Redis; return the seconds."""
        began, reporter = time.perf_counter(), self._reports.reporter
        assert reporter is not None
        while not reporter.is_idle or not reporter.available:
            assert time.perf_counter() < began + 60.0, "no report reached Redis"
            time.sleep(0.001)
        return time.perf_counter() - began

    def idle(self, seconds: float) -> float:
        """Beat and tick at the usual intervals, and report with that; return the share of a core."""
        began, cpu, slot = time.perf_counter(), time.process_time(), 0
        per_s = self._slots / least_interval(self.broker.config.lease_s)
        while (elapsed := time.perf_counter() - began) < seconds:
            while slot < elapsed * per_s:
                seq, _ = self._settled[slot % self._slots, self._life]
                beat = Heartbeat(slot=slot % self._slots, incarnation=self._life, totals=_totals(seq), settled=seq)
                self._say(self._peer(slot % self._slots), beat)
                slot += 1
            self.core.tick(time.monotonic())
            self.core.take_outbox()
            time.sleep(0.05)
        return (time.process_time() - cpu) / (time.perf_counter() - began)

    def restart(self) -> None:
        """End the broker, start the next one, and let all sessions come back."""
        self.broker.close()
        self._start()
        for slot in range(self._slots):
            self._say(self._peer(slot), self._hello(slot))
        self.report()
        self.await_redis()
        assert len(self.core.live()) == self._slots

    def close(self) -> None:
        """End the broker."""
        self.broker.close()


def _totals(seq: int) -> WorkerTotals:
    return WorkerTotals(seq=seq, stepped=STEPS * seq, shipped=STEPS * seq, shipped_chunks=seq, module_steps={})


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _slowest_ms(view: FleetView) -> float:
    """Return the longest that Redis took for one command."""
    entries = view._reader.client.slowlog_get(128)
    return max((float(entry["duration"]) / 1000 for entry in entries), default=0.0)


@contextmanager
def redis_server(run_dir: Path) -> Iterator[str]:
    """Yield the URL of a Redis of its own."""
    launch = prepare_redis(run_dir)
    command = [*launch.argv, "--slowlog-log-slower-than", "1000", "--slowlog-max-len", "128"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_ready(launch.url, 30.0)
            yield launch.url
        finally:
            server.terminate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=1000)
    parser.add_argument("--lives", type=int, default=10)
    args = parser.parse_args()
    show(measure(args.slots, args.lives))
