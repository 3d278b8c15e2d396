"""Peers at the ports of a real broker: frames, connections and turns are bounded; honest peers go on."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from headrace.broker.files.state_file import Endpoints, read_broker_file
from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.messages import Heartbeat, Message, SupervisorHello, WorkerHello
from headrace.schemas.peers.port_watch import WATCH_EVENTS, PortWatch
from support.pipeline.delivery import (
    FLEET,
    Envs,
    Process,
    StartBroker,
    StartFeeder,
    batches_of,
    blocked,
    broker_process,
)
from support.raw_zmtp import PING, RawZmtp, frame, head, knock, on_the_wire
from support.waiting import wait_until

BATCH_BYTES = 4 << 20
PLACES = 60
TYPES = {"worker": b"DEALER", "learner": b"DEALER", "weights": b"SUB"}


@contextmanager
def small_broker(run_dir: Path) -> Iterator[tuple[Process, Endpoints]]:
    """A broker process that takes small batches and few connections, and hears strangers."""
    with broker_process(run_dir, places=PLACES, allow_insecure=True, max_batch_bytes=BATCH_BYTES) as process:
        state = read_broker_file(run_dir)
        assert state is not None
        yield process, state.endpoints
        assert process.popen.poll() is None, process.log.read_text()
        assert "Traceback" not in process.log.read_text()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, Endpoints]]:
    with small_broker(tmp_path_factory.mktemp("broker")) as found:
        yield found


def test_a_whole_message_of_many_frames_is_refused_and_costs_no_objects(served: tuple[Process, Endpoints]) -> None:
    process, endpoints = served
    with RawZmtp(endpoints.worker) as stranger:
        stranger.send(frame(b"x", more=True) * 200_000 + frame(b"", more=False))
        wait_until(lambda: "65 frames; 2 to 64 are allowed" in process.log.read_text(), "the refusal")
        assert not stranger.is_cut()


@pytest.mark.parametrize("role", ["worker", "learner", "weights"])
def test_a_frame_above_the_ports_limit_ends_its_connection(served: tuple[Process, Endpoints], role: str) -> None:
    with RawZmtp(getattr(served[1], role), TYPES[role]) as stranger:
        stranger.send(head(300 << 20, more=False))
        wait_until(stranger.is_cut, "the end of the connection")


@pytest.mark.parametrize("role", Endpoints.model_fields)
def test_no_burst_with_a_ping_and_a_reset_ends_the_broker(served: tuple[Process, Endpoints], role: str) -> None:
    """libzmq fails on them where a port has a bound on unread messages."""
    process, endpoints = served
    endpoint, kind = getattr(endpoints, role), b"SUB" if role == "weights" else b"DEALER"
    message = frame(b"\1t", more=False) if role == "weights" else _framed(SupervisorHello(fleet_id=FLEET, token="s"))
    for _ in range(6):
        with RawZmtp(endpoint, kind) as peer:
            peer.send((message * 4 + PING) * 700)
            peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with RawZmtp(endpoint, kind):
            assert process.popen.poll() is None, process.log.read_text()


def _framed(message: Message) -> bytes:
    """Return the bytes of a message as a peer without libzmq sends it."""
    return on_the_wire(message.frames())


def test_one_turn_ends_after_a_while_whatever_its_messages_take(start_broker: StartBroker) -> None:
    broker = start_broker(allow_insecure=True)
    turns, heard = list[int](), list[Message]()
    hear, drain = broker.broker.core.receive, broker.broker._drain

    def slow(peer: bytes, message: Message, *told: Any) -> None:
        heard.append(message)
        time.sleep(0.01)
        hear(peer, message, *told)

    def counted(socket: Any) -> None:
        before = len(heard)
        drain(socket)
        turns.append(len(heard) - before)

    with RawZmtp(broker.endpoints.worker) as peer:
        peer.send(_framed(WorkerHello(fleet_id=FLEET, token="t", slot=1, incarnation=1)))
        wait_until(lambda: peer.sock.recv(1), "the WELCOME")
        broker.broker.core.receive, broker.broker._drain = slow, counted  # type: ignore[method-assign]
        with blocked(broker):
            peer.send(_framed(Heartbeat(slot=1, incarnation=1, totals=WorkerTotals())) * 100)
        wait_until(lambda: sum(turns) == 100, "the heartbeats")
    assert max(turns) <= 4


def test_connections_beyond_the_bound_are_closed_and_peers_before_them_go_on(
    tmp_path: Path, start_feeder: StartFeeder
) -> None:
    with small_broker(tmp_path) as (process, endpoints), ExitStack() as stack:
        feeder = start_feeder(endpoints.worker, Envs(1).fragments(30))
        stream = stack.enter_context(EpisodeStream(endpoints.learner))
        batches = batches_of(stream, feeder.all_settled)
        next(batches)
        for role in ("worker", "learner"):
            for _ in range(2 * PLACES):
                with suppress(OSError):  # it may be closed at once
                    stack.enter_context(knock(getattr(endpoints, role)))
            told = f"at the {role} port: more than {PLACES} connections"
            wait_until(lambda told=told: told in process.log.read_text(), "the reason in the log")  # type: ignore[misc]
        assert len(list(batches)) < stream.delivered == 30
        assert feeder.error is None
        assert process.log.read_text().count(f"more than {PLACES} connections") < PLACES


@pytest.mark.parametrize("role", ["worker", "weights"])
def test_hundreds_of_workers_connect_at_once_to_a_broker_that_is_busy(tmp_path: Path, role: str) -> None:
    """The kernel keeps their connections. Beyond the backlog it drops them, and a peer tries again after a second."""
    with broker_process(tmp_path, allow_insecure=True) as process, ExitStack() as stack:
        state = read_broker_file(tmp_path)
        assert state is not None
        host, port = getattr(state.endpoints, role).removeprefix("tcp://").split(":")
        os.kill(process.popen.pid, signal.SIGSTOP)
        stack.callback(os.kill, process.popen.pid, signal.SIGCONT)
        for _ in range(300):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=5))


def test_a_watch_that_ends_by_an_unexpected_error_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        """A monitor that cannot be read."""

        def recv_multipart(self) -> list[bytes]:
            raise OSError("no monitor")

        def close(self, linger: int) -> None:
            """Do nothing."""

        def disable_monitor(self) -> None:
            """Do nothing."""

    PortWatch("worker", Broken(), 1).close(Broken())
    assert "the watch of the worker port has ended: nothing bounds its connections" in caplog.text


def test_a_watch_of_many_silent_peers_rests_as_long_as_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[tuple[float, float]] = []

    def slow_counts(fd: int, peer: tuple[str, int]) -> tuple[int, int]:
        began = time.monotonic()
        time.sleep(0.5)
        looks.append((began, time.monotonic()))
        return 0, 0

    monkeypatch.setattr("headrace.schemas.peers.port_watch.peer_of", lambda fd: ("127.0.0.1", 1))
    monkeypatch.setattr("headrace.schemas.peers.port_watch.byte_counts", slow_counts)
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as port, socket.socket() as client:
        monitor = port.get_monitor_socket(WATCH_EVENTS)
        watch = PortWatch("worker", monitor, 10, by_key=True)
        client.connect(("127.0.0.1", port.bind_to_random_port("tcp://127.0.0.1")))
        wait_until(lambda: len(looks) >= 2, "two looks at the silent peer")
        watch.close(port)
    context.term()
    assert looks[1][0] - looks[0][1] >= 0.4, looks
