"""The supervisor sends obituaries to the broker until the broker acknowledges them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from headrace.broker.files.books_file import EndedLives
from headrace.deploy.fleet.obituary_sender import ObituarySender, reason_of, write_obituary
from headrace.deploy.process.event_loop import EventLoop
from headrace.deploy.process.exit_record import ExitRecord
from headrace.deploy.run.redis_view import Snapshot
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import HeldBatch, LedgerRow, Settled, WorkerTotals
from headrace.schemas.accounts.recorder import Recorder
from headrace.schemas.frames.wire import MessageKind, decode_header
from headrace.schemas.messages import Ack, Obituary, read, read_hello
from headrace.schemas.peers.ports import quiet_ports
from support.waiting import TIMEOUT_S, wait_until

FLEET = "fleet-t"


def bind(socket: zmq.Socket[bytes], port: int) -> None:
    """Bind to `port`, which may still be given up by the socket before; 0 takes one no outgoing connection gets."""

    def bound(candidate: int) -> bool:
        with suppress(zmq.ZMQError):
            socket.bind(f"tcp://127.0.0.1:{candidate}")
            return True
        return False

    wait_until(lambda: bound(port) if port else any(map(bound, quiet_ports())), "a port to bind to")


class Registrar:
    """The broker's part: takes obituaries at its endpoint and answers those it is told to answer."""

    def __init__(self, loop: EventLoop, port: int = 0, *, answer: bool = True, closed: bool = True) -> None:
        self.loop = loop
        self.answer = answer
        self.closed = closed
        self.accepted = 0
        self.settled = Settled()
        self.taken: list[Obituary] = []
        self.drains = 0
        """Number of drain messages that it got."""
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        bind(self.socket, port)
        self.endpoint = self.socket.get(zmq.LAST_ENDPOINT).decode()
        loop.watch(self.socket, self.receive)

    def receive(self) -> None:
        peer, *frames = self.socket.recv_multipart()
        kind, header = decode_header(frames)
        if kind is MessageKind.HELLO:
            hello = read_hello(header).model_dump()
            assert hello["fleet_id"] == FLEET
            self.drains += hello["draining"]
            return
        obituary = read(Obituary, header)
        self.taken.append(obituary)
        if self.answer:
            life = {"slot": obituary.slot, "incarnation": obituary.incarnation}
            ack = Ack(**life, closed=self.closed, accepted=self.accepted, settled=self.settled)
            self.socket.send_multipart([peer, *ack.frames()])

    def close(self) -> None:
        self.loop.forget(self.socket)
        self.socket.close()


@pytest.fixture
def loop() -> EventLoop:
    return EventLoop()


@pytest.fixture
def registrar(loop: EventLoop) -> Iterator[Registrar]:
    made = Registrar(loop)
    yield made
    made.close()


@pytest.fixture
def obituaries(loop: EventLoop, registrar: Registrar, tmp_path: Path) -> Iterator[ObituarySender]:
    made = ObituarySender(loop, registrar.endpoint, FLEET, tmp_path)
    yield made
    made.close()


def leave_a_recorder(recorders: Path, slot: int, incarnation: int) -> Path:
    """The recorder of a worker that has stepped 30, shipped one batch of 20 and has 10 open."""
    path = recorders / f"worker-{slot}-{incarnation}.rec"
    recorder = Recorder(path, slot, incarnation)
    totals = WorkerTotals(seq=1, stepped=30, open=10, shipped=20, shipped_chunks=2)
    recorder.totals(totals, HeldBatch(seq=1, steps=20, chunks=2))
    recorder.close()
    return path


def test_a_broker_gets_the_drain_message_even_if_it_starts_during_the_drain(loop: EventLoop, tmp_path: Path) -> None:
    first = Registrar(loop)
    obituaries = ObituarySender(loop, first.endpoint, FLEET, tmp_path)
    obituaries.pause_workers()
    assert loop.turn_until(lambda: first.drains > 0, TIMEOUT_S)
    first.close()
    later = Registrar(loop, int(first.endpoint.rpartition(":")[2]))
    assert loop.turn_until(lambda: later.drains > 0, TIMEOUT_S)
    obituaries.close()
    later.close()


