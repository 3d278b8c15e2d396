"""Strangers at the ports of a real broker process: their memory and connections are bounded; honest peers go on."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from headrace.broker.files.state_file import Endpoints, read_broker_file
from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.ledger import Settled, WorkerTotals
from headrace.schemas.frames.wire import MessageKind
from headrace.schemas.messages import Heartbeat, Message, Obituary, SupervisorHello, WorkerHello
from headrace.schemas.peers import port_watch
from headrace.schemas.peers.descriptors import source_of
from headrace.schemas.peers.port_watch import STRANGE_MESSAGES, WATCH_EVENTS, PeerAccount, PortBounds, PortWatch
from support.pipeline.delivery import (
    FLEET,
    BrokerThread,
    Envs,
    Process,
    RawPeer,
    StartBroker,
    StartFeeder,
    batches_of,
    blocked,
    broker_process,
)
from support.raw_zmtp import PING, RawZmtp, frame, head, memory_of, on_the_wire
from support.waiting import wait_until

MIB = 1 << 20
BATCH_BYTES = 4 * MIB
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


def test_unfinished_messages_of_strangers_take_bounded_memory(served: tuple[Process, Endpoints]) -> None:
    process, endpoints = served
    before, part = memory_of(process.popen.pid), frame(bytes(BATCH_BYTES), more=True)
    with ExitStack() as stack:
        strangers = [stack.enter_context(RawZmtp(endpoints.worker)) for _ in range(40)]
        for stranger in strangers:
            stranger.send(part)
        wait_until(lambda: all(stranger.is_cut() for stranger in strangers), "the strangers to be cut")
        wait_until(lambda: memory_of(process.popen.pid) < before + 80 * MIB, "their memory to come back")


def test_an_unfinished_message_of_a_known_peer_ends_its_connection_beyond_the_largest_batch(
    served: tuple[Process, Endpoints],
) -> None:
    process, endpoints = served
    with RawZmtp(endpoints.worker) as peer:
        peer.send(_framed(WorkerHello(fleet_id=FLEET, token="u", slot=8, incarnation=1)))
        assert peer.sock.recv(1)
        part = frame(bytes(BATCH_BYTES), more=True)
        peer.send(part)
        assert not peer.is_cut()
        wait_until(lambda: not peer.send(part), "the end of the connection")
    told = "an unfinished message of more than 5 MiB"
    wait_until(lambda: told in process.log.read_text(), "the reason in the log")


def test_a_whole_message_of_many_frames_is_refused_and_costs_no_objects(served: tuple[Process, Endpoints]) -> None:
    process, endpoints = served
    with RawZmtp(endpoints.worker) as stranger:
        stranger.send(frame(b"x", more=True) * 200_000 + frame(b"", more=False))
        wait_until(lambda: "65 frames; 2 to 64 are allowed" in process.log.read_text(), "the refusal")
        assert not stranger.is_cut()


@pytest.mark.parametrize("role", ["worker", "learner", "weights"])
def test_a_frame_above_the_ports_limit_ends_its_connection(served: tuple[Process, Endpoints], role: str) -> None:
    with RawZmtp(getattr(served[1], role), TYPES[role]) as stranger:
        stranger.send(head(1 << 40, more=False))
        wait_until(stranger.is_cut, "the end of the connection")


def test_a_subscriber_that_sends_more_than_subscriptions_is_cut(served: tuple[Process, Endpoints]) -> None:
    with RawZmtp(served[1].weights, b"SUB") as stranger:
        subscription = frame(b"\1topic", more=False)
        wait_until(lambda: not stranger.send(subscription * 1000), "the end of the connection")


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


def test_a_thousand_large_hellos_at_once_are_answered(tmp_path: Path) -> None:
    """They have 16 MB together, which waits at a broker that stands still, and all peers are strangers so far."""
    with broker_process(tmp_path, allow_insecure=True) as process, ExitStack() as stack:
        state = read_broker_file(tmp_path)
        assert state is not None
        peers = [stack.enter_context(RawZmtp(state.endpoints.worker)) for _ in range(1000)]
        os.kill(process.popen.pid, signal.SIGSTOP)
        try:
            for slot, peer in enumerate(peers):
                hello = WorkerHello(fleet_id=FLEET, token=f"{slot}", slot=slot, incarnation=1, host="h" * (16 << 10))
                peer.send(_framed(hello))
        finally:
            os.kill(process.popen.pid, signal.SIGCONT)
        assert all(peer.sock.recv(1) for peer in peers), process.log.read_text()


def test_a_peer_that_gets_the_descriptor_of_a_stranger_is_not_cut_for_it(start_broker: StartBroker) -> None:
    """The stranger has gone before its messages are received. They count on no other connection."""
    broker, honest = start_broker(allow_insecure=True), list[RawZmtp]()
    watch = watch_of(broker)
    with ExitStack() as stack:
        stranger = stack.enter_context(RawZmtp(broker.endpoints.worker))
        wait_until(lambda: watch._connections, "the stranger")
        fds = set(watch._connections)
        with blocked(broker):
            with stranger:
                stranger.send(frame(b"garbage", more=False) * (2 * STRANGE_MESSAGES))
                wait_until(lambda: received(watch) > 2 * STRANGE_MESSAGES * len(b"garbage"), "all of it to come")
            wait_until(lambda: not watch._connections, "the stranger's end")
            connecting = threading.Thread(target=lambda: honest.append(RawZmtp(broker.endpoints.worker)))
            connecting.start()
            wait_until(lambda: watch._connections, "the honest peer")
            assert set(watch._connections) == fds, "the honest peer has another descriptor: this shows nothing"
        connecting.join()
        peer = stack.enter_context(honest.pop())
        wait_until(lambda: broker.ask(lambda asked: asked.core.refusals.total) > 0, "the stranger's messages")
        looks = watch._emptied_seen
        wait_until(lambda: watch._emptied_seen > looks, "a look at the silent peer")
        before = received(watch)
        peer.send(frame(b"garbage", more=False))
        wait_until(lambda: received(watch) > before or peer.is_cut(), "the next look")
        assert not peer.is_cut()
        assert not watch.cuts


def test_a_peer_that_floods_the_port_takes_turns_with_the_others(start_broker: StartBroker) -> None:
    """A newcomer is heard before all but a few of the 5,000 messages that came before its HELLO."""
    broker = start_broker(allow_insecure=True)
    heard, hear = list[type[Message]](), broker.broker.core.receive

    def receive(peer: bytes, message: Message, *told: Any) -> None:
        heard.append(type(message))
        hear(peer, message, *told)

    with RawPeer(broker.endpoints.worker) as flooder, RawPeer(broker.endpoints.worker) as newcomer:
        flooder.send(WorkerHello(fleet_id=FLEET, token="f", slot=1, incarnation=1).frames())
        flooder.receive_kind(MessageKind.WELCOME)
        watch, beat = watch_of(broker), Heartbeat(slot=1, incarnation=1, totals=WorkerTotals()).frames()
        broker.broker.core.receive = receive  # type: ignore[method-assign]
        with blocked(broker):
            for _ in range(5000):
                flooder.send(beat)
            sent = 5000 * sum(map(len, beat))
            wait_until(lambda: received(watch) > sent, "the flood")
            before = received(watch)
            newcomer.send(WorkerHello(fleet_id=FLEET, token="n", slot=2, incarnation=1).frames())
            wait_until(lambda: received(watch) > before + 100, "the newcomer's HELLO")
        newcomer.receive_kind(MessageKind.WELCOME)
    assert heard.index(WorkerHello) < 500


def test_a_known_peer_is_cut_once_too_many_of_its_messages_wait(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_watch, "MOST_WAITING", 1000)
    broker = start_broker(allow_insecure=True)
    beats = _framed(Heartbeat(slot=7, incarnation=1, totals=WorkerTotals())) * 1000
    with RawZmtp(broker.endpoints.worker) as flooder:
        flooder.send(_framed(WorkerHello(fleet_id=FLEET, token="f", slot=7, incarnation=1)))
        assert flooder.sock.recv(1)
        wait_until(lambda: not flooder.send(beats), "the end of the connection")
    wait_until(lambda: dict(watch_of(broker).cuts) == {"more than 1,000 messages wait": 1}, "the reason")


def test_a_supervisor_that_tells_of_a_thousand_dead_workers_is_no_flood(start_broker: StartBroker) -> None:
    broker = start_broker(allow_insecure=True)
    hello = _framed(SupervisorHello(fleet_id=FLEET, token="s"))
    with RawZmtp(broker.endpoints.worker) as supervisor:
        for slot in range(1000):
            death = Obituary(slot=slot, incarnation=1, totals=WorkerTotals(), settled=Settled(), reason="worker_killed")
            supervisor.send(hello + _framed(death))
        supervisor.send(frame(b"the", more=True) + frame(b"end", more=False))
        wait_until(lambda: broker.ask(lambda asked: asked.core.refusals.total), "the broker to read all of it")
        assert not supervisor.is_cut()


@contextmanager
def watched_port(bounds: PortBounds) -> Iterator[tuple[list[RawZmtp], list[PeerAccount], PortWatch]]:
    """Three known peers of a port that is empty, their accounts, and its watch."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as port, ExitStack() as stack:
        watch = PortWatch("worker", port.get_monitor_socket(WATCH_EVENTS), bounds)
        stack.callback(watch.close, port)
        url = f"tcp://127.0.0.1:{port.bind_to_random_port('tcp://127.0.0.1')}"
        peers, accounts = [stack.enter_context(RawZmtp(url)) for _ in range(3)], list[PeerAccount]()
        for peer in peers:
            peer.send(frame(b"hello", more=False))
            route, last = port.recv_multipart(copy=False)
            accounts.append(watch.heard(source_of(last), route.bytes, 5))
            accounts[-1].known = True
        watch.emptied()
        wait_until(lambda: len(watch._connections) == 3, "the watch to know all")
        yield peers, accounts, watch


