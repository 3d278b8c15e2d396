"""Stand-ins for the roles, run as processes: `python -m support.fleets.pretend_role ROLE RUN_DIR [SLOT INCARNATION]`.

The broker takes obituaries, and reports to Redis books that grow as if somebody sampled and trained. Each role writes
its name to RUN_DIR/drained when SIGTERM reaches it, so that a test can see the order.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import orjson
import zmq

from headrace.broker.reports.report import Report
from headrace.broker.reports.reporter import RedisReporter
from headrace.deploy.process.exit_record import exit_record_path, write_exit_record
from headrace.schemas.accounts.ledger import LedgerRow, Settled, WorkerTotals
from headrace.schemas.accounts.recorder import Recorder
from headrace.schemas.frames.wire import MessageKind, decode_header
from headrace.schemas.messages import Ack, Obituary, read

drained = False


def on_sigterm(*_: object) -> None:
    global drained
    drained = True
    sign("drained")


def sign(name: str) -> None:
    with (Path(sys.argv[2]) / name).open("a") as file:
        file.write(f"{sys.argv[1]}\n")


def signed(name: str) -> list[str]:
    path = Path(sys.argv[2]) / name
    return path.read_text().split() if path.exists() else []


def last_row(dead: Obituary) -> LedgerRow:
    """The final books of a life that cut no batch."""
    discarded = {dead.reason: dead.totals.stepped}
    totals = WorkerTotals(stepped=dead.totals.stepped, discarded=discarded)
    life = {"slot": dead.slot, "incarnation": dead.incarnation}
    return LedgerRow(**life, totals=totals, accepted=(0, 0), held=(0, 0), settled=Settled(), closed=True)


def books(ticks: int, held_batches: int, dead: list[Obituary]) -> Report:
    """The steps of somebody in slot 9, and those of the workers that ended."""
    stepped, held = 100 * ticks, 10 * held_batches
    row = LedgerRow(
        slot=9,
        incarnation=1,
        totals=WorkerTotals(seq=ticks, stepped=stepped, shipped=stepped, shipped_chunks=ticks, episodes=10 * ticks),
        accepted=(stepped, ticks),
        held=(held, 0),
        settled=Settled(seq=ticks, committed=(stepped - held, ticks)),
    )
    window = min(100, 10 * ticks)
    gauges = {
        "episode_return_mean": float(ticks),
        "episodes_window": float(window),
        "env_steps_per_s": 1000.0,
        "weights_seq": float(ticks),
        "held_batches": float(held_batches),
    }
    return Report(rows=[row, *map(last_row, dead)], gauges=gauges, workers={0: {"weights_behind": 2}})


def endpoint_before(run_dir: Path) -> str:
    path = run_dir / "broker.json"
    return str(orjson.loads(path.read_bytes())["endpoints"]["worker"]) if path.exists() else ""


def broker(run_dir: Path) -> None:
    config = orjson.loads((run_dir / "config.json").read_bytes())
    fleet_id = orjson.loads((run_dir / "fleet.json").read_bytes())["fleet_id"]
    reporter = RedisReporter(config["redis"]["url"], fleet_id)
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(endpoint_before(run_dir) or "tcp://127.0.0.1:*")
    endpoint = router.get(zmq.LAST_ENDPOINT).decode()
    endpoints = dict.fromkeys(("worker", "learner", "weights"), endpoint)
    aside = run_dir / "broker.json.new"
    aside.write_bytes(orjson.dumps({"pid": os.getpid(), "fleet_id": fleet_id, "endpoints": endpoints}))
    aside.replace(run_dir / "broker.json")
    ticks = 0
    ends: list[Obituary] = []
    while not drained:
        if router.poll(20):
            peer, *frames = router.recv_multipart()
            kind, header = decode_header(frames)
            if kind is MessageKind.OBITUARY:
                dead = read(Obituary, header)
                ends.append(dead)
                with (run_dir / "obituaries").open("a") as file:
                    file.write(f"{dead.slot}/{dead.incarnation} {dead.reason} {dead.totals.stepped}\n")
                ack = Ack(slot=dead.slot, incarnation=dead.incarnation, closed=True)
                router.send_multipart([peer, *ack.frames()])
        if signed("ready").count("worker") >= 2 and "learner" in signed("ready"):
            ticks += not signed("drained")
            reporter.offer(books(ticks, 0 if signed("drained") else 3, ends))
    if ticks:
        reporter.offer(books(ticks, 0, ends))
    reporter.close(5.0)
    router.close(0)


def worker(run_dir: Path, slot: int, incarnation: int) -> None:
    recorder = Recorder(run_dir / "recorders" / f"worker-{slot}-{incarnation}.rec", slot, incarnation)
    recorder.totals(WorkerTotals(stepped=7, open=7))
    sign("ready")
    while not drained:
        recorder.touch()
        signal.sigtimedwait([], 0.02)


def learner() -> None:
    sign("ready")
    while not drained:
        signal.sigtimedwait([], 0.02)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, on_sigterm)
    role, where = sys.argv[1], Path(sys.argv[2])
    if role == "broker":
        broker(where)
    elif role == "worker":
        worker(where, int(sys.argv[3]), int(sys.argv[4]))
    else:
        learner()
    write_exit_record(exit_record_path(), 0)