def test_an_obituary_has_the_totals_and_the_window_of_the_recorder(
    loop: EventLoop, registrar: Registrar, obituaries: ObituarySender, tmp_path: Path
) -> None:
    path = leave_a_recorder(tmp_path, 3, 2)
    obituaries.send(write_obituary(tmp_path, 3, 2, "worker_killed"))
    assert loop.turn_until(obituaries.all_acknowledged, TIMEOUT_S)
    (taken,) = registrar.taken
    assert (taken.slot, taken.incarnation, taken.reason) == (3, 2, "worker_killed")
    assert (taken.totals.stepped, taken.totals.open) == (30, 10)
    assert taken.window == [HeldBatch(seq=1, steps=20, chunks=2)]
    assert path.exists(), "what a broker knows dies with it"


def test_the_obituary_of_a_worker_without_a_recorder_has_empty_totals(tmp_path: Path) -> None:
    assert write_obituary(tmp_path, 0, 1, "worker_killed").totals == WorkerTotals()


@pytest.mark.parametrize("zeros", [0, 4096])
def test_a_life_that_only_the_learner_still_knows_gets_an_obituary_unless_it_is_folded(
    loop: EventLoop, registrar: Registrar, tmp_path: Path, zeros: int
) -> None:
    """All was killed after Redis had heard of its successor, and before it had the row of this life.

    Its recorder is gone, or full of zeros, as an aborted file system leaves it.
    """
    if zeros:
        (tmp_path / "worker-0-1.rec").write_bytes(bytes(zeros))
    settled = Settled(seq=10, committed=(5120, 284))
    row = LedgerRow(slot=1, incarnation=0, totals=WorkerTotals(), accepted=(0, 0), held=(0, 0), settled=settled)
    books = Snapshot(incarnations={0: 3, 1: 3}, folded={1: FoldedLives(highest=1, row=row)})
    obituaries = ObituarySender(loop, registrar.endpoint, FLEET, tmp_path, books=books)
    obituaries.send_unrecorded(EndedLives(), {(0, 1): settled, (1, 1): settled}, range(2))
    obituaries.send_left_over()
    assert loop.turn_until(obituaries.all_acknowledged, TIMEOUT_S)
    obituaries.close()
    (taken,) = registrar.taken
    assert (taken.slot, taken.incarnation, taken.settled, taken.totals.stepped) == (0, 1, settled, 5120)


def test_a_recorder_that_can_be_read_or_of_a_life_without_steps_is_not_lost(
    loop: EventLoop, registrar: Registrar, obituaries: ObituarySender, tmp_path: Path
) -> None:
    leave_a_recorder(tmp_path, 0, 1)
    (tmp_path / "worker-1-1.rec").write_bytes(bytes(4096))
    obituaries.send_unrecorded(EndedLives(), {(0, 1): Settled(seq=1), (1, 1): Settled()}, range(2))
    obituaries.send_left_over()
    assert loop.turn_until(obituaries.all_acknowledged, TIMEOUT_S)
    assert {taken.slot: (taken.totals.stepped, taken.reason) for taken in registrar.taken} == {
        0: (30, "worker_killed"),
        1: (0, "worker_killed"),
    }


def test_an_obituary_is_resent_until_an_ack_closes_its_books(
    loop: EventLoop, registrar: Registrar, obituaries: ObituarySender, tmp_path: Path
) -> None:
    leave_a_recorder(tmp_path, 0, 1)
    registrar.answer = False
    obituaries.send(write_obituary(tmp_path, 0, 1, "worker_killed"))
    assert loop.turn_until(lambda: len(registrar.taken) >= 3, TIMEOUT_S)
    registrar.answer, registrar.closed = True, False
    seen = len(registrar.taken)
    assert loop.turn_until(lambda: len(registrar.taken) > seen, TIMEOUT_S)
    assert not obituaries.all_acknowledged(), "an Ack that does not close the books is not the answer"
    registrar.closed = True
    assert loop.turn_until(obituaries.all_acknowledged, TIMEOUT_S)


