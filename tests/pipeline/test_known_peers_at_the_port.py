"""A peer with a valid HELLO at a real broker: honest peers beside it go on, and honest habits pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.broker import process
from headrace.broker.ports import charges
from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.ledger import HeldBatch, Settled, WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.frames.wire import MessageKind, encode
from headrace.schemas.messages import Heartbeat, Message, Obituary, Skip, SupervisorHello, WorkerHello
from headrace.schemas.peers import peer_account, port_watch
from headrace.schemas.peers.admission import ADMITTED_AT_ONCE
from headrace.schemas.peers.descriptors import TELLS_PEERS
from headrace.schemas.peers.message_budget import MessageBudget
from headrace.schemas.peers.port_watch import PortWatch
from support.pipeline.delivery import (
    FLEET,
    BrokerThread,
    Envs,
    StartBroker,
    StartFeeder,
    Witness,
    batches_of,
    blocked,
)
from support.raw_zmtp import RawZmtp, frame, on_the_wire
from support.simulation.even_batches import totals
from support.waiting import wait_until

MIB = 1 << 20
WINDOW = 1024
"""Batches that a worker may have under way."""


def framed(message: Message) -> bytes:
    """The bytes of a message as a peer without libzmq sends it."""
    return on_the_wire(message.frames())


def hello(slot: int, **changes: Any) -> bytes:
    return framed(WorkerHello(fleet_id=FLEET, token=f"{slot}", slot=slot, incarnation=1, **changes))


def beat(slot: int) -> bytes:
    return framed(Heartbeat(slot=slot, incarnation=1, totals=WorkerTotals()))


def large(slot: int) -> bytes:
    """A heartbeat of 0.9 MiB, most of it a field that this version does not know."""
    fields = Heartbeat(slot=slot, incarnation=1, totals=WorkerTotals()).model_dump(mode="json")
    return on_the_wire(encode(MessageKind.HEARTBEAT, fields | {"later": "x" * (900 << 10)}))


def tiny_batch(seq: int, **fields: Any) -> bytes:
    header = BatchHeader(fleet_id=FLEET, slot=1, incarnation=1, seq=seq, steps=10, chunks=2, totals=totals(seq))
    return on_the_wire(encode(MessageKind.BATCH, header.model_dump(mode="json") | fields))


def tiny_skip(seq: int) -> bytes:
    batch = HeldBatch(seq=seq, steps=10, chunks=2)
    return framed(Skip(slot=1, incarnation=1, batch=batch, reason="broker_lost", totals=totals(seq)))


def connected(endpoint: str) -> RawZmtp:
    """A new connection. After a flood the broker may end a handshake, and peers try again."""
    made = list[RawZmtp]()

    def connects() -> bool:
        with suppress(OSError, AssertionError):
            made.append(RawZmtp(endpoint))
        return bool(made)

    wait_until(connects, "the port to admit a peer")
    return made[0]


def watch_of(broker: BrokerThread) -> PortWatch:
    return broker.ask(lambda asked: asked.sockets.watches[asked.sockets.workers])


@contextmanager
def heard(broker: BrokerThread) -> Iterator[list[type[Message]]]:
    """The control messages that the broker's core is told meanwhile."""
    kinds, hear = list[type[Message]](), broker.broker.core.receive

    def receive(peer: bytes, message: Message, *told: Any) -> None:
        kinds.append(type(message))
        hear(peer, message, *told)

    broker.broker.core.receive = receive  # type: ignore[method-assign]
    yield kinds


