"""Limits of HTTP clients: connections, time and bytes. A client at its limit does not delay the others."""

from __future__ import annotations

import socket
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import pytest

from headrace.schemas.chunks.spaces import Discrete, MultiDiscrete, Spaces
from headrace.workers.serving.http import connection as http_connection
from headrace.workers.serving.http.connection import HEAD_BYTES
from support.serving.raw_http import HEALTH, RawHttp, head, put
from support.serving.served import LIMITS, Served

QUICK = replace(LIMITS, read_s=0.4, lease_s=1.2, max_connections=8)
STEP = "/v1/sessions/s/episodes/e/steps/0"


def alive(clients: Sequence[RawHttp]) -> None:
    """Each is answered."""
    for client in clients:
        client.say(HEALTH)
    for client in clients:
        assert client.hear().status == 200


def placed(server: Served) -> RawHttp:
    """A client with a place: as soon as the server has noticed that another has left."""
    while True:
        client = RawHttp(server.url)
        client.say(HEALTH)
        if client.hear().status == 200:
            return client
        client.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served(QUICK) as served:
        yield served


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"PU",
        HEALTH[:-2],
        put(STEP, b"{}")[:-1],
        head(STEP, "Transfer-Encoding: chunked") + b"5\r\n{",
    ],
)
def test_a_request_that_does_not_arrive_whole_in_time_is_answered_408(server: Served, part: bytes) -> None:
    with RawHttp(server.url) as client:
        client.say(part)
        assert "nothing of the request came for 0.4 s" in client.hear_refusal(408, "too_slow")


def test_connections_beyond_the_cap_are_refused_and_the_others_go_on() -> None:
    with Served(QUICK) as server, ExitStack() as stack:
        taken = [stack.enter_context(RawHttp(server.url)) for _ in range(QUICK.max_connections)]
        alive(taken)
        for _ in range(3):
            with RawHttp(server.url) as late:
                assert "all 8 connections are taken" in late.hear_refusal(503, "server_full")
        alive(taken)
        taken.pop().close()
        taken.append(stack.enter_context(placed(server)))
        for client in taken:
            client.hear_end()  # each was silent for a lease


def test_connections_with_unfinished_requests_free_their_places_in_time() -> None:
    with Served(replace(QUICK, read_s=0.3)) as server:
        for _ in range(3):  # as often as it takes the places there are
            with ExitStack() as stack:
                slow = [stack.enter_context(placed(server)) for _ in range(QUICK.max_connections)]
                for client in slow:
                    client.say(HEALTH[:-1])
                for client in slow:
                    client.hear_refusal(408, "too_slow")
                    client.close()
        placed(server).close()


def test_a_refused_client_that_keeps_sending_is_disconnected(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "LINGER_S", 0.3)
    with RawHttp(server.url) as client:
        client.say(b"garbage\r\n\r\n")
        assert client.hear().status == 400
        while True:  # it says on and on, until its own kernel knows that nobody is there
            try:
                client.socket.sendall(b"x" * 1000)
            except ConnectionError:
                break


def test_a_client_that_does_not_read_its_answers_is_disconnected() -> None:
    many = MultiDiscrete(nvec=(3,) * 50_000, start=(0,) * 50_000, shape=(50_000,))
    with (
        Served(QUICK, spaces=Spaces(observation=many, action=Discrete(n=1000))) as server,
        RawHttp(server.url) as client,
    ):
        while True:
            try:
                client.socket.sendall(b"GET /v1/spaces HTTP/1.1\r\n\r\n")
            except ConnectionError:
                break
        with RawHttp(server.url) as other:
            alive([other])


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /" + b"a" * 2 * HEAD_BYTES,
        b"GET / HTTP/1.1\r\nx: " + b"a" * 2 * HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * HEAD_BYTES,
        head(STEP, "x: " + "a" * HEAD_BYTES) + b"\r\n",
        head(STEP, "\r\n".join(["x: y"] * 20_000)) + b"\r\n",
        head(STEP, "Content-Length: 65537"),
        head(STEP, "Content-Length: 9999999999999999999"),
        head(STEP, "Transfer-Encoding: chunked") + (b"8000\r\n" + b"x" * 0x8000 + b"\r\n") * 3,
        head(STEP, "Transfer-Encoding: chunked") + b"1\r\nx\r\n" * 50_000,
    ],
)
def test_a_request_that_is_too_long_is_refused_before_it_has_arrived(server: Served, request_: bytes) -> None:
    with RawHttp(server.url) as client:
        client.say(request_)
        assert "of more than 65536 bytes" in client.hear_refusal(413, "too_large")