def test_a_recorder_is_kept_until_its_books_are_final_and_a_learner_has_its_end(
    obituaries: ObituarySender, tmp_path: Path
) -> None:
    path = leave_a_recorder(tmp_path, 0, 1)
    obituaries.send(write_obituary(tmp_path, 0, 1, "shutdown"))
    totals = WorkerTotals(seq=1, stepped=30, discarded={"shutdown": 10}, shipped=20, shipped_chunks=2)
    settled = Settled(seq=1, committed=(20, 2))
    final = LedgerRow(
        slot=0,
        incarnation=1,
        totals=totals,
        accepted=(20, 2),
        held=(0, 0),
        settled=settled,
        closed=True,
        end_taken=True,
    )
    before = totals.model_copy(update={"stepped": 29})
    for other in ({"closed": False}, {"held": (20, 2)}, {"totals": before}, {"end_taken": False}):
        obituaries.delete_stored({(0, 1): final.model_copy(update=other)})
        assert path.exists(), other
    obituaries.delete_stored({(1, 1): final})
    assert path.exists()
    obituaries.delete_stored({(0, 1): final})
    assert not path.exists()


def test_a_folded_life_has_no_recorder_and_no_obituary_to_a_later_broker(loop: EventLoop, tmp_path: Path) -> None:
    first = Registrar(loop)
    obituaries = ObituarySender(loop, first.endpoint, FLEET, tmp_path)
    paths = [leave_a_recorder(tmp_path, 0, life) for life in (1, 2)]
    for life in (1, 2):
        obituaries.send(write_obituary(tmp_path, 0, life, "shutdown"))
    assert loop.turn_until(obituaries.all_acknowledged, TIMEOUT_S)
    totals = WorkerTotals(seq=1, stepped=30, discarded={"shutdown": 10}, shipped=20, shipped_chunks=2)
    settled = Settled(seq=1, committed=(20, 2))
    row = LedgerRow(slot=0, incarnation=0, totals=totals, accepted=(20, 2), held=(0, 0), settled=settled, closed=True)
    too_few = row.model_copy(update={"totals": totals.model_copy(update={"stepped": 29})})
    obituaries.delete_stored({}, {0: FoldedLives(highest=1, row=too_few)})
    assert paths[0].exists()
    obituaries.delete_stored({}, {0: FoldedLives(highest=1, row=row)})
    assert [path.exists() for path in paths] == [False, True]
    seen = len(first.taken)
    obituaries.resend()
    assert loop.turn_until(lambda: len(first.taken) > seen and obituaries.all_acknowledged(), TIMEOUT_S)
    assert {obituary.incarnation for obituary in first.taken[seen:]} == {2}
    obituaries.close()
    first.close()


def test_a_restarted_broker_gets_all_obituaries_with_the_settled_batches(loop: EventLoop, tmp_path: Path) -> None:
    first = Registrar(loop)
    first.accepted, first.settled = 1, Settled(seq=1, committed=(20, 2))
    obituaries = ObituarySender(loop, first.endpoint, FLEET, tmp_path)
    for slot in (0, 1):
        leave_a_recorder(tmp_path, slot, 1)
        obituaries.send(write_obituary(tmp_path, slot, 1, "worker_killed"))
    assert loop.turn_until(obituaries.all_acknowledged, TIMEOUT_S)
    first.close()
    obituaries.resend()
    assert not obituaries.all_acknowledged()
    second = Registrar(loop, int(first.endpoint.rpartition(":")[2]))
    assert loop.turn_until(obituaries.all_acknowledged, TIMEOUT_S)
    assert {o.slot for o in second.taken} == {0, 1}
    assert all((o.settled, o.window) == (first.settled, []) for o in second.taken)
    obituaries.close()
    second.close()