def test_a_message_that_its_sender_cannot_pay_for_is_not_read(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of 0.9 MiB cost what 450 small ones do. A new connection of the slot pays for no third."""
    monkeypatch.setattr(peer_account, "KNOWN_PER_S", 0.0)
    broker = start_broker(allow_insecure=True)
    with heard(broker) as kinds:
        for _ in range(5):
            with connected(broker.endpoints.worker) as peer:
                peer.send(hello(1))
                wait_until(lambda peer=peer: peer.sock.recv(1), "the WELCOME")  # type: ignore[misc]
                wait_until(lambda peer=peer: not peer.send(large(1)), "the end of the connection")  # type: ignore[misc]
    assert kinds.count(Heartbeat) == 2


def test_accepted_batches_with_headers_of_a_megabyte_end_a_connection_soon(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes about 10 ms of the broker's loop. Headers of a usual size cost nothing."""
    monkeypatch.setattr(peer_account, "KNOWN_PER_S", 0.0)
    broker = start_broker(allow_insecure=True)
    with RawZmtp(broker.endpoints.worker) as peer:
        peer.send(hello(1))
        assert peer.sock.recv(1)
        assert peer.send(b"".join(tiny_batch(seq, later="x" * (100 << 10)) for seq in range(1, 8)))
        for seq in range(8, 20):
            peer.send(tiny_batch(seq, later="x" * (900 << 10)))
        wait_until(peer.is_cut, "the end of the connection")
    accepted = broker.ask(lambda asked: asked.core.sources[1, 1].accepted)
    assert 7 < accepted < 12


def test_refused_messages_of_a_megabyte_end_a_connection_soon(start_broker: StartBroker) -> None:
    """A supervisor pays a tenth for its messages, but not for those that are refused."""
    broker = start_broker(allow_insecure=True)
    garbage = frame(b"garbage", more=True) + frame(b"{" * (900 << 10), more=False)
    with RawZmtp(broker.endpoints.worker) as peer:
        peer.send(framed(SupervisorHello(fleet_id=FLEET, token="s")))
        wait_until(lambda: not peer.send(garbage), "the end of the connection")
    assert broker.ask(lambda asked: asked.core.refusals.total) <= 6
    assert watch_of(broker).admission.places(waits=False) <= ADMITTED_AT_ONCE, "the next may be like it"


def rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let peers pay for all that they say."""
    for name in ("KNOWN_FIRST", "KNOWN_BURST", "KNOWN_PER_S"):
        monkeypatch.setattr(peer_account, name, 1e9)


@pytest.mark.skipif(not TELLS_PEERS, reason="this system does not count a connection's bytes")
@pytest.mark.parametrize(
    ("first", "then"),
    [(hello(1), beat(1)), (framed(SupervisorHello(fleet_id=FLEET, token="s")),) * 2],
    ids=["heartbeats", "hellos"],
)
def test_a_peer_is_cut_once_thousands_of_its_messages_wait(
    first: bytes, then: bytes, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    rich(monkeypatch)
    broker = start_broker(allow_insecure=True)
    with heard(broker) as kinds, RawZmtp(broker.endpoints.worker) as peer:
        peer.send(first + then * 50_000)
        wait_until(peer.is_cut, "the end of the connection")
    wait_until(lambda: dict(watch_of(broker).cuts) == {"more than 2048 messages at a time": 1}, "the reason")
    assert len(kinds) < 3000, "the rest is dropped"


def test_large_messages_behind_hundreds_of_skips_are_no_flood(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They weigh as much as thousands of SKIPs."""
    rich(monkeypatch)
    broker = start_broker(allow_insecure=True, max_batch_bytes=1 << 16)
    large_ones = (frame(b"not", more=True) + frame(b"headrace", more=True) + frame(bytes(MIB), more=False)) * 8
    with heard(broker) as kinds, RawZmtp(broker.endpoints.worker) as peer:
        peer.send(hello(1))
        assert peer.sock.recv(1)
        hear = broker.broker.core.receive

        def receive(*told: Any) -> None:
            hear(*told)
            if kinds.count(Skip) == 100:
                peer.send(large_ones)

        broker.broker.core.receive = receive  # type: ignore[method-assign]
        with blocked(broker):
            peer.send(b"".join(map(tiny_skip, range(1, 601))))
        wait_until(lambda: broker.ask(lambda asked: asked.core.refusals.total) == 8, "the broker to read all of it")
        assert not peer.is_cut()


def test_large_messages_of_strangers_are_read_a_few_at_a_time(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charges, "_LARGE_BURST", 500)
    monkeypatch.setattr(charges, "_LARGE_PER_S", 0.0)
    broker = start_broker(allow_insecure=True)
    garbage = frame(b"garbage", more=True) + frame(b"{" * (900 << 10), more=False)
    for _ in range(10):
        with RawZmtp(broker.endpoints.worker) as peer:
            peer.send(garbage * 2)
            wait_until(lambda peer=peer: peer.is_cut() or not peer.send(garbage), "the end of the connection")  # type: ignore[misc]
    assert broker.ask(lambda asked: asked.core.refusals.total) <= 6
    with RawZmtp(broker.endpoints.worker) as peer:
        peer.send(hello(1))
        assert peer.sock.recv(1), "a HELLO of the usual size is read"


def test_a_new_connection_goes_on_with_what_its_slot_may_still_send(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_account, "KNOWN_FIRST", 30)
    monkeypatch.setattr(peer_account, "KNOWN_BURST", 30)
    monkeypatch.setattr(peer_account, "KNOWN_PER_S", 0.0)
    broker = start_broker(allow_insecure=True)
    with heard(broker) as kinds:
        for _ in range(5):
            with connected(broker.endpoints.worker) as peer:
                read = len(kinds) + 21
                peer.send(hello(1) + beat(1) * 20)
                wait_until(lambda peer=peer, read=read: peer.is_cut() or len(kinds) == read, "the broker to read them")  # type: ignore[misc]
    assert kinds.count(WorkerHello) == 5
    assert 20 < kinds.count(Heartbeat) <= 30 + 5


@pytest.mark.parametrize(("nbytes", "most"), [(0, 300), (8 << 10, 15)])
def test_a_groups_supervisors_share_what_they_may_send(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, nbytes: int, most: int
) -> None:
    """They pay a tenth for a message, and all of its bytes."""
    monkeypatch.setattr(peer_account, "KNOWN_BURST", 30)
    monkeypatch.setattr(peer_account, "KNOWN_PER_S", 0.0)
    broker = start_broker(allow_insecure=True)
    fields = Obituary(slot=1, incarnation=1, totals=WorkerTotals(), settled=Settled(), reason="worker_killed")
    obituary = on_the_wire(encode(MessageKind.OBITUARY, fields.model_dump(mode="json") | {"later": "x" * nbytes}))
    with heard(broker) as kinds:
        for _ in range(4):
            with connected(broker.endpoints.worker) as peer:
                read = len(kinds) + 101
                peer.send(framed(SupervisorHello(fleet_id=FLEET, token="s")) + obituary * 100)
                wait_until(lambda peer=peer, read=read: peer.is_cut() or len(kinds) == read, "the broker to read them")  # type: ignore[misc]
    assert most / 2 < kinds.count(Obituary) <= most


def test_what_ended_connections_leave_is_read_only_in_part(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each one says HELLO and 250 heartbeats, and closes, before the broker has received any of that.

    The broker may learn of an end only when it answers, after a turn.
    """
    monkeypatch.setattr(port_watch, "LEFT_BURST", 100)
    monkeypatch.setattr(port_watch, "LEFT_PER_S", 0.0)
    broker = start_broker(allow_insecure=True)
    watch = watch_of(broker)
    with heard(broker) as kinds, ExitStack() as stack:
        peers = [stack.enter_context(RawZmtp(broker.endpoints.worker)) for _ in range(40)]
        wait_until(lambda: len(watch._connections) == 40, "the watch to know all")
        with blocked(broker):
            for slot, peer in enumerate(peers):
                with peer:
                    peer.send(hello(slot) + beat(slot) * 250)
            wait_until(lambda: not watch._connections, "the end of all")
            before = watch._emptied
        wait_until(lambda: watch._emptied > before, "the port to be empty")
    assert len(kinds) <= 100 + process._BURST


def test_one_turn_ends_after_a_while_whatever_its_messages_take(start_broker: StartBroker) -> None:
    broker = start_broker(allow_insecure=True)
    turns, drain = list[int](), broker.broker._drain
    with heard(broker) as kinds, RawZmtp(broker.endpoints.worker) as peer:
        peer.send(hello(1))
        wait_until(lambda: peer.sock.recv(1), "the WELCOME")
        hear = broker.broker.core.receive

        def slow(*told: Any) -> None:
            time.sleep(0.01)
            hear(*told)

        def counted(socket: Any) -> None:
            before = len(kinds)
            drain(socket)
            turns.append(len(kinds) - before)

        broker.broker.core.receive, broker.broker._drain = slow, counted  # type: ignore[method-assign]
        with blocked(broker):
            peer.send(beat(1) * 100)
        wait_until(lambda: sum(turns) == 100, "the heartbeats")
    assert max(turns) <= 4


@pytest.mark.parametrize("first", [tiny_batch, tiny_skip], ids=["batches", "skips"])
def test_a_window_that_is_sent_again_after_a_standstill_is_no_flood(
    first: Callable[[int], bytes], start_broker: StartBroker
) -> None:
    """It comes once as the worker sent it, and once as it repeats it after the next WELCOME."""
    broker = start_broker(allow_insecure=True, max_batch_bytes=1 << 16)
    with heard(broker) as kinds, RawZmtp(broker.endpoints.worker) as peer:
        peer.send(hello(1))
        wait_until(lambda: peer.sock.recv(1), "the WELCOME")
        peer.send(b"".join(map(first, range(1, WINDOW + 1))))
        wait_until(lambda: broker.broker.core.sources[1, 1].accepted == WINDOW, "all to be accepted")
        with blocked(broker):
            peer.send(b"".join(map(tiny_batch, range(1, WINDOW + 1))) + hello(1, totals=totals(WINDOW)))
        wait_until(lambda: kinds.count(WorkerHello) == 2, "the broker to read all of it")
        assert not peer.is_cut()


def test_a_supervisor_of_300_workers_that_all_died_is_no_flood(start_broker: StartBroker) -> None:
    broker = start_broker(allow_insecure=True)
    said = framed(SupervisorHello(fleet_id=FLEET, token="s"))
    window = [HeldBatch(seq=seq, steps=10, chunks=2) for seq in range(1, 17)]
    with heard(broker) as kinds, RawZmtp(broker.endpoints.worker) as supervisor:
        for slot in range(300):
            words = {"totals": totals(16), "settled": Settled(), "window": window, "reason": "worker_killed"}
            supervisor.send(said + framed(Obituary(slot=slot, incarnation=1, **words)))
        wait_until(lambda: kinds.count(Obituary) == 300, "the broker to read all of it")
        assert not supervisor.is_cut()
        assert not broker.ask(lambda asked: asked.core.refusals.total)


def test_batches_that_grow_beyond_their_room_wait_and_none_is_lost(
    start_broker: StartBroker, start_feeder: StartFeeder
) -> None:
    """Small ones buy credit for hundreds. The large ones behind them are refused until there is room."""
    broker = start_broker(max_held_bytes=MIB, max_batch_bytes=MIB // 4)
    plan = [*Envs(1).fragments(30), *Envs(2).fragments(60, pixels=4000)]
    feeder = start_feeder(broker.endpoints.worker, plan, window=100)
    wait_until(lambda: broker.held_bytes() > MIB * 3 // 4, "a full broker")
    witness, most = Witness(), 0
    with EpisodeStream(broker.endpoints.learner) as stream:
        for batch in batches_of(stream, feeder.all_settled):
            witness.see(batch)
            most = max(most, broker.held_bytes())
    assert witness.steps == sum(batch.steps for batch in plan)
    assert most <= MIB + MIB // 4
    assert feeder.error is None


def test_a_budget_is_spent_and_comes_back_with_time() -> None:
    clock = SimpleNamespace(now=0.0)
    budget = MessageBudget(most=10, per_s=2.0, left=3, clock=lambda: clock.now)
    assert budget.has(3)
    assert budget.spend(3)
    assert not budget.spend(0.5)
    clock.now = 1.0
    assert budget.spend(2)
    assert not budget.has(0.1)
    clock.now = 100.0
    assert budget.has(10)
    assert not budget.spend(11)
    assert not budget.has(0.1)
