"""Strangers at the ports of a real broker process: their memory and connections are bounded; honest peers go on."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from headrace.broker.files.state_file import Endpoints, read_broker_file
from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.ledger import Settled, WorkerTotals
from headrace.schemas.frames.wire import MessageKind
from headrace.schemas.messages import Heartbeat, Message, Obituary, SupervisorHello, WorkerHello
from headrace.schemas.peers import peer_account, port_watch
from headrace.schemas.peers.admission import ADMISSION_S, ADMITTED_AT_ONCE, MOST_ADMITTED, WARY_S, Admission
from headrace.schemas.peers.descriptors import source_of
from headrace.schemas.peers.message_budget import MessageBudget
from headrace.schemas.peers.peer_account import KNOWN_BURST, KNOWN_FIRST, KNOWN_PER_S, REFUSED_BURST, PeerAccount
from headrace.schemas.peers.port_watch import (
    EMPTY_MESSAGES,
    STRANGE_MESSAGES,
    STRANGERS_BYTES,
    WATCH_EVENTS,
    PortBounds,
    PortWatch,
)
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
from support.waiting import TIMEOUT_S, wait_until

BATCH_BYTES = 4 << 20
LARGEST = BATCH_BYTES + (1 << 20)
"""The most bytes that strangers together may hold at the worker port."""
PEAK = 4 * STRANGERS_BYTES
"""Memory for what strangers may hold at any port, and for what came since."""
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
    before = memory_of(process.popen.pid)
    part = frame(bytes(BATCH_BYTES), more=True)
    with ExitStack() as stack:
        strangers = [stack.enter_context(RawZmtp(endpoints.worker)) for _ in range(40)]
        for stranger in strangers:
            stranger.send(part)
        may_stay = LARGEST // BATCH_BYTES
        wait_until(lambda: sum(s.is_cut() for s in strangers) >= 40 - may_stay, "the strangers to be cut")
        wait_until(lambda: memory_of(process.popen.pid) < before + 16 * LARGEST, "their memory to come back")


def test_unfinished_messages_where_large_ones_are_allowed_take_no_more(served: tuple[Process, Endpoints]) -> None:
    process, endpoints = served
    Path(f"/proc/{process.popen.pid}/clear_refs").write_text("5")  # VmHWM begins again
    before, part, stay = memory_of(process.popen.pid), frame(bytes(8 << 20), more=True), list[RawZmtp]()
    with ExitStack() as stack:
        for _ in range(40):
            stay.append(stack.enter_context(RawZmtp(endpoints.learner)))
            stay[-1].send(part)
            wait_until(lambda: sum(not s.is_cut() for s in stay) <= 2, "a stranger to be cut")
            stay[:] = [stranger for stranger in stay if not stranger.is_cut()]
    assert memory_of(process.popen.pid, "VmHWM") < before + PEAK


@pytest.mark.parametrize("role", ["worker", "learner"])
def test_a_message_of_countless_tiny_frames_ends_its_connection(served: tuple[Process, Endpoints], role: str) -> None:
    process, endpoints = served
    before = memory_of(process.popen.pid)
    with RawZmtp(getattr(endpoints, role)) as stranger:
        sent, frames = 0, frame(b"", more=True) * (1 << 17)
        while sent < 300 << 20 and stranger.send(frames):
            sent += len(frames)
        assert sent < 300 << 20, "the broker took it all"
    assert memory_of(process.popen.pid) < before + (1 << 30)  # 300 MiB of such frames take 9.6 GiB


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


@pytest.mark.parametrize("role", ["worker", "learner"])
def test_a_stranger_that_sends_empty_messages_is_cut(served: tuple[Process, Endpoints], role: str) -> None:
    process, endpoints = served
    with RawZmtp(getattr(endpoints, role)) as stranger:
        stranger.send(frame(b"", more=False) * EMPTY_MESSAGES)
        wait_until(stranger.is_cut, "the end of the connection")
    told = f"at the {role} port: empty messages"
    wait_until(lambda: told in process.log.read_text(), "the reason in the log")


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


def test_streams_of_zeros_take_bounded_memory(served: tuple[Process, Endpoints]) -> None:
    """Each one is half a million empty messages to libzmq, which take 32 MiB."""
    process, endpoints = served
    Path(f"/proc/{process.popen.pid}/clear_refs").write_text("5")  # VmHWM begins again
    before, strangers = memory_of(process.popen.pid), list[RawZmtp]()
    with ExitStack() as stack:
        for _ in range(10):
            wait_until(partial(_connects, endpoints.worker, strangers), "the port to admit it")
            stranger = stack.enter_context(strangers.pop())
            stranger.send(bytes(1 << 20))
            wait_until(stranger.is_cut, "the end of the connection")
    assert memory_of(process.popen.pid, "VmHWM") < before + PEAK


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


def test_what_a_cut_stranger_had_sent_is_dropped_unread(start_broker: StartBroker) -> None:
    """libzmq hands out each message that it had made, also of a connection that has ended."""
    broker = start_broker(allow_insecure=True)
    watch = watch_of(broker)
    with RawZmtp(broker.endpoints.worker) as stranger:
        with blocked(broker):
            stranger.send(frame(b"garbage", more=False) * 2000)
            wait_until(lambda: received(watch) > 2000 * len(frame(b"garbage", more=False)), "all of it to come")
            before = watch._emptied
        wait_until(stranger.is_cut, "the end of the connection")
    wait_until(lambda: broker.ask(lambda _: watch._emptied) > before, "the port to be empty")
    assert broker.ask(lambda asked: asked.core.refusals.total) == STRANGE_MESSAGES


def test_the_oldest_of_too_many_strangers_are_cut(start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_watch, "STRANGERS", 3)
    broker = start_broker(allow_insecure=True)
    watch = watch_of(broker)
    with ExitStack() as stack:
        strangers = [stack.enter_context(RawZmtp(broker.endpoints.worker)) for _ in range(5)]
        wait_until(lambda: all(stranger.is_cut() for stranger in strangers[:2]), "the oldest to be cut")
        wait_until(lambda: watch.cuts == {"more than 3 connections without HELLO": 2}, "the reason")
        assert not any(stranger.is_cut() for stranger in strangers[2:])
    wait_until(lambda: watch._pause_s() == port_watch.SLOW_LOOK_S, "the watch to be at rest once all have gone")


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


def test_a_known_peer_that_floods_the_port_is_cut(served: tuple[Process, Endpoints]) -> None:
    process, endpoints = served
    with RawZmtp(endpoints.worker) as flooder:
        flooder.send(_framed(WorkerHello(fleet_id=FLEET, token="f", slot=7, incarnation=1)))
        assert flooder.sock.recv(1), "the WELCOME; a broker that is behind would cut a stranger for what it holds"
        beats = _framed(Heartbeat(slot=7, incarnation=1, totals=WorkerTotals())) * 100
        wait_until(lambda: not flooder.send(beats), "the end of the connection")
    # Whichever comes first: its budget is spent, or too many wait.
    told = re.compile("too many messages that bring nothing new|more than 2048 messages at a time")
    wait_until(lambda: told.search(process.log.read_text()), "the reason in the log")


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


def test_batches_do_not_count_as_a_flood(
    start_broker: StartBroker, start_feeder: StartFeeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_account, "KNOWN_FIRST", 4)
    monkeypatch.setattr(peer_account, "KNOWN_BURST", 4)
    monkeypatch.setattr(peer_account, "KNOWN_PER_S", 5.0)
    broker = start_broker()
    feeder = start_feeder(broker.endpoints.worker, Envs(1).fragments(100))
    with EpisodeStream(broker.endpoints.learner) as stream:
        for _ in batches_of(stream, feeder.all_settled):
            pass
        assert stream.delivered == 100
    assert not watch_of(broker).cuts


@pytest.mark.parametrize(
    "speak",
    [
        lambda watch, account: watch.strange(-1, account, 0),
        lambda watch, account: watch.spoke(-1, account, 1.0),
    ],
    ids=["zeros", "flood"],
)
def test_a_port_that_was_attacked_admits_few_peers_for_a_while(
    speak: Callable[[PortWatch, PeerAccount], None],
) -> None:
    clock = [1000.0]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as port, ExitStack() as stack:
        watch = PortWatch("worker", port.get_monitor_socket(WATCH_EVENTS), PortBounds(100))
        stack.callback(watch.close, port)
        admission = watch.admission = Admission(lambda: clock[0])
        idle = MessageBudget(KNOWN_BURST, KNOWN_PER_S, KNOWN_FIRST, lambda: clock[0])
        account = PeerAccount(b"route", peer=("192.0.2.1", 1), idle=idle)
        assert admission.places(waits=False) == MOST_ADMITTED
        for _ in range(KNOWN_FIRST + 1):
            speak(watch, account)
        assert admission.places(waits=False) == ADMITTED_AT_ONCE
        assert admission.places(waits=False) == 0, "a second turn at the same moment"
        clock[0] += ADMISSION_S
        watch.behind()
        assert admission.places(waits=True) == 0, "messages wait at the port"
        watch.emptied()
        assert admission.places(waits=True) == ADMITTED_AT_ONCE
        clock[0] += WARY_S
        assert admission.places(waits=False) == MOST_ADMITTED


def test_a_peer_that_the_port_defers_is_admitted_later_and_wakes_nothing_meanwhile(start_broker: StartBroker) -> None:
    broker, admitted = start_broker(allow_insecure=True), list[RawZmtp]()
    watch, asked, turns = watch_of(broker), threading.Event(), Counter[str]()
    places = watch.admission.places

    def none_now(*, waits: bool) -> int:
        asked.set()
        turns["admission"] += 1
        return 0

    watch.admission.places = none_now  # type: ignore[method-assign]
    connecting = threading.Thread(target=lambda: admitted.append(RawZmtp(broker.endpoints.worker)))
    connecting.start()
    assert asked.wait(TIMEOUT_S)
    time.sleep(0.5)
    assert turns["admission"] < 2 * 0.5 / ADMISSION_S, "the broker spins while a peer waits"
    assert not admitted
    watch.admission.places = places  # type: ignore[method-assign]
    connecting.join(TIMEOUT_S)
    with admitted.pop():
        pass


def _framed(message: Message) -> bytes:
    """Return the bytes of a message as a peer without libzmq sends it."""
    return on_the_wire(message.frames())


def _connects(endpoint: str, into: list[RawZmtp]) -> bool:
    """Try to connect. The broker ends a handshake that takes too long, as one beside zeros may; peers try again."""
    with suppress(OSError, AssertionError):
        into.append(RawZmtp(endpoint))
    return bool(into)


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


def test_a_peer_with_too_many_refused_messages_is_cut_and_logged_once(served: tuple[Process, Endpoints]) -> None:
    process, endpoints = served
    hello = SupervisorHello(fleet_id=FLEET, token="s").frames()
    with RawZmtp(endpoints.worker) as peer:
        peer.send(frame(bytes(hello[0]), more=True) + frame(bytes(hello[1]), more=False))
        garbage = frame(b"\x1b]0;garbage\x07", more=True) + frame(b"", more=False)
        peer.send(garbage * (REFUSED_BURST // 2))
        wait_until(lambda: peer.sock.recv(1 << 16), "an answer")
        wait_until(lambda: not peer.send(garbage * 100), "the end of the connection")
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


def test_known_peers_are_looked_at_when_they_hold_something_or_memory_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, received = Counter[int](), port_watch.bytes_received
    part = frame(bytes(2 * port_watch._GROWN_BYTES), more=True)  # made before, since it grows this process too

    def counting(fd: int) -> int:
        looks[fd] += 1
        return received(fd)

    monkeypatch.setattr(port_watch, "bytes_received", counting)
    monkeypatch.setattr(port_watch, "LOOK_AT_ALL_S", 3600.0)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as port, ExitStack() as stack:
        watch = PortWatch("worker", port.get_monitor_socket(WATCH_EVENTS), PortBounds(100))
        stack.callback(watch.close, port)
        url = f"tcp://127.0.0.1:{port.bind_to_random_port('tcp://127.0.0.1')}"
        peers = [stack.enter_context(RawZmtp(url)) for _ in range(3)]
        for peer in peers:
            peer.send(frame(b"hello", more=False))
            fd = source_of(port.recv_multipart(copy=False)[-1])
            watch.emptied()
            watch.heard(fd, b"route %d" % fd, 5).known = True
        time.sleep(4 * port_watch.SLOW_LOOK_S)
        looks.clear()
        time.sleep(4 * port_watch.SLOW_LOOK_S)
        assert not looks, "the watch looks at peers that are silent"
        peers[2].send(part)
        wait_until(lambda: looks[fd] > 4, "looks at a peer that holds a part of a message")
        assert looks.pop(fd) > 2 * max(looks.values()), "the watch looks as often at the others"


def test_a_watch_that_ends_by_an_unexpected_error_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        """A monitor that cannot be read."""

        def get(self, option: int) -> int:
            return theirs.fileno()

        def poll(self, timeout: int) -> int:
            raise OSError("no monitor")

        def recv_multipart(self) -> list[bytes]:
            return []

        def close(self, linger: int) -> None:
            """Do nothing."""

        def disable_monitor(self) -> None:
            """Do nothing."""

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.send(b"news")
        PortWatch("worker", Broken(), PortBounds(1)).close(Broken())
    assert "the watch of the worker port has ended: nothing bounds its connections" in caplog.text