@pytest.mark.parametrize(("stopped", "lost_by"), [(False, "broker_lost"), (True, "shutdown")])
def test_batches_of_an_earlier_broker_are_lost_by_shutdown_if_it_stopped_in_order(
    loop: EventLoop, registrar: Registrar, tmp_path: Path, stopped: bool, lost_by: str
) -> None:
    """Worker 4 is of a second broker, which was killed before it reported: what it had is no loss of the stop."""
    leave_a_recorder(tmp_path, 0, 1)
    totals = WorkerTotals(seq=1, stepped=20, shipped=20, shipped_chunks=2)
    for slot in (1, 3, 4):
        orderly = Recorder(tmp_path / f"worker-{slot}-1.rec", slot, 1)
        orderly.totals(totals, HeldBatch(seq=1, steps=20, chunks=2))
        orderly.settled(Settled(), accepted=1)
        orderly.close()
    row = LedgerRow(slot=1, incarnation=1, totals=totals, accepted=(20, 2), held=(20, 2), settled=Settled())
    ended = {"closed": True, "stopped": stopped}
    closed = {(slot, 1): row.model_copy(update={"slot": slot, **ended}) for slot in (0, 1, 2)}
    books = Snapshot(rows={**closed, (3, 1): row.model_copy(update={"slot": 3})}, ended_unix_s=1_000.0)
    obituaries = ObituarySender(loop, registrar.endpoint, FLEET, tmp_path, books=books)
    obituaries.send_unrecorded(EndedLives(), {}, range(5))
    obituaries.send_left_over()
    assert loop.turn_until(obituaries.all_acknowledged, TIMEOUT_S)
    obituaries.close()
    reasons = {obituary.slot: obituary.reason for obituary in registrar.taken}
    assert reasons == {0: "worker_killed", 1: lost_by, 2: lost_by, 3: "broker_lost", 4: "broker_lost"}


def test_files_that_are_no_readable_recorders_are_left_alone(
    loop: EventLoop, obituaries: ObituarySender, tmp_path: Path
) -> None:
    for name in ("worker-0-0.rec", f"worker-{'9' * 30}-1.rec", "worker-x-1.rec"):
        (tmp_path / name).write_bytes(b"garbage")
    (tmp_path / "worker-0-5.rec").mkdir()
    other_layout = leave_a_recorder(tmp_path, 0, 6)
    with other_layout.open("r+b") as file:
        file.seek(8)
        file.write(b"\x63")
    obituaries.send_left_over()
    assert obituaries.all_acknowledged(), "a recorder that cannot be read is not one of a life without steps"
    assert len(list(tmp_path.iterdir())) == 5


def test_a_broker_that_returns_on_its_port_gets_the_pending_obituary(loop: EventLoop, tmp_path: Path) -> None:
    first = Registrar(loop)
    obituaries = ObituarySender(loop, first.endpoint, FLEET, tmp_path)
    first.close()
    obituaries.send(write_obituary(tmp_path, 0, 1, "worker_killed"))
    assert not loop.turn_until(obituaries.all_acknowledged, 0.3)
    second = Registrar(loop, int(first.endpoint.rpartition(":")[2]))
    assert loop.turn_until(obituaries.all_acknowledged, TIMEOUT_S)
    obituaries.close()
    second.close()


