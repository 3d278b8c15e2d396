"""A peer with a valid HELLO at a real broker: what it does after a standstill or a loss passes; others have turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.ledger import HeldBatch, Settled, WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.frames.wire import MessageKind, encode
from headrace.schemas.messages import Heartbeat, Message, Obituary, Skip, SupervisorHello, WorkerHello
from support.pipeline.delivery import FLEET, BrokerThread, Envs, StartBroker, StartFeeder, Witness, batches_of, blocked
from support.raw_zmtp import RawZmtp, on_the_wire
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


def tiny_batch(seq: int) -> bytes:
    header = BatchHeader(fleet_id=FLEET, slot=1, incarnation=1, seq=seq, steps=10, chunks=2, totals=totals(seq))
    return on_the_wire(encode(MessageKind.BATCH, header.model_dump(mode="json")))


def tiny_skip(seq: int) -> bytes:
    batch = HeldBatch(seq=seq, steps=10, chunks=2)
    return framed(Skip(slot=1, incarnation=1, batch=batch, reason="broker_lost", totals=totals(seq)))


@contextmanager
def heard(broker: BrokerThread) -> Iterator[list[type[Message]]]:
    """The control messages that the broker's core is told meanwhile."""
    kinds, hear = list[type[Message]](), broker.broker.core.receive

    def receive(peer: bytes, message: Message, *told: Any) -> None:
        kinds.append(type(message))
        hear(peer, message, *told)

    broker.broker.core.receive = receive  # type: ignore[method-assign]
    yield kinds


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
