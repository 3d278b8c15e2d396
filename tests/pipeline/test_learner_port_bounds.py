"""Floods at the learners' port: of a learner that holds the lease, and of one that has lost it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.accounts.logged_metrics import MOST_VALUES
from headrace.schemas.messages import (
    Commit,
    LearnerHello,
    LearnerRow,
    LearnerRows,
    Message,
    WeightsPull,
)
from headrace.schemas.messages.learner_messages import MOST_ROWS
from headrace.schemas.peers import peer_account, port_watch
from headrace.schemas.peers.admission import ADMITTED_AT_ONCE
from headrace.schemas.peers.descriptors import TELLS_PEERS
from headrace.schemas.peers.port_watch import STRANGE_MESSAGES, PortWatch
from support.pipeline.delivery import FLEET, BrokerThread, Envs, StartBroker, StartFeeder, batches_of
from support.raw_zmtp import RawZmtp, frame
from support.waiting import TIMEOUT_S, wait_until


def framed(message: Message) -> bytes:
    """Return the bytes of a message as a peer without libzmq sends it."""
    *first, last = (bytes(part) for part in message.frames())
    return b"".join(frame(part, more=True) for part in first) + frame(last, more=False)


def hello(token: str, channel: Any = "stream") -> bytes:
    return framed(LearnerHello(fleet_id=FLEET, token=token, channel=channel))


def watch_of(broker: BrokerThread) -> PortWatch:
    return broker.ask(lambda asked: asked.sockets.watches[asked.sockets.learners])


def rows(epoch: int, number: int) -> bytes:
    return framed(LearnerRows(epoch=epoch, rows=[LearnerRow(epoch=epoch, number=number, values={"loss": 1.0})]))


def large_rows() -> bytes:
    """Return one message of 430 kB."""
    values = {f"{'n' * 96}{number}": 1.0 for number in range(MOST_VALUES)}
    return framed(LearnerRows(epoch=1, rows=[LearnerRow(epoch=1, number=1, values=values)] * MOST_ROWS))


@pytest.mark.parametrize(
    ("channel", "flood"),
    [
        ("stream", lambda number: framed(Commit(epoch=1))),
        ("stream", lambda number: hello("a")),
        ("stream", lambda number: hello(f"a{number}")),
        ("stream", lambda number: framed(WeightsPull(version=(1, 1), offset=0, length=100))),
        ("publisher", lambda number: large_rows() if number < 3 else b""),
        ("publisher", lambda number: rows(1, 1)),
        ("publisher", lambda number: rows(1, 1 + number)),
    ],
    ids=["commits", "hellos", "hellos of new learners", "pulls", "large messages", "repeated rows", "new rows"],
)
def test_a_learner_that_floods_its_port_is_cut(
    start_broker: StartBroker, channel: str, flood: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_watch, "UNREAD_MESSAGES", 1_000_000)
    broker = start_broker(allow_insecure=True)
    watch = watch_of(broker)
    with RawZmtp(broker.endpoints.learner) as learner:
        learner.send(hello("a", channel))
        assert learner.sock.recv(1)
        sent = b"".join(map(flood, range(500)))
        wait_until(lambda: learner.is_cut() or not learner.send(sent), "the end of the connection")
    wait_until(lambda: watch.cuts["too many messages that bring nothing new"] == 1, "the reason")


@pytest.mark.skipif(not TELLS_PEERS, reason="this system does not count a connection's bytes")
@pytest.mark.parametrize("flood", [hello("a"), framed(Commit(epoch=1))], ids=["hellos", "commits"])
def test_a_learner_is_cut_once_thousands_of_its_messages_wait(
    flood: bytes, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KNOWN_FIRST", "KNOWN_BURST", "KNOWN_PER_S"):
        monkeypatch.setattr(peer_account, name, 1e9)
    broker = start_broker(allow_insecure=True)
    watch = watch_of(broker)
    with RawZmtp(broker.endpoints.learner) as learner:
        learner.send(hello("a"))
        assert learner.sock.recv(1)
        learner.send(flood * 50_000)
        wait_until(learner.is_cut, "the end of the connection")
    wait_until(lambda: dict(watch.cuts) == {"more than 2048 messages at a time": 1}, "the reason")


def test_a_learner_that_has_lost_the_lease_is_a_stranger_again(start_broker: StartBroker) -> None:
    """Its messages beyond those of a stranger are dropped unread. The new learner goes on."""
    broker, heard = start_broker(allow_insecure=True), Counter[type[Message]]()
    hear = broker.broker.core.receive

    def receive(peer: bytes, message: Message, *told: Any) -> None:
        heard[type(message)] += 1
        hear(peer, message, *told)

    watch = watch_of(broker)
    with RawZmtp(broker.endpoints.learner) as old, RawZmtp(broker.endpoints.learner) as new:
        for learner, token in ((old, "old"), (new, "new")):
            learner.send(hello(token))
            assert learner.sock.recv(1)
        broker.broker.core.receive = receive  # type: ignore[method-assign]
        old.send(framed(Commit(epoch=1)) * (STRANGE_MESSAGES * 3))
        wait_until(old.is_cut, "the end of the connection")
        new.send(framed(Commit(epoch=2)))
        wait_until(lambda: heard[Commit] > STRANGE_MESSAGES, "the new learner's commit")
        assert not new.is_cut()
        wait_until(lambda: watch.cuts == {"messages without HELLO": 1}, "the reason")
    assert heard[Commit] == STRANGE_MESSAGES + 1
    assert watch.admission.places(waits=False) == ADMITTED_AT_ONCE, "it may come again at once"


def test_a_lost_lease_makes_a_connections_unfinished_bytes_those_of_a_stranger(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_watch, "LOOK_AT_ALL_S", 0.1)
    broker = start_broker(allow_insecure=True)
    watch, part = watch_of(broker), frame(bytes(port_watch.STRANGER_BYTES + (1 << 20)), more=True)
    with RawZmtp(broker.endpoints.learner) as old, RawZmtp(broker.endpoints.learner) as new:
        for learner, token in ((old, "old"), (new, "new")):
            learner.send(hello(token))
            assert learner.sock.recv(1)
            wait_until(lambda: len(watch._strangers) < len(watch._connections), "the watch to know it")
        old.send(framed(Commit(epoch=1)) + part)
        # The watch looks at what a connection holds once the port has received something and is empty again.
        reason = "an unfinished message of more than 2 MiB"
        wait_until(lambda: new.send(framed(Commit(epoch=2))) and watch.cuts[reason], "the end of the connection")
        assert old.is_cut()


def test_commits_of_batches_and_new_versions_do_not_count_as_a_flood(
    start_broker: StartBroker, start_feeder: StartFeeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_account, "KNOWN_FIRST", 12)
    monkeypatch.setattr(peer_account, "KNOWN_BURST", 12)
    monkeypatch.setattr(peer_account, "KNOWN_PER_S", 5.0)
    broker = start_broker()
    feeder = start_feeder(broker.endpoints.worker, Envs(1).fragments(60))
    weights = {"w": np.zeros(4, np.float32)}
    endpoint = broker.endpoints.learner
    with EpisodeStream(endpoint) as stream, WeightPublisher(endpoint, connect_timeout_s=TIMEOUT_S) as publisher:
        for _ in batches_of(stream, feeder.all_settled):
            stream.commit()
        assert stream.delivered == 60
        for _ in range(60):
            publisher.publish(weights)
        wait_until(lambda: publisher.pump() or publisher.acknowledged[1] == 60, "the last version")
    assert not watch_of(broker).cuts