def test_the_connection_that_holds_most_is_cut_where_all_hold_too_much() -> None:
    with watched_port(PortBounds(100, held_bytes=4 * MIB)) as (peers, _, watch):
        for peer, size in zip(peers, (1, 5, 2), strict=True):
            peer.send(frame(bytes(size * MIB), more=True))
        wait_until(peers[1].is_cut, "the end of a connection")
        wait_until(lambda: watch.cuts == {"all connections held more than 4 MiB of unfinished messages": 1}, "a count")
        assert not peers[0].is_cut()
        assert not peers[2].is_cut()


def test_a_large_message_under_way_behind_small_ones_is_not_taken_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is behind, and small messages come before the large one: it weighs as much as thousands of them."""
    monkeypatch.setattr(port_watch, "MOST_WAITING", 1000)
    with watched_port(PortBounds(100)) as (peers, accounts, watch):
        connection = next(iter(watch._connections.values()))
        account = watch._accounts[connection.fd]
        peers[accounts.index(account)].send(frame(bytes(MIB), more=True))
        wait_until(lambda: connection.held > MIB // 2, "a look at it")
        account.taken, account.messages = account.taken + 10, account.messages + 1
        wait_until(lambda: connection.behind == 1, "the next look")
        watch.emptied()
        wait_until(lambda: connection.behind == 0, "a look once the port was empty")
        assert not watch.cuts


def test_a_peer_that_speaks_has_a_time_for_its_hello_and_a_silent_one_may_stay(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_watch, "HELLO_S", 0.5)
    broker = start_broker(allow_insecure=True)
    watch = watch_of(broker)
    with RawZmtp(broker.endpoints.worker) as silent, RawZmtp(broker.endpoints.worker) as stranger:
        stranger.send(frame(b"garbage", more=False))
        wait_until(stranger.is_cut, "the end of the connection")
        wait_until(lambda: watch.cuts == {"no HELLO that was accepted in 0.5 s": 1}, "the reason")
        assert not silent.is_cut()


def _framed(message: Message) -> bytes:
    """Return the bytes of a message as a peer without libzmq sends it."""
    return on_the_wire(message.frames())


def watch_of(broker: BrokerThread) -> PortWatch:
    return broker.ask(lambda asked: asked.sockets.watches[asked.sockets.workers])


def received(watch: PortWatch) -> int:
    """Bytes that have come at all connections of a port, as the watch saw them."""
    return sum(connection.received for connection in list(watch._connections.values()))


@pytest.mark.parametrize("role", ["worker", "learner"])
def test_a_peer_that_never_says_hello_is_cut_after_a_few_messages(served: tuple[Process, Endpoints], role: str) -> None:
    with RawZmtp(getattr(served[1], role)) as stranger:
        stranger.send(frame(b"garbage", more=False) * (STRANGE_MESSAGES - 1))
        assert stranger.sock.recv(1)  # it is still answered
        stranger.send(frame(b"garbage", more=False))
        wait_until(stranger.is_cut, "the end of the connection")


def test_a_stranger_is_cut_after_two_megabytes(served: tuple[Process, Endpoints]) -> None:
    with RawZmtp(served[1].learner) as stranger:
        part = frame(b"garbage", more=True) + frame(bytes(1 << 20), more=False)
        stranger.send(part)
        assert stranger.sock.recv(1)
        wait_until(lambda: stranger.is_cut() or not stranger.send(part), "the end of the connection")
    wait_until(lambda: "messages without HELLO" in served[0].log.read_text(), "the reason in the log")


def test_refused_messages_are_logged_once_and_without_control_characters(served: tuple[Process, Endpoints]) -> None:
    process, endpoints = served
    with RawZmtp(endpoints.worker) as peer:
        peer.send(_framed(SupervisorHello(fleet_id=FLEET, token="s")))
        garbage = frame(b"\x1b]0;garbage\x07", more=True) + frame(b"", more=False)
        peer.send(garbage * 500)
        wait_until(lambda: peer.sock.recv(1 << 16), "an answer")
        assert not peer.is_cut()
    log = process.log.read_text()
    assert len(re.findall("a supervisor: bad_tag", log)) == 1
    assert "\x1b" not in log


def test_connections_beyond_the_bound_cost_honest_peers_nothing(tmp_path: Path, start_feeder: StartFeeder) -> None:
    with small_broker(tmp_path) as (process, endpoints), ExitStack() as stack:
        strangers = {
            role: [stack.enter_context(RawZmtp(getattr(endpoints, role), TYPES[role])) for _ in range(2 * PLACES)]
            for role in ("worker", "learner")
        }
        for crowd in strangers.values():
            wait_until(lambda crowd=crowd: sum(s.is_cut() for s in crowd) >= PLACES, "the first to be cut")  # type: ignore[misc]
        feeder = start_feeder(endpoints.worker, Envs(1).fragments(30))
        with EpisodeStream(endpoints.learner) as stream:
            for _ in batches_of(stream, feeder.all_settled):
                for crowd in strangers.values():
                    crowd.append(stack.enter_context(RawZmtp(endpoints.worker)))
                    crowd[-1].send(frame(b"garbage", more=False) + frame(bytes(1 << 16), more=True))
            assert stream.delivered == 30
        assert feeder.error is None
        told = [line for line in process.log.read_text().splitlines() if f"more than {PLACES} connections" in line]
        assert 2 <= len(told) < PLACES


@pytest.mark.parametrize("role", ["worker", "weights"])
def test_hundreds_of_workers_connect_at_once_to_a_broker_that_is_busy(tmp_path: Path, role: str) -> None:
    """The kernel keeps their connections. Beyond the backlog it drops them, and a peer tries again after a second."""
    with broker_process(tmp_path) as process, ExitStack() as stack:
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

        def poll(self, timeout: int) -> int:
            raise OSError("no monitor")

        def recv_multipart(self) -> list[bytes]:
            return []

        def close(self, linger: int) -> None:
            """Do nothing."""

        def disable_monitor(self) -> None:
            """Do nothing."""

    PortWatch("worker", Broken(), PortBounds(1)).close(Broken())
    assert "the watch of the worker port has ended: nothing bounds its connections" in caplog.text
