"""Deaths are told to the broker until it says that it knows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from headrace.deploy.event_loop import EventLoop
from headrace.deploy.exit_record import ExitRecord
from headrace.deploy.obituary_sender import ObituarySender, reason_of, write_obituary
from headrace.schemas.ledger import Settled, WorkerTotals
from headrace.schemas.messages import Ack, HeldBatch, Obituary, read, read_hello
from headrace.schemas.ports import quiet_ports
from headrace.schemas.recorder import Recorder
from headrace.schemas.wire import MessageKind, decode_header
from support.waiting import wait_until

DEADLINE_S = 100.0
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
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        bind(self.socket, port)
        self.endpoint = self.socket.get(zmq.LAST_ENDPOINT).decode()
        loop.watch(self.socket, self.receive)

    def receive(self) -> None:
        peer, *frames = self.socket.recv_multipart()
        kind, header = decode_header(frames)
        if kind is MessageKind.HELLO:
            assert read_hello(header).model_dump()["fleet_id"] == FLEET
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


def test_an_obituary_says_what_the_recorder_holds(
    loop: EventLoop, registrar: Registrar, obituaries: ObituarySender, tmp_path: Path
) -> None:
    path = leave_a_recorder(tmp_path, 3, 2)
    obituaries.send(write_obituary(tmp_path, 3, 2, "worker_killed"))
    assert loop.turn_until(obituaries.all_acknowledged, DEADLINE_S)
    (taken,) = registrar.taken
    assert (taken.slot, taken.incarnation, taken.reason) == (3, 2, "worker_killed")
    assert (taken.totals.stepped, taken.totals.open) == (30, 10)
    assert taken.window == [HeldBatch(seq=1, steps=20, chunks=2)]
    assert not path.exists()


def test_a_worker_that_died_before_its_first_step_left_nothing(tmp_path: Path) -> None:
    assert write_obituary(tmp_path, 0, 1, "worker_killed").totals == WorkerTotals()


def test_it_is_repeated_until_acknowledged_and_the_recorder_kept_so_long(
    loop: EventLoop, registrar: Registrar, obituaries: ObituarySender, tmp_path: Path
) -> None:
    path = leave_a_recorder(tmp_path, 0, 1)
    registrar.answer = False
    obituaries.send(write_obituary(tmp_path, 0, 1, "worker_killed"))
    assert loop.turn_until(lambda: len(registrar.taken) >= 3, DEADLINE_S)
    assert path.exists()
    registrar.answer, registrar.closed = True, False
    seen = len(registrar.taken)
    assert loop.turn_until(lambda: len(registrar.taken) > seen, DEADLINE_S)
    assert not obituaries.all_acknowledged(), "an Ack that does not close the books is not the answer"
    registrar.closed = True
    assert loop.turn_until(obituaries.all_acknowledged, DEADLINE_S)
    assert not path.exists()


def test_a_recorder_is_kept_until_all_that_was_accepted_is_settled(
    loop: EventLoop, registrar: Registrar, obituaries: ObituarySender, tmp_path: Path
) -> None:
    path = leave_a_recorder(tmp_path, 0, 1)
    registrar.accepted = 1
    obituaries.send(write_obituary(tmp_path, 0, 1, "shutdown"))
    assert loop.turn_until(obituaries.all_acknowledged, DEADLINE_S)
    assert path.exists(), "only the broker's memory and this file know of batch 1"
    registrar.settled = Settled(seq=1, committed=(20, 2))
    obituaries.resend(unsettled_only=True)
    assert not obituaries.all_acknowledged()
    assert loop.turn_until(obituaries.all_acknowledged, DEADLINE_S)
    assert not path.exists()
    obituaries.resend(unsettled_only=True)
    assert obituaries.all_acknowledged()


def test_a_broker_that_was_started_again_is_told_everything_again_and_what_its_predecessor_knew(
    loop: EventLoop, tmp_path: Path
) -> None:
    first = Registrar(loop)
    first.accepted, first.settled = 1, Settled(seq=1, committed=(20, 2))
    obituaries = ObituarySender(loop, first.endpoint, FLEET, tmp_path)
    for slot in (0, 1):
        leave_a_recorder(tmp_path, slot, 1)
        obituaries.send(write_obituary(tmp_path, slot, 1, "worker_killed"))
    assert loop.turn_until(obituaries.all_acknowledged, DEADLINE_S)
    first.close()
    obituaries.resend()
    assert not obituaries.all_acknowledged()
    second = Registrar(loop, int(first.endpoint.rpartition(":")[2]))
    assert loop.turn_until(obituaries.all_acknowledged, DEADLINE_S)
    assert {o.slot for o in second.taken} == {0, 1}
    assert all((o.settled, o.window) == (first.settled, []) for o in second.taken)
    obituaries.close()
    second.close()


def test_who_lost_what_an_earlier_fleet_left_is_named(
    loop: EventLoop, registrar: Registrar, obituaries: ObituarySender, tmp_path: Path
) -> None:
    leave_a_recorder(tmp_path, 0, 1)
    orderly = Recorder(tmp_path / "worker-1-1.rec", 1, 1)
    batch = HeldBatch(seq=1, steps=20, chunks=2)
    orderly.totals(WorkerTotals(seq=1, stepped=20, shipped=20, shipped_chunks=2), batch)
    orderly.settled(Settled(), accepted=1)
    orderly.close()
    obituaries.send_left_over()
    assert loop.turn_until(obituaries.all_acknowledged, DEADLINE_S)
    assert {o.slot: o.reason for o in registrar.taken} == {0: "worker_killed", 1: "broker_lost"}


def test_what_is_no_recorder_is_left_alone(loop: EventLoop, obituaries: ObituarySender, tmp_path: Path) -> None:
    for name in ("worker-0-0.rec", f"worker-{'9' * 30}-1.rec", "worker-x-1.rec"):
        (tmp_path / name).write_bytes(b"garbage")
    (tmp_path / "worker-0-5.rec").mkdir()
    obituaries.send_left_over()
    assert obituaries.all_acknowledged()
    assert len(list(tmp_path.iterdir())) == 4


def test_a_broker_that_comes_back_on_its_port_is_told(loop: EventLoop, tmp_path: Path) -> None:
    first = Registrar(loop)
    obituaries = ObituarySender(loop, first.endpoint, FLEET, tmp_path)
    first.close()
    obituaries.send(write_obituary(tmp_path, 0, 1, "worker_killed"))
    assert not loop.turn_until(obituaries.all_acknowledged, 0.3)
    second = Registrar(loop, int(first.endpoint.rpartition(":")[2]))
    assert loop.turn_until(obituaries.all_acknowledged, DEADLINE_S)
    obituaries.close()
    second.close()


def test_what_an_earlier_supervisor_left_untold_is_told(
    loop: EventLoop, registrar: Registrar, obituaries: ObituarySender, tmp_path: Path
) -> None:
    """Not so for a recorder whose writer still lives (this very process)."""
    script = f"""
import pathlib
from headrace.schemas.recorder import Recorder
Recorder(pathlib.Path({str(tmp_path / "worker-1-4.rec")!r}), 1, 4).close()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    alive = Recorder(tmp_path / "worker-0-7.rec", 0, 7)
    recycled = leave_a_recorder(tmp_path, 2, 1)
    (tmp_path / "something else").touch()
    obituaries.send_left_over()
    assert loop.turn_until(obituaries.all_acknowledged, DEADLINE_S)
    assert [(o.slot, o.incarnation) for o in registrar.taken] == [(1, 4), (2, 1)]
    assert alive.path.exists()
    assert not recycled.exists(), "its pid is that of a living process (this one), which does not write to it"
    alive.close()


def test_garbage_from_the_broker_is_survived(
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
    assert loop.turn_until(obituaries.all_acknowledged, DEADLINE_S)


def test_reasons() -> None:
    words = [None, *(ExitRecord(pid=1, exit_code=code) for code in (0, 12, 1))]
    assert [reason_of(word) for word in words] == ["worker_killed", "shutdown", "fenced", "worker_killed"]
