"""A worker's port beside a flood: the peer is cut early, what it left is dropped, and few new peers are admitted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from headrace.schemas.credentials.keys import ENV_HOST
from headrace.schemas.credentials.loopback_token import ServerToken
from headrace.schemas.peers.descriptors import TELLS_PEERS
from headrace.schemas.peers.handshakes import Handshakes
from headrace.schemas.peers.message_budget import MessageBudget
from headrace.workers.envs.remote.router_port import RouterPort
from support.raw_zmtp import RawZmtp, frame
from support.waiting import wait_until

SMALL, LARGE = frame(bytes(100), more=False), frame(bytes(4 << 20), more=False)
RICH = MessageBudget(1e9, 1e9, 1e9)


@contextmanager
def a_port(token: str = "") -> Iterator[RouterPort]:
    port = RouterPort("127.0.0.1", 0, ServerToken(token) if token else None)
    try:
        yield port
    finally:
        port.close()


@contextmanager
def a_client(port: RouterPort, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[zmq.Socket[bytes]]:
    with context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        for name, value in Handshakes(port.endpoint, ENV_HOST, None).options().items():
            sock.setsockopt(getattr(zmq, name), value)
        sock.connect(port.endpoint)
        yield sock


def take(port: RouterPort, most: int = 256) -> int:
    """Take messages of known peers. Return their number."""
    taken = 0
    for _ in port.receive(most) if port.wait(0.01) else ():
        port.know(RICH)
        taken += 1
    return taken


@pytest.mark.skipif(not TELLS_PEERS, reason="this system does not count a connection's bytes")
def test_a_known_peer_is_cut_once_thousands_of_its_messages_wait() -> None:
    with a_port() as port, RawZmtp(port.endpoint) as liar:
        liar.send(SMALL * 50_000)
        taken = 0

        def cut() -> bool:
            nonlocal taken
            taken += take(port)
            return liar.is_cut()

        wait_until(cut, "the liar to be cut")
        assert taken < 2_000, "the rest is dropped"
        wait_until(lambda: not take(port) and not port.wait(0.0), "the rest to be dropped")
        assert port._watch is not None
        wait_until(lambda: dict(port._watch.cuts) == {"more than 2048 messages at a time": 1}, "a count")  # type: ignore[union-attr]


def test_small_messages_around_a_large_one_are_no_flood() -> None:
    with a_port() as port, RawZmtp(port.endpoint) as client:
        taken = 0
        for _ in range(3):
            client.send(SMALL * 100 + LARGE)
        client.send(SMALL * 1500)

        def all_taken() -> bool:
            nonlocal taken
            taken += take(port)
            return taken == 1803

        wait_until(all_taken, "all messages")
        assert not client.is_cut()


def test_dropped_messages_do_not_count_among_those_of_a_turn() -> None:
    with a_port() as port, RawZmtp(port.endpoint) as liar:
        liar.send(SMALL)
        wait_until(lambda: take(port) == 1, "the first message")
        assert port.speaker is not None
        assert port._watch is not None
        port._watch.gone(port.speaker[1].route)
        liar.send(SMALL * 500)
        wait_until(lambda: port.wait(0.01), "the others")
        turns = 0
        while port.wait(0.1):
            assert take(port, most=1) == 0
            turns += 1
        assert turns < 100


def test_few_new_peers_are_admitted_while_a_flood_is_received() -> None:
    with a_port("the-token-of-this-port") as port, zmq.Context() as context, a_client(port, context) as flood:
        flood.send(b"hello")
        wait_until(lambda: take(port) == 1, "the first message")
        assert port._watch is not None
        port._watch.admission.be_wary()
        port._watch.behind()
        for _ in range(10):
            flood.send(b"again")
        wait_until(lambda: port.wait(0.01), "a message that waits")
        with a_client(port, context) as late:
            late.send(b"late")
            wait_until(lambda: port.wait(0.01) and bool(port._waiting), "a peer that waits")
            for _ in range(10):
                port.wait(0.01)
            assert len(port._waiting) == 1
            wait_until(lambda: take(port) == 0 and not port._waiting, "its admission")
            wait_until(lambda: take(port) == 1, "its message")