def test_the_bound_of_headers_is_of_each_request_of_a_connection(server: Served) -> None:
    with RawHttp(server.url) as client:
        for _ in range(3):
            client.say(b"GET /v1/spaces HTTP/1.1\r\nx: " + b"a" * (HEAD_BYTES // 2) + b"\r\n\r\n")
            assert client.hear().status == 200


def test_small_chunks_of_a_body_take_little_more_memory_than_the_body() -> None:
    with Served(replace(LIMITS, max_message_bytes=1 << 22)) as server, RawHttp(server.url) as client:
        said = head(STEP, "Transfer-Encoding: chunked") + b"2\r\nxy\r\n" * 500_000 + b"0\r\n\r\n"
        tracemalloc.start()
        try:
            client.say(said)
            assert "the body is not JSON" in client.hear().body["message"]
            assert tracemalloc.get_traced_memory()[1] < 30 << 20
        finally:
            tracemalloc.stop()


def test_the_bound_of_a_chunked_body_is_exact() -> None:
    most = 1 << 20
    with Served(replace(LIMITS, max_message_bytes=most)) as server, RawHttp(server.url) as client:
        chunks, rest = divmod(most, 1000)
        said = head(STEP, "Transfer-Encoding: chunked") + (b"3e8\r\n" + b"x" * 1000 + b"\r\n") * chunks
        client.say(said + b"%x\r\n" % rest + b"x" * rest + b"\r\n0\r\n\r\n")
        assert "the body is not JSON" in client.hear().body["message"]
        client.say(said + b"%x\r\n" % (rest + 1) + b"x" * (rest + 1) + b"\r\n0\r\n\r\n")
        assert f"of more than {most} bytes" in client.hear_refusal(413, "too_large")


def test_the_info_of_a_step_has_the_size_limit_that_it_has_over_zeromq() -> None:
    with Served(replace(LIMITS, max_message_bytes=1 << 22)) as server, RawHttp(server.url) as client:
        for path in (STEP[:14], STEP[:25]):
            client.say(put(path, b"{}", "Headrace-Client: own"))
            assert client.hear().status == 200
        for size, field, status in ((1 << 21, b"end", 413), (1 << 21, b"info", 200), (1 << 19, b"info", 200)):
            text = b"x" * size
            body = (
                b'{"observation": [1, 2], "info": {"log": "%b"}}'
                if field == b"info"
                else b'{"observation": [1, 2], "end": "%b"}'
            )
            client.say(put(STEP, body % text, "Headrace-Client: own"))
            assert client.hear().status == status


def test_the_body_of_a_request_without_the_token_is_not_read() -> None:
    with Served(QUICK, token="t" * 16) as server:
        for shown in ("a: b", "Authorization: Bearer " + "s" * 16, "Authorization: t" + "t" * 15):
            with RawHttp(server.url) as client:
                client.say(head(STEP, shown, "Content-Length: 60000"))
                assert "show the server's token" in client.hear_refusal(401, "unauthorized")
        with RawHttp(server.url) as client:
            client.say(HEALTH[:-2] + b"Content-Length: 60000\r\n\r\n")
            client.hear_refusal(401, "unauthorized")
        with RawHttp(server.url) as client:
            client.say(HEALTH + put("/v1/sessions/s", b"", "authorization: Bearer " + "t" * 16))
            assert [client.hear().status for _ in range(2)] == [200, 200]


def test_a_client_that_closes_before_its_answer_ends_its_own_connection_alone(server: Served) -> None:
    """Its system resets the connection as soon as it gets the answer, before the server can end its own side."""
    for path in (STEP, STEP[:14], "/nothing"):
        for _ in range(20):
            with RawHttp(server.url) as client:
                client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)  # request and end arrive together
                client.say(put(path, b'{"observation": [1, 2]}' if path == STEP else b"{}", "Connection: close"))
    placed(server).close()


def test_a_silent_connection_is_closed_without_an_answer(server: Served) -> None:
    with RawHttp(server.url) as client:
        client.say(HEALTH)
        client.hear()
        client.hear_end()
