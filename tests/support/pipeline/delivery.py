"""The delivery path in tests: brokers in threads and processes, workers without envs, and a witness."""

from __future__ import annotations

import os
import queue
import random
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Self, TypeVar
from unittest import mock

import numpy as np
import orjson
import zmq

from headrace.broker.files.state_file import Endpoints, read_broker_file
from headrace.broker.process import Broker, open_broker
from headrace.broker.reports.metrics import FleetMetrics
from headrace.broker.reports.report import Report
from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.ledger import HeldBatch, LedgerRow, WorkerTotals
from headrace.schemas.basics.stop_event import StopEvent
from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch, encode_batch
from headrace.schemas.chunks.chunk import CHUNK_TABLE, ChunkEnd, EpisodeChunk
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.credentials.keys import BrokerKeys, ClientKeys
from headrace.schemas.errors import HeadraceError
from headrace.schemas.frames.wire import Buffer, MessageKind, WireMessage, decode
from headrace.schemas.messages import WorkerHello
from headrace.schemas.peers import heartbeat_interval, sockets
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.peers.handshakes import Handshakes
from headrace.schemas.settings.config import BrokerSection, FleetConfig, FleetSection, SamplingSection
from headrace.workers.fleet.link import FleetLink
from headrace.workers.fleet.session import WorkerSession
from headrace.workers.fleet.weights import WeightsReceiver
from headrace.workers.fleet.window import SessionLimits, Shipment
from support.pipeline.forked_workers import ForkedWorker, WorkerForks
from support.waiting import TIMEOUT_S, wait_until

T = TypeVar("T")
FLEET = "fleet"
SPACES = Spaces(observation=Box(shape=(1,), dtype="<f4"), action=Discrete(n=2))


class LoopThread(ABC):
    """A thread that runs `_run` within `with`, until it is stopped."""

    def __init__(self, name: str) -> None:
        self.stopping = StopEvent()
        self._thread = threading.Thread(target=self._run, name=name)

    @abstractmethod
    def _run(self) -> None:
        """Return soon after `stopping` is set."""

    def stop(self) -> None:
        """Set `stopping`, and wait for the end of the thread."""
        self.stopping.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), f"the {self._thread.name} goes on after it was stopped"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


# -- brokers ----------------------------------------------------------------------------------------------------------


def _by_tcp(settings: dict[str, Any], *, keyed: bool) -> dict[str, Any]:
    """The settings of a broker, on loopback by TCP where it has keys, a port or `allow_insecure`."""
    if keyed or settings.keys() & {"port", "allow_insecure"}:
        return {"host": "127.0.0.1", "allow_insecure": not keyed, **settings}
    return settings


class BrokerThread(LoopThread):
    """A real broker whose loop turns in a thread of this process. `ask` runs a question between two turns of it.

    A broker that is started after `stop` on the same run_dir takes its addresses. With keys, a port or
    `allow_insecure` it serves by TCP on loopback, else by Unix sockets.
    """

    def __init__(
        self,
        run_dir: Path,
        fleet_id: str = FLEET,
        keys: BrokerKeys | None = None,
        *,
        redis_url: str | None = None,
        synchronous: bool = False,
        workers: int = 0,
        heartbeat_interval_s: float = 0.2,
        **settings: Any,
    ) -> None:
        super().__init__("broker")
        settings = _by_tcp(settings, keyed=keys is not None)
        config = FleetConfig().model_copy(  # without a check of what clashes, such as a host without keys
            update={
                "broker": BrokerSection(**settings),
                "sampling": SamplingSection(synchronous=synchronous),
                "fleet": FleetSection(workers=workers),
            }
        )
        with mock.patch.object(heartbeat_interval, "LEAST_S", heartbeat_interval_s):
            self.broker = open_broker(config, fleet_id, run_dir, redis_url, keys)
        self.endpoints: Endpoints = self.broker.sockets.endpoints
        self._questions: queue.Queue[Callable[[], None]] = queue.Queue()

    def ask(self, question: Callable[[Broker], T]) -> T:
        """The answer of the broker's own thread."""
        answer: queue.Queue[T] = queue.Queue()
        self._questions.put(lambda: answer.put(question(self.broker)))
        return answer.get(timeout=TIMEOUT_S)

    def report(self) -> Report:
        """The report of what has changed since the last one."""
        return self.ask(lambda broker: feature(broker, FleetMetrics).report(time.monotonic()))

    def rows(self) -> dict[tuple[int, int], LedgerRow]:
        """The books, by (slot, incarnation)."""
        return {(row.slot, row.incarnation): row for row in self.ask(lambda broker: broker.core.rows())}

    def held_bytes(self) -> int:
        return self.ask(lambda broker: broker.core.store.nbytes)

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.broker.step()
                while not self._questions.empty():
                    self._questions.get()()
        finally:
            self.broker.close()


