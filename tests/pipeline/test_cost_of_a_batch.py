"""Counts of what a small batch costs: calls of the system, messages and bytes. A busy machine does not change them."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from bench.transport import LOADS, PrebuiltRunner
from headrace.learner_stub import EpisodeStream
from headrace.learner_stub.link.broker_link import BrokerLink as LearnerLink
from headrace.learner_stub.streaming.broker_stream import BrokerStream
from headrace.learner_stub.streaming.session import StreamLimits
from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.accounts.recorder import Recorder
from headrace.schemas.chunks.batch import BatchHeader, encode_batch, read_batch_header
from headrace.schemas.chunks.batch_reader import BatchReader
from headrace.schemas.frames.wire import Buffer, MessageKind, decode_header
from headrace.schemas.messages import LearnerWelcome, WorkerHello
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.settings.config_loading import build_config
from headrace.workers.fleet.link import FleetLink
from headrace.workers.fleet.membership import Membership
from headrace.workers.fleet.session import SessionState, WorkerSession
from headrace.workers.fleet.shipping import Shipper
from headrace.workers.fleet.window import SessionLimits, Shipment
from headrace.workers.fleet.worker import Worker
from support.pipeline.delivery import FLEET, StartBroker
from support.waiting import TIMEOUT_S

BATCHES = 200
MOST_OBJECTS = 40
CONFIG = build_config({"worker": {"window_batches": 64}})
IO = Path("/proc/thread-self/io")


def written() -> int:
    """How often this thread has asked the system to write: to a file, or to wake ZeroMQ's own thread."""
    return int(IO.read_text().split("syscw: ")[1].split()[0])


def kinds_sent(monkeypatch: pytest.MonkeyPatch, link: type, name: str) -> Counter[MessageKind]:
    """Count the messages that links of this class send."""
    counts, send = Counter[MessageKind](), getattr(link, name)

    def counting(self: object, frames: list[Buffer]) -> bool:
        counts[decode_header(frames)[0]] += 1
        return bool(send(self, frames))

    monkeypatch.setattr(link, name, counting)
    return counts


@pytest.mark.skipif(not IO.exists(), reason="the system does not count the calls of a thread")
def test_a_batch_takes_few_calls_of_the_system_and_few_messages(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, calls = start_broker(), dict[str, int]()
    by_worker = kinds_sent(monkeypatch, FleetLink, "_try_send")
    by_learner = kinds_sent(monkeypatch, LearnerLink, "send")

    def work() -> None:
        stopping = threading.Event()
        with closing(Membership(CONFIG, broker.endpoints.worker, FLEET, None, 0, tmp_path)) as membership:
            worker = Worker(CONFIG, membership, PrebuiltRunner(LOADS[1]))  # type: ignore[arg-type]
            worker.introduce()
            before = written()
            for _ in range(BATCHES):
                assert worker.wait_for_room(stopping)
                worker.ship(worker.sample(stopping))
            calls["worker"] = written() - before

    thread = threading.Thread(target=work)
    thread.start()
    with EpisodeStream(broker.endpoints.learner) as stream:
        stream.spaces()
        before = written()
        for _ in range(BATCHES):
            assert stream.next(TIMEOUT_S) is not None
        calls["learner"] = written() - before
    thread.join(TIMEOUT_S)
    assert by_worker[MessageKind.BATCH] == BATCHES
    assert by_worker.total() < 1.5 * BATCHES
    assert calls["worker"] < 3 * BATCHES, "a word to ZeroMQ's thread for each message"
    assert by_learner[MessageKind.COMMIT] <= BATCHES
    assert calls["learner"] < 2 * BATCHES, "a word to ZeroMQ's thread for each commit"


def peak_of(call: Callable[[], object]) -> int:
    """Return the most bytes that a call has allocated at one time."""
    call()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_worker_copies_a_small_batch_once_and_the_learner_does_not_copy_it(tmp_path: Path) -> None:
    runner = PrebuiltRunner(LOADS[1])
    batch = runner.sample_fragment(lambda: None)
    session = WorkerSession(WorkerHello(fleet_id=FLEET, token="t", slot=0, incarnation=1), SessionLimits())
    recorder = Recorder(tmp_path / "worker.rec", 0, 1)
    with closing(recorder):
        shipper = Shipper(FLEET, session, recorder, runner.totals, runner.take_finished_episodes)
        assert peak_of(lambda: shipper.ship(batch)) < 1.5 * batch.nbytes, "joined in one frame"
    session.state, session._credit = SessionState.ACTIVE, 1
    (shipment,) = session.take_outbox()
    assert isinstance(shipment, Shipment)
    frames = shipment.frames
    assert frames is not None
    raw_header = decode_header(frames)[1]
    header = read_batch_header(raw_header)
    reader = BatchReader(batch.observation_space, batch.action_space)
    assert peak_of(lambda: reader.read(header, raw_header, frames)) < batch.nbytes / 4


def test_a_batch_that_waits_at_the_learner_is_little_work_for_the_garbage_collector() -> None:
    """A collection visits all that waits, and a learner with torch then stood still for a tenth of a second."""
    stream = BrokerStream(LearnerLink(FleetPlace(""), None, "t", 0), StreamLimits(), "", [], None)
    stream.session.receive(LearnerWelcome(fleet_id=FLEET, epoch=1), 0.0)
    batch, fields = LOADS[1].batch(0), {"fleet_id": FLEET, "slot": 0, "incarnation": 1, "totals": WorkerTotals()}
    sent = [
        encode_batch(batch, BatchHeader(seq=seq, steps=batch.steps, chunks=len(batch), **fields))
        for seq in range(1, BATCHES + 1)
    ]
    gc.collect()
    before = len(gc.get_objects())
    for frames in sent:
        stream._receive([zmq.Frame(frame).buffer for frame in frames])
    gc.collect()
    assert stream.pending == BATCHES
    assert (len(gc.get_objects()) - before) / BATCHES <= MOST_OBJECTS
