"""Known clients that flood their port, or read no answers: they are cut or get none, and honest clients go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from headrace.schemas.frames.wire import MessageKind, decode, encode
from headrace.schemas.peers import peer_account, port_watch
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.serving_messages import ClientHeartbeat, ClientHello
from headrace.workers.serving.single_frame import split_frame
from support.raw_zmtp import RawZmtp, on_the_wire
from support.serving.plain_episodes import rule
from support.serving.served import Served
from support.waiting import wait_until

OWN: dict[str, Any] = {"session": "liar", "token": "own"}
HELLO = on_the_wire(ClientHello(**OWN).frames())
BEAT = on_the_wire(ClientHeartbeat(**OWN).frames())
LARGE_BEAT = on_the_wire(encode(MessageKind.HEARTBEAT, {**OWN, "request": 1, "later": "x" * (900 << 10)}))


@contextmanager
def a_server() -> Iterator[tuple[Served, Callable[[], None]]]:
    """A policy server, and a function that plays an episode of an honest client there."""
    with Served() as server, PolicyClient(server.endpoint) as client:

        def play() -> None:
            episode = client.start_episode()
            assert client.get_action(episode, [1, 1]) == rule([1, 1])
            client.end_episode(episode, [9, 1])

        yield server, play


def another_step(request: int, step: int) -> bytes:
    header = {**OWN, "request": request, "episode": "e", "step": step}
    return on_the_wire(encode(MessageKind.EPISODE_STEP, header))


@pytest.mark.parametrize("flood", [BEAT, HELLO, another_step(1, 7), on_the_wire([b"garbage"])])
def test_a_known_client_that_floods_its_port_is_cut_and_an_honest_one_goes_on(
    flood: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_account, "KNOWN_PER_S", 0.0)
    monkeypatch.setattr(peer_account, "KNOWN_FIRST", 100)
    monkeypatch.setattr(peer_account, "REFUSED_PER_S", 0.0)
    with a_server() as (server, play), RawZmtp(server.endpoint) as liar:
        liar.send(HELLO)
        for _ in range(20):
            liar.send(flood * 100)
        wait_until(liar.is_cut, "the liar to be cut")
        play()


def test_large_messages_of_a_known_client_cost_more_and_are_not_read_once_it_cannot_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_account, "KNOWN_PER_S", 0.0)
    with a_server() as (server, play), RawZmtp(server.endpoint) as liar:
        liar.send(HELLO)
        before = server.dispatcher.figures().requests
        for _ in range(4):
            liar.send(LARGE_BEAT)
        wait_until(liar.is_cut, "the liar to be cut")
        play()
        assert server.dispatcher.figures().requests - before <= 4, "the HELLO, and the three of the honest client"


def test_steps_and_episodes_cost_a_client_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each episode of one step is three requests; only those that bring nothing new are charged."""
    monkeypatch.setattr(peer_account, "KNOWN_PER_S", 0.0)
    monkeypatch.setattr(peer_account, "KNOWN_FIRST", 5)
    monkeypatch.setattr(peer_account, "KNOWN_BURST", 5)
    with a_server() as (_, play):
        for _ in range(20):
            play()


def test_a_stranger_that_names_the_session_of_another_client_is_none_of_it() -> None:
    """It is cut after 64 messages, as one without a session."""
    with a_server() as (server, play), RawZmtp(server.endpoint) as owner, RawZmtp(server.endpoint) as stranger:
        owner.send(HELLO)
        wait_until(lambda: server.counts()["sessions"] == 2, "the session")
        stranger.send(
            on_the_wire(ClientHeartbeat(session="liar", token="a guess").frames()) * port_watch.STRANGE_MESSAGES
        )
        wait_until(stranger.is_cut, "the stranger to be cut")
        assert not owner.is_cut()
        play()


def test_a_client_that_reads_no_answers_gets_no_more_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = [0]
    monkeypatch.setattr(port_watch, "MOST_UNREAD_BYTES", 20_000)
    monkeypatch.setattr(port_watch, "bytes_taken", lambda fd: taken[0])
    with Served() as server, zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.connect(server.endpoint)

        def ask(request: int) -> None:
            sock.send_multipart(ClientHello(**OWN, request=request).frames())

        def answers() -> list[int]:
            found = []
            while sock.poll(100):
                found.append(decode(split_frame(sock.recv_multipart())).header["request"])
            return found

        for request in range(300):
            ask(request)
        got: list[int] = []
        wait_until(lambda: got.extend(answers()) or len(got) > 5, "some answers")  # type: ignore[func-returns-value]
        wait_until(lambda: server.dispatcher.figures().requests == 300, "the server to read all requests")
        got += answers()
        assert got == list(range(len(got)))
        assert len(got) < 200, "those that wait unread are bounded"
        taken[0] = 1 << 20
        ask(300)
        assert answers() == [300]