def feature(broker: Broker, kind: type[T]) -> T:
    """Return the feature of this kind among the observers of a broker."""
    return next(observer for observer in broker.core.observers if isinstance(observer, kind))


_BROKER = """
import sys, orjson, logging
from pathlib import Path
from headrace.broker.ports import sockets
from headrace.broker.process import run_broker
from headrace.schemas.peers import heartbeat_interval
from headrace.schemas.settings.config_loading import build_config
logging.basicConfig()
heartbeat_interval.LEAST_S = 0.2
sockets.BROKER_CONNECTIONS = int(sys.argv[4])
config, redis_url = build_config(orjson.loads(sys.argv[2])), sys.argv[3] or None
run_broker(config, fleet_id="fleet", run_dir=Path(sys.argv[1]), redis_url=redis_url)
"""


class Process:
    """A role in a real process, killed at the end of the test if need be."""

    def __init__(self, popen: subprocess.Popen[bytes] | ForkedWorker, log: Path) -> None:
        self.popen = popen
        self.log = log

    def signal(self, number: int) -> None:
        os.kill(self.popen.pid, number)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """The return code."""
        return self.popen.wait(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(TIMEOUT_S)


def script_process(script: str, *arguments: str, log: Path) -> Process:
    """A script in a process of its own."""
    with log.open("ab") as stderr:
        return Process(subprocess.Popen([sys.executable, "-c", script, *arguments], stderr=stderr), log)


def broker_process(
    run_dir: Path,
    redis_url: str = "",
    places: int = 4096,
    *,
    keys: Path | None = None,
    first: str = "",
    **settings: Any,
) -> Process:
    """A broker in a process of its own, serving at most `places` peers at each port. `keys`: the folder of its keys.

    It serves by TCP where a `BrokerThread` does. `first`: lines that it runs before.
    """
    sections = {"broker": _by_tcp(settings, keyed=keys is not None), "keys": {"dir": str(keys or "")}}
    config = orjson.dumps(sections).decode()
    process = script_process(first + _BROKER, str(run_dir), config, redis_url, str(places), log=run_dir / "broker.log")
    wait_until(lambda: _serves(run_dir, process), "the broker's start")
    return process


def _serves(run_dir: Path, process: Process) -> bool:
    assert process.popen.poll() is None, (run_dir / "broker.log").read_text()
    before = read_broker_file(run_dir)
    return before is not None and before.pid == process.popen.pid


def worker_process(run_dir: Path, endpoint: str, slot: int, incarnation: int, sections: dict[str, Any]) -> Process:
    """A worker in a process of its own; its recorder stands in `run_dir`."""
    config, path = orjson.dumps(sections).decode(), run_dir / f"worker-{slot}-{incarnation}.log"
    with path.open("ab") as log:
        return Process(worker_forks().start([str(run_dir), config, endpoint, str(slot), str(incarnation)], log), path)


@cache
def worker_forks() -> WorkerForks:
    """Return the server that forks the workers of all tests here; `end_worker_forks` ends it."""
    return WorkerForks()


def end_worker_forks() -> None:
    if worker_forks.cache_info().currsize:
        worker_forks().close()
        worker_forks.cache_clear()


# -- what workers ship ------------------------------------------------------------------------------------------------


class Envs:
    """Made-up episodes in `width` envs, cut into fragments as a worker cuts them. Observations are (t,)."""

    def __init__(self, seed: int = 0, width: int = 2, *, ends: float = 0.2, fails: float = 0.05) -> None:
        self.random = random.Random(seed)
        self.ends, self.fails = ends, fails
        self.episodes = 0
        self._seed = seed
        self._lanes = [self._episode(env) for env in range(width)]

    def fragment(self, length: int = 5, *, pixels: int = 0) -> ChunkBatch:
        """The next batch: chunks by env and time, end markers last. `pixels` adds a column of so many bytes a step."""
        rows: list[dict[str, int]] = []
        markers: list[dict[str, int]] = []
        for env, _ in enumerate(self._lanes):
            self._run(env, length, rows, markers)
        table = np.zeros(len(rows) + len(markers), CHUNK_TABLE)
        for i, row in enumerate(rows + markers):
            for name, value in row.items():
                table[i][name] = value
        times = [np.arange(row["t_start"], row["t_start"] + row["length"] + 1) for row in rows]
        steps = int(table["length"].sum())
        columns: dict[str, Any] = {
            "obs": np.concatenate([*times, np.empty(0)]).astype(np.float32)[:, None],
            "actions": np.zeros(steps, np.int64),
            "rewards": np.ones(steps),
            "weights_seq": np.ones(steps, np.int64),
        }
        if pixels:
            columns["pixels"] = np.zeros((steps, pixels), np.uint8)
        return ChunkBatch(table, columns, SPACES.observation, SPACES.action, reasons=("", "env_exception"))

    def fragments(self, count: int, length: int = 5, *, pixels: int = 0) -> list[ChunkBatch]:
        return [self.fragment(length, pixels=pixels) for _ in range(count)]

    def _run(self, env: int, length: int, rows: list[dict[str, int]], markers: list[dict[str, int]]) -> None:
        open_steps = 0
        for _ in range(length):
            if self.random.random() < self.fails:
                if self._lanes[env]["chunk_index"]:
                    markers.append(self._lanes[env] | {"length": 0, "end": ChunkEnd.ABORTED, "reason": 1})
                self._lanes[env], open_steps = self._episode(env), 0
                continue
            open_steps += 1
            if self.random.random() < self.ends:
                end = self.random.choice([ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED])
                rows.append(self._lanes[env] | {"length": open_steps, "end": end})
                self._lanes[env], open_steps = self._episode(env), 0
        if open_steps:
            lane = self._lanes[env]
            rows.append(lane | {"length": open_steps})
            lane["t_start"] += open_steps
            lane["chunk_index"] += 1

    def _episode(self, env: int) -> dict[str, int]:
        self.episodes += 1
        return {"id_high": self._seed, "id_low": self.episodes, "env_index": env, "chunk_index": 0, "t_start": 0}


class Feeder(LoopThread):
    """A worker without envs: the product's session and link in a thread, which ships batches and keeps true totals.

    A None among the batches is a moment without one. Each batch bears the next of `labels` as its version of weights,
    later ones `label`. `stop` ends it without a word, as a kill would.
    """

    def __init__(
        self,
        endpoint: str,
        batches: Iterable[ChunkBatch | None] = (),
        *,
        slot: int | None = 0,
        incarnation: int = 0,
        window: int = 16,
        label: tuple[int, int] = (0, 0),
        labels: Iterable[tuple[int, int]] = (),
        fleet_id: str = FLEET,
        spaces: Spaces = SPACES,
        alter: Callable[[int, list[Buffer]], list[Buffer]] = lambda seq, frames: frames,
        keys: ClientKeys | None = None,
        join_s: float = TIMEOUT_S,
        follows_learner: bool = False,
        window_bytes: int = 256 << 20,
    ) -> None:
        super().__init__("feeder")
        hello = WorkerHello(
            fleet_id=fleet_id,
            token=os.urandom(8).hex(),
            slot=slot,
            incarnation=incarnation,
            spaces=spaces.model_dump(mode="json"),
        )
        limits = SessionLimits(window, window_bytes, retry_s=0.3, follows_learner=follows_learner)
        self.session = WorkerSession(hello, limits)
        self.weights = WeightsReceiver(fleet_id)
        self.link = FleetLink(FleetPlace(endpoint), self.session, self.weights, keys)
        self._join_s = join_s
        self.error: HeadraceError | None = None
        self.totals = WorkerTotals()
        self.steps: dict[int, int] = {}
        """Steps by batch number, as shipped."""
        self._batches = iter(batches)
        self._done = False
        self._alter = alter
        self._labels = chain(labels, repeat(label))
        self._leaving: str | None = None

    @property
    def blocked(self) -> bool:
        return self.session.blocked == "window"

    def all_shipped(self) -> bool:
        return self._done

    def all_settled(self) -> bool:
        return self._done and not self.session.window()

    def leave(self, reason: str = "shutdown") -> None:
        """Say BYE; `session.state` tells when it was taken."""
        self._leaving = reason

    def _run(self) -> None:
        try:
            self.link.join(self._join_s)
            while not self.stopping.is_set() and not self.session.over:
                self._ship()
                if self._leaving is not None:
                    self.session.leave(self._leaving)
                    self._leaving = None
                self.link.pump(0.005)
            self.link.raise_refusal()
        except HeadraceError as error:
            self.error = error
        finally:
            self.link.close()

    def _ship(self) -> None:
        room = self.session.has_room()
        full_by = "group" if self.session.late_groups(1) else "window"
        self.session.blocked = "" if room or self._done else full_by
        if not room or self._done:
            return
        try:
            batch = next(self._batches)
        except StopIteration:
            self._done = True
            return
        if batch is None:
            return
        seq, (epoch, version) = self.session.next_seq, next(self._labels)
        self.totals = WorkerTotals(
            seq=seq,
            stepped=self.totals.stepped + batch.steps,
            shipped=self.totals.shipped + batch.steps,
            shipped_chunks=self.totals.shipped_chunks + len(batch),
        )
        header = BatchHeader(
            fleet_id=FLEET,
            slot=self.session.slot or 0,
            incarnation=self.session.incarnation,
            seq=seq,
            steps=batch.steps,
            chunks=len(batch),
            learner_epoch=epoch,
            weights_seq=version,
            reasons=list(batch.reasons),
            totals=self.totals,
        )
        frames = self._alter(seq, encode_batch(batch, header))
        self.steps[seq] = batch.steps
        held = HeldBatch(seq=seq, steps=batch.steps, chunks=len(batch))
        self.session.submit(Shipment(held, sum(map(len, frames)), frames, self.totals))


StartBroker = Callable[..., BrokerThread]
StartFeeder = Callable[..., Feeder]


# -- raw peers --------------------------------------------------------------------------------------------------------


class RawPeer:
    """A DEALER that says whatever a test wants, to a broker that lets this `role` in, by its `keys` if it asks."""

    def __init__(self, endpoint: str, role: str = "worker", keys: ClientKeys | None = None) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for name, value in {**sockets.COMMON, **Handshakes(endpoint, role, keys).options()}.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(endpoint)

    def send(self, frames: Sequence[Buffer]) -> None:
        self.socket.send_multipart(frames)

    def receive(self, timeout_s: float = TIMEOUT_S) -> WireMessage:
        """The next message; an AssertionError when none comes."""
        assert self.socket.poll(int(timeout_s * 1000)), "no answer"
        return decode(self.socket.recv_multipart())

    def receive_kind(self, kind: MessageKind) -> WireMessage:
        """The next message of this kind."""
        while True:
            message = self.receive()
            if message.kind is kind:
                return message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


# -- the witness ------------------------------------------------------------------------------------------------------


class Witness:
    """Sees every chunk that a learner is handed and complains of whatever breaks the promise about episodes."""

    def __init__(self) -> None:
        self.steps = 0
        self.chunks = 0
        self.markers: dict[str, str | None] = {}
        """Episode -> reason of its ABORTED chunk."""
        self.finished: set[str] = set()
        self.by_source: Counter[tuple[int, int]] = Counter()
        self._last: dict[str, EpisodeChunk] = {}

    def see(self, batch: ChunkBatch) -> None:
        for chunk in batch:
            self._see(chunk)
        self.by_source[(batch.slot, batch.incarnation)] += batch.steps

    def see_any(self, batch: ChunkBatch) -> None:
        """Note what became of episodes whose beginning somebody else saw."""
        self.steps += batch.steps
        self.markers |= {chunk.episode_id: chunk.end_reason for chunk in batch if chunk.end is ChunkEnd.ABORTED}

    def open_episodes(self) -> set[str]:
        """Begun and neither finished nor aborted."""
        return set(self._last) - self.finished - set(self.markers)

    def _see(self, chunk: EpisodeChunk) -> None:
        name = chunk.episode_id
        assert name not in self.finished, f"{chunk} after the end of its episode"
        assert name not in self.markers, f"{chunk} after its episode was aborted"
        last = self._last.get(name)
        if last is not None:
            assert chunk.chunk_index == last.chunk_index + 1, f"{chunk} follows {last}"
            assert chunk.t_start == last.t_start + len(last), f"{chunk} follows {last}"
        elif len(chunk):
            assert (chunk.chunk_index, chunk.t_start) == (0, 0), f"{chunk} is the first of its episode"
        if len(chunk):
            assert chunk.obs[:, 0].tolist() == list(range(chunk.t_start, chunk.t_start + len(chunk) + 1))
            self.chunks += 1
        self.steps += len(chunk)
        self._last[name] = chunk
        if chunk.end is ChunkEnd.ABORTED:
            self.markers[name] = chunk.end_reason
        elif chunk.is_done:
            self.finished.add(name)


def batches_of(
    stream: EpisodeStream, until_done: Callable[[], object], timeout_s: float = TIMEOUT_S
) -> Iterator[ChunkBatch]:
    """Batches until `until_done` is true and none is left; an AssertionError after the deadline without either."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        while (batch := stream.next(timeout_s=0.05)) is not None:
            yield batch
        if until_done():
            return
    raise AssertionError("the stream did not come to its end in time")


def ask_until_it_raises(stream: EpisodeStream, timeout_s: float = TIMEOUT_S) -> None:
    """Ask for batch after batch without end."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        stream.next(0.1)


@contextmanager
def blocked(broker: BrokerThread) -> Iterator[None]:
    """Keep the broker's own thread from receiving. libzmq's thread and the watch go on."""
    entered, leave = threading.Event(), threading.Event()

    def block(_: object) -> None:
        entered.set()
        leave.wait(TIMEOUT_S)

    waiting = threading.Thread(target=broker.ask, args=(block,))
    waiting.start()
    try:
        assert entered.wait(TIMEOUT_S)
        yield
    finally:
        leave.set()
        waiting.join()