def test_a_supervisor_sends_the_unsent_obituaries_of_an_earlier_supervisor(
    loop: EventLoop, registrar: Registrar, obituaries: ObituarySender, tmp_path: Path
) -> None:
    """A recorder whose writer still lives (this very process) gets no obituary until the writer has ended."""
    script = f"""
import pathlib
from headrace.schemas.accounts.recorder import Recorder
Recorder(pathlib.Path({str(tmp_path / "worker-1-4.rec")!r}), 1, 4).close()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    alive = Recorder(tmp_path / "worker-0-7.rec", 0, 7)
    leave_a_recorder(tmp_path, 2, 1)  # its pid is that of a living process (this one), which does not write to it
    (tmp_path / "something else").touch()
    obituaries.send_left_over()
    assert loop.turn_until(obituaries.all_acknowledged, TIMEOUT_S)
    assert [(o.slot, o.incarnation) for o in registrar.taken] == [(1, 4), (2, 1)]
    alive.close()
    leave_a_recorder(tmp_path, 3, 1)  # of another machine that shares the folder: its writer was never seen here
    obituaries.send_ended(own=[(0, 7)])
    assert obituaries.all_acknowledged()
    obituaries.send_ended(own=[])
    assert not obituaries.all_acknowledged()
    assert loop.turn_until(obituaries.all_acknowledged, TIMEOUT_S)
    assert [(o.slot, o.incarnation) for o in registrar.taken[2:]] == [(0, 7)], "it has ended since"


def test_the_obituary_sender_survives_garbage_from_the_broker(
    loop: EventLoop, registrar: Registrar, obituaries: ObituarySender, tmp_path: Path
) -> None:
    answers = iter([[b"garbage"], [b"", b"", os.urandom(64)]])

    def receive() -> None:
        peer, *_ = registrar.socket.recv_multipart()
        if garbage := next(answers, None):
            registrar.socket.send_multipart([peer, *garbage])
        else:
            loop.forget(registrar.socket)
            loop.watch(registrar.socket, registrar.receive)

    loop.forget(registrar.socket)
    loop.watch(registrar.socket, receive)
    obituaries.send(write_obituary(tmp_path, 0, 1, "worker_killed"))
    assert loop.turn_until(obituaries.all_acknowledged, TIMEOUT_S)


def test_senders_that_close_together_with_their_broker_do_not_block_later_ones(loop: EventLoop, tmp_path: Path) -> None:
    """libzmq tells a socket's monitor of a connection's end, and waits for ever if the monitor is closed just then."""
    for _ in range(200):
        registrar = Registrar(loop)
        obituaries = ObituarySender(loop, registrar.endpoint, FLEET, tmp_path)
        assert loop.turn_until(lambda of=obituaries: of._handshakes.connected, TIMEOUT_S)  # type: ignore[misc]
        loop.forget(registrar.socket)
        end = threading.Thread(target=registrar.socket.close)
        end.start()
        obituaries.close()
        end.join()


def test_an_exit_record_gives_the_reason_of_a_death() -> None:
    words = [None, *(ExitRecord(pid=1, exit_code=code) for code in (0, 12, 1))]
    assert [reason_of(word) for word in words] == ["worker_killed", "shutdown", "fenced", "worker_killed"]


def test_an_end_whose_recorder_cannot_be_read_waits_and_is_not_told_as_no_steps(
    obituaries: ObituarySender, registrar: Registrar, loop: EventLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.deploy.fleet.obituary_sender.LONGEST_PAUSE_S", 0.01)
    path = tmp_path / "worker-0-1.rec"
    path.mkdir()
    obituaries.send_end(0, 1, "shutdown")
    assert not obituaries.all_acknowledged()
    path.rmdir()
    leave_a_recorder(tmp_path, 0, 1)
    assert loop.turn_until(obituaries.all_acknowledged, TIMEOUT_S)
    assert [told.totals.stepped for told in registrar.taken] == [30]


def test_an_end_without_a_recorder_is_told_without_a_number_of_steps(
    obituaries: ObituarySender, loop: EventLoop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The deep audit takes a number for the life's true count."""
    leave_a_recorder(tmp_path, 0, 1)
    obituaries.send_ended([(0, 1), (1, 1)])
    (tmp_path / "worker-0-1.rec").unlink()
    with caplog.at_level("INFO"):
        obituaries.send_end(0, 1, "shutdown")
        obituaries.send_end(1, 1, "shutdown")
    assert loop.turn_until(obituaries.all_acknowledged, TIMEOUT_S)
    assert "the recorder of worker 0 incarnation 1 is lost" in caplog.text
    assert "worker 1 incarnation 1 left no recorder, as one that ends before its first step" in caplog.text


def test_a_recorder_that_was_never_seen_is_lost_once_where_the_broker_has_batches_of_the_life(
    obituaries: ObituarySender, registrar: Registrar, loop: EventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    registrar.accepted = 3
    for _ in range(2):
        obituaries.send_end(0, 1, "shutdown")
        assert loop.turn_until(obituaries.all_acknowledged, TIMEOUT_S)
        obituaries.resend()
    assert loop.turn_until(obituaries.all_acknowledged, TIMEOUT_S)
    assert caplog.text.count("the recorder of worker 0 incarnation 1 is lost") == 1
    assert "took" not in caplog.text


def test_a_recorder_that_cannot_be_deleted_now_is_deleted_later(
    obituaries: ObituarySender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = leave_a_recorder(tmp_path, 0, 1)
    obituaries.send_end(0, 1, "shutdown")
    totals = WorkerTotals(seq=1, stepped=30, discarded={"shutdown": 10}, shipped=20, shipped_chunks=2)
    row = LedgerRow(
        slot=0,
        incarnation=1,
        totals=totals,
        accepted=(20, 2),
        held=(0, 0),
        settled=Settled(seq=1, committed=(20, 2)),
        closed=True,
        end_taken=True,
    )

    def unlink(self: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        obituaries.delete_stored({(0, 1): row})
    assert path.exists()
    obituaries.delete_stored({(0, 1): row})
    assert not path.exists()
