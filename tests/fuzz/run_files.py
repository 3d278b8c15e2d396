"""Fuzzing of the files of a run directory: each reader returns what its docstring says, or raises its typed error."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash
from fuzz.mutations import Mutator, as_json
from fuzz.teacher import KEPT, open_board, teach

from headrace.broker.batches.limits import BrokerLimits, BrokerState
from headrace.broker.files.books_file import BooksFile, EndedLives
from headrace.broker.files.lifetime_file import LifetimeFile
from headrace.broker.files.state_file import Endpoints, read_broker_file, write_broker_file
from headrace.broker.reports.metrics import FleetMetrics
from headrace.broker.sessions.core import BrokerCore
from headrace.deploy.annexes.chaos.deep_audit import disagreements, read_files, table
from headrace.deploy.fleet.obituary_sender import write_obituary
from headrace.deploy.loggers.row_files import JsonlFile
from headrace.deploy.process.exit_record import ExitRecord, take_exit_record
from headrace.deploy.report import ps
from headrace.deploy.report.audit import audit
from headrace.deploy.report.evidence import read_evidence
from headrace.deploy.report.run_rows import evaluation_row
from headrace.deploy.run.evaluation_log import EvaluationLog, describe
from headrace.deploy.run.fleet_file import FleetFile, continue_fleet, read_addresses, read_fleet_file
from headrace.deploy.run.redis_view import Snapshot
from headrace.deploy.run.resume import EarlierRun, read_facts, write_settings
from headrace.deploy.run.run_dir import RunDir
from headrace.deploy.trained.saved_policy import find_policy
from headrace.learner_stub.checkpoints.checkpoint import CHECKPOINT_FILE, Checkpoint, load_checkpoint, save_checkpoint
from headrace.learner_stub.checkpoints.learner_state import LearnerState
from headrace.learner_stub.link.fleet_place import keys_folder
from headrace.schemas.accounts.env_errors import EnvErrorRow
from headrace.schemas.accounts.folded_lives import fold
from headrace.schemas.accounts.ledger import HeldBatch, LedgerRow, Settled, WorkerTotals
from headrace.schemas.accounts.logged_metrics import SumsOfLife
from headrace.schemas.accounts.recorder import Recorder, read_recorder
from headrace.schemas.basics.run_files import endpoint_in, run_state
from headrace.schemas.errors import HeadraceError
from headrace.schemas.messages.worker_messages import Obituary
from headrace.schemas.settings.config import FleetConfig

FLEET = "fleet-1"
READS_A_ROUND = 60

ROW = LedgerRow(
    slot=3,
    incarnation=2,
    totals=WorkerTotals(seq=2, stepped=9, shipped=9, shipped_chunks=2, module_steps={"default_policy": 9}),
    accepted=(9, 2),
    held=(0, 0),
    settled=Settled(seq=2, committed=(9, 2)),
    closed=True,
)
EVALUATION: dict[str, Any] = {
    "unix_s": 1.5,
    "learner_epoch": 1,
    "updates": 2,
    "steps": 30,
    "episodes": 4,
    "best": True,
    "return": {"mean": 1.0, "std": 0.5, "min": 0.0, "max": 2.0},
    "length": {"mean": 1.0, "std": 0.5, "min": 0.0, "max": 2.0},
    "return_by_policy": {"a": {"mean": 1.0, "std": 0.5, "min": 0.0, "max": 2.0}},
}
METRIC = {"kind": "fleet", "time": 1.5, "elapsed_s": 2.0, "env_steps": 30, "workers": 2, "weights_lag": 0}

Case = tuple[str, Callable[[Mutator], None], Callable[[], object]]
"""(name, writes a mutated file, reads it)."""


class RunFiles:
    """A run directory with every file that a fleet leaves, and their readers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "recorders").mkdir()
        self.recorder = folder / "recorders" / "worker-3-2.rec"
        self._write_all()
        self._read_all()

    def _write_all(self) -> None:
        recorder = Recorder(self.recorder, 3, 2)
        recorder.totals(ROW.totals, HeldBatch(seq=2, steps=4, chunks=1))
        recorder.settled(Settled(seq=1, committed=(5, 1)), 1)
        recorder.close()
        endpoints = Endpoints(worker="tcp://127.0.0.1:1", learner="tcp://127.0.0.1:2", weights="tcp://127.0.0.1:3")
        write_broker_file(self.folder, FLEET, endpoints, BrokerState(2, "token", {3: 2}))
        folded = fold(None, ROW, {"accepted_bytes_total": 90})
        assert folded is not None
        row = ROW.model_copy(update={"incarnation": 4})
        BooksFile(self.folder, FLEET).write(
            EndedLives(folded={3: folded}, rows=[row], counters=[{"accepted_bytes_total": 90}])
        )
        sums = {"past": SumsOfLife(sums={"wins": 2.0})}
        failures = EnvErrorRow(kind="env_exception", count=2, slots=[3], lives={"3/2": 2})
        lifetime = LifetimeFile(self.folder, FLEET)
        lifetime.add_ended(EndedLives(folded={3: folded}, rows=[row], counters=[{}]))
        lifetime.write({3: {"num_episodes_lifetime": 7}}, sums, {failures.fingerprint: failures.model_dump()})
        self._put("tasks.json", KEPT.model_dump_json().encode())
        fleet = FleetFile(fleet_id=FLEET, state="running", supervisor_pid=os.getpid(), started=1.0, env_steps=9)
        self.fleet = fleet.model_dump() | {
            "best_return": 1.5,
            "incarnations": {"worker-3": 2},
            "endpoints": {"worker": "tcp://127.0.0.1:1", "envs-3": "tcp://127.0.0.1:4"},
            "processes": [{"name": "broker", "role": "broker", "incarnation": 1, "pid": os.getpid(), "started": 1.0}],
            "waiting": [{"name": "worker-3", "role": "worker", "slot": 3}],
        }
        position = [{"fleet_id": FLEET, "slot": 3, "incarnation": 2, "settled": as_json(ROW.settled.model_dump())}]
        state = {"updates": 3, "steps": 30, "own": {"lr": 0.5, "_x": {"_tuple": [1, {"_number": "nan"}]}}}
        arrays = {"module/w": np.ones((2, 3), np.float32), "own/0": np.zeros(3), "connectors/c": np.ones(1)}
        save_checkpoint(self.folder / CHECKPOINT_FILE, Checkpoint(1, position, state, arrays))
        self.settings = orjson.loads(write_settings(FleetConfig()))

    def _read_all(self) -> None:
        """Keep the content of the files as they were written."""
        self.honest = {
            path.relative_to(self.folder): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()
        }

    def _put(self, name: str, content: bytes) -> None:
        (self.folder / name).write_bytes(content)

    # -- what is written ----------------------------------------------------------------------------------------------

    def _bytes_of(self, name: str, mutator: Mutator) -> None:
        self._put(name, mutator.data(self.honest[Path(name)]))

    def _words(self, mutator: Mutator) -> None:
        """A recorder with other numbers in its words."""
        content = bytearray(self.honest[self.recorder.relative_to(self.folder)])
        for _ in range(mutator.random.choice((1, 1, 3, 20))):
            at = 8 * mutator.random.choice((*range(60), *range(136, 180), mutator.random.randrange(len(content) // 8)))
            struct.pack_into("<Q", content, at, mutator.random.choice((0, 1, 2, 2**53 - 1, 2**53, 2**63, 2**64 - 1)))
        self._put("recorders/worker-3-2.rec", bytes(content))

    def _json(self, name: str, value: Any, mutator: Mutator) -> None:
        self._put(name, mutator.text(value))

    def _tasks_in_redis(self, mutator: Mutator) -> None:
        self._saved_tasks = mutator.text(as_json(KEPT.model_dump()))

    def _lines(self, name: str, value: Any, mutator: Mutator) -> None:
        lines = [mutator.text(value), orjson.dumps(value), mutator.text(value)]
        self._put(name, b"\n".join(lines) + mutator.random.choice((b"", b"\n")))

    def _checkpoint(self, mutator: Mutator) -> None:
        """A checkpoint whose checksum holds."""
        data = self.honest[Path(CHECKPOINT_FILE)]
        length = int.from_bytes(data[:8], "little")
        header, payload = orjson.loads(data[8 : 8 + length]), data[8 + length :]
        own = orjson.loads(header["__metadata__"]["headrace"])
        if mutator.random.random() < 0.6:
            header["__metadata__"]["headrace"] = mutator.text(own).decode(errors="replace")
        else:
            header = mutator.value(header)
        metadata = header.get("__metadata__") if isinstance(header, dict) else None
        if isinstance(metadata, dict):
            metadata.pop("checksum", None)
            try:
                checksum = xxhash.xxh3_64(orjson.dumps(header))
            except TypeError:
                checksum = xxhash.xxh3_64(b"")
            checksum.update(payload)
            metadata["checksum"] = checksum.hexdigest()
        body = _dumps(header)
        self._put(CHECKPOINT_FILE, len(body).to_bytes(8, "little") + body + payload)

    # -- what is read -------------------------------------------------------------------------------------------------

    def _read_ends(self) -> None:
        obituary = write_obituary(self.folder / "recorders", 3, 2, "worker_killed")
        obituary.frames()
        assert isinstance(obituary, Obituary)

    def _read_books(self) -> None:
        file = BooksFile(self.folder, FLEET)
        ended = file.read()
        core = BrokerCore(FLEET, BrokerLimits(), BrokerState())
        core.restore(ended.rows, {}, 0, {}, ended.folded)
        orjson.dumps([row.model_dump() for row in core.rows()])
        orjson.dumps(list(ended.counters_of().values()))
        file.write(ended)

    def _read_lifetime(self) -> None:
        lifetime = LifetimeFile(self.folder, FLEET).read()
        core = BrokerCore(FLEET, BrokerLimits(), BrokerState())
        metrics = FleetMetrics(core)
        metrics.workers.go_on_from(lifetime.metric_sums)
        metrics.env_errors.go_on_from(lifetime.env_errors)
        core.restore([], {}, 0, lifetime.runner_state)
        LifetimeFile(self.folder, FLEET).write(
            core.state.counters, metrics.workers.sums(), metrics.env_errors.rows(), last=True
        )

    def _read_state(self) -> None:
        found = read_broker_file(self.folder)
        assert all(isinstance(endpoint_in(self.folder, role), str) for role in ("learner", "worker"))
        run_state(self.folder)
        if found is not None:
            core = BrokerCore(FLEET, BrokerLimits(), found.state())
            core.tick(1.0)
            endpoints = Endpoints(worker="a", learner="b", weights="c")
            write_broker_file(self.folder, FLEET, endpoints, core.state)

    def _read_fleet(self) -> None:
        keys_folder(self.folder)
        run_dir = RunDir(self.folder)
        fleet = read_fleet_file(run_dir.fleet_json)
        read_addresses(self.folder)
        ps.table(fleet, ps.processes(fleet, time.time()))
        orjson.dumps(ps.processes(fleet, time.time()))
        continue_fleet(run_dir, "").write(run_dir.fleet_json)

    def _read_settings(self) -> None:
        run = EarlierRun.of(RunDir(self.folder))
        assert run is not None
        run.check(FleetConfig(), resume=True)
        run.in_words(1, 1, "a Redis")

    def _read_checkpoint(self) -> None:
        path = self.folder / CHECKPOINT_FILE
        read_facts(path)
        audit(Snapshot(fleet_id=FLEET), read_evidence(self.folder, FLEET))
        saved = load_checkpoint(path)
        assert saved is not None
        find_policy(str(self.folder), "")
        LearnerState(self.folder).load()

    def _read_evaluations(self) -> None:
        log = EvaluationLog(self.folder)
        for told in log.take_new():
            describe(told)
            evaluation_row(told, None, 0.0)
        log.append(EVALUATION)

    def _read_tasks(self) -> None:
        """A broker starts with them, and the next teacher gets through."""
        core, _ = open_board(self.folder / "tasks.json", self._saved_tasks)
        teach(core, "honest")

    def _read_rows(self) -> None:
        jsonl = JsonlFile(self.folder / "metrics.jsonl")
        jsonl.append([METRIC])
        list(jsonl.rows(b"learner_row"))

    def _read_audit(self) -> None:
        evidence = read_evidence(self.folder, FLEET)
        audit(Snapshot(fleet_id=FLEET), evidence)
        sources = read_files(self.folder, FLEET)
        disagreements(sources)
        table(sources)

    def _read_exit(self) -> None:
        take_exit_record(self.folder / "exit", os.getpid())

    def cases(self) -> Iterator[Case]:
        """Every kind of file, with what reads it."""
        rec = "recorders/worker-3-2.rec"
        own = ("books.json", "broker.json", "lifetime.json")
        books, broker, lifetime = (orjson.loads(self.honest[Path(name)]) for name in own)
        exit_record = ExitRecord(pid=os.getpid(), exit_code=3, sentence="x").model_dump()
        yield "recorder", self._words, self._read_ends
        yield "recorder", partial(self._bytes_of, rec), lambda: read_recorder(self.recorder)
        yield "recorder in an audit", self._words, self._read_audit
        yield "books.json", partial(self._json, "books.json", books), self._read_books
        yield "lifetime.json", partial(self._json, "lifetime.json", lifetime), self._read_lifetime
        yield "lifetime.json in an audit", partial(self._json, "lifetime.json", lifetime), self._read_audit
        yield "broker.json", partial(self._json, "broker.json", broker), self._read_state
        yield "broker.json in an audit", partial(self._json, "broker.json", broker), self._read_audit
        yield "fleet.json", partial(self._json, "fleet.json", self.fleet), self._read_fleet
        yield "settings.json", partial(self._json, "settings.json", self.settings), self._read_settings
        yield "config.json", partial(self._json, "config.json", self.settings), self._read_checkpoint
        yield "checkpoint", self._checkpoint, self._read_checkpoint
        yield "checkpoint", partial(self._bytes_of, CHECKPOINT_FILE), self._read_checkpoint
        yield "evaluations.jsonl", partial(self._lines, "evaluations.jsonl", EVALUATION), self._read_evaluations
        yield "tasks.json", partial(self._json, "tasks.json", as_json(KEPT.model_dump())), self._read_tasks
        yield "tasks in Redis", self._tasks_in_redis, self._read_tasks
        yield "metrics.jsonl", partial(self._lines, "metrics.jsonl", METRIC), self._read_rows
        yield "exit record", partial(self._json, "exit", exit_record), self._read_exit

    def mend(self) -> None:
        """Put the honest files back."""
        self._saved_tasks = b""
        for name, content in self.honest.items():
            (self.folder / name).write_bytes(content)
        for name, value in (("fleet.json", self.fleet), ("settings.json", self.settings)):
            self._put(name, orjson.dumps(value))
        for name in ("config.json", "evaluations.jsonl", "metrics.jsonl"):
            (self.folder / name).unlink(missing_ok=True)


@contextmanager
def files() -> Iterator[Callable[[int, Counter[str]], None]]:
    """Yield a function that reads some mutated files by a seed."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunFiles(Path(folder))
        cases = list(run.cases())

        def play(seed: int, said: Counter[str]) -> None:
            mutator = Mutator(seed, "files")
            for _ in range(READS_A_ROUND):
                name, write, read = mutator.random.choice(cases)
                run.mend()
                write(mutator)
                try:
                    read()
                    said[f"{name}: read"] += 1
                except HeadraceError as error:
                    said[f"{name}: {type(error).__name__}"] += 1
                except OSError:
                    said[f"{name}: OSError"] += 1
                except Exception as error:
                    error.add_note(f"case {name!r}")
                    raise

        yield play


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")
