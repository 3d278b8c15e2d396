"""The port of the page and of the exporter, with a small app: who is cut off, who is kept out, and what it warns of."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from headrace.deploy.monitoring import web_connections
from headrace.deploy.monitoring.web_port import WebPort
from support.waiting import TIMEOUT_S, wait_until

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LARGE = bytes(16 << 20)
"""More than the buffers of both sockets hold."""


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once; at /slow with a part now and nothing more for a long time; at others with too much, or fail."""

    async def parts() -> AsyncIterator[bytes]:
        yield b"begun"
        await asyncio.sleep(TIMEOUT_S)

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield LARGE[: 1 << 16]

    match Request(scope).url.path:
        case "/slow":
            answer: Response = StreamingResponse(parts())
        case "/endless":
            answer = StreamingResponse(endless())
        case "/large":
            answer = Response(LARGE)
        case "/fails":
            raise ValueError("on purpose")
        case _:
            answer = PlainTextResponse("told")
    await answer(scope, receive, send)


def connected(url: str, say: bytes, stack: ExitStack) -> socket.socket:
    host, _, port = url.removeprefix("http://").rpartition(":")
    made = stack.enter_context(socket.create_connection((host, int(port)), timeout=TIMEOUT_S))
    made.sendall(say)
    return made


def is_open(connection: socket.socket) -> bool:
    """Return whether the server has not ended the connection. Reads what it has sent."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    return False


def is_cut(client: socket.socket) -> bool:
    """Return whether the server has closed the connection of a client that reads nothing. What it says resets it."""
    try:
        client.sendall(b"x")
    except ConnectionError:
        return True
    return False


def test_silent_connections_end_and_those_with_an_answer_under_way_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_connections, "SILENT_S", 0.5)
    with WebPort("127.0.0.1:0", None) as port, port.serving(app), ExitStack() as stack:
        follows = connected(port.url, GET.replace(b"/ ", b"/slow ", 1), stack)
        assert b"200 OK" in follows.recv(1 << 16)
        for say in (b"", GET[:20]):
            assert connected(port.url, say, stack).recv(1 << 16) == b"", "the end of a silent connection"
        answered = connected(port.url, GET, stack).makefile("rwb", buffering=0)
        while answered.readline().strip():
            pass
        assert answered.read(4) == b"told"
        answered.write(GET[:20])
        assert answered.read() == b"", "the end of a silent connection"
        assert is_open(follows)


SLOW = GET.replace(b"/ ", b"/slow ", 1)


def status(url: str) -> bytes:
    with ExitStack() as own:
        return connected(url, GET, own).recv(1 << 16)[9:12]


def test_connections_beyond_the_cap_get_503_until_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_connections, "MOST_CONNECTIONS", 3)
    with WebPort("127.0.0.1:0", None) as port, port.serving(app), ExitStack() as stack:
        others = [connected(port.url, SLOW, stack) for _ in range(3)]
        for other in others:
            assert b"200 OK" in other.recv(1 << 16)
        assert status(port.url) == b"503"
        others[0].close()
        wait_until(lambda: status(port.url) == b"200", "a free place")


def test_a_new_connection_gets_the_place_of_one_that_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent ones go first, then those between two requests. Those with a request under way stay."""
    monkeypatch.setattr(web_connections, "MOST_CONNECTIONS", 3)
    with WebPort("127.0.0.1:0", None) as port, port.serving(app), ExitStack() as stack:
        follows, between = connected(port.url, SLOW, stack), connected(port.url, GET, stack)
        for each in (follows, between):
            assert b"200 OK" in each.recv(1 << 16)
        silent = [connected(port.url, say, stack) for say in (b"", GET[:20], b"", b"")]
        assert silent[0].recv(1) == b"", "the end of the first silent one"
        assert is_open(between)
        assert status(port.url) == b"200"
        late = connected(port.url, SLOW, stack)
        assert b"200 OK" in late.recv(1 << 16)
        later = connected(port.url, SLOW, stack)
        assert b"200 OK" in later.recv(1 << 16)
        assert not is_open(between)
        assert all(map(is_open, (follows, late, later)))


@pytest.mark.parametrize("path", [b"/endless ", b"/large "])
def test_a_client_that_reads_nothing_of_its_answer_is_disconnected(
    path: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_connections, "SILENT_S", 0.5)
    with WebPort("127.0.0.1:0", None) as port, port.serving(app), ExitStack() as stack:
        reads_nothing = connected(port.url, GET.replace(b"/ ", path, 1), stack)
        wait_until(lambda: is_cut(reads_nothing), "the end of the connection")


def test_unread_answers_of_all_clients_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_connections, "MOST_UNREAD_BYTES", 2 * len(LARGE))
    monkeypatch.setattr(web_connections, "SILENT_S", 10 * TIMEOUT_S)
    with WebPort("127.0.0.1:0", None) as port, port.serving(app), ExitStack() as stack:
        follows = connected(port.url, SLOW, stack)
        clients = [connected(port.url, GET.replace(b"/ ", b"/large ", 1), stack) for _ in range(4)]
        wait_until(lambda: any(map(is_cut, clients)), "the end of a connection")
        assert status(port.url) == b"200"
        assert is_open(follows)


@pytest.mark.parametrize("framing", [b"Content-Length: 9000000", b"Transfer-Encoding: chunked"])
def test_no_body_is_read(framing: bytes) -> None:
    with WebPort("127.0.0.1:0", None) as port, port.serving(app), ExitStack() as stack:
        client = connected(port.url, GET[:-2] + framing + b"\r\n\r\n", stack)
        answer = client.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 400"), "and the connection ends"
        assert b"told" not in answer
        empty = connected(port.url, GET[:-2] + b"Content-Length: 0\r\n\r\n", stack)
        assert b"200 OK" in empty.recv(1 << 16)


def test_requests_that_cannot_be_read_are_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with WebPort("127.0.0.1:0", None) as port, port.serving(app), ExitStack() as stack:
        for say in (b"garbage\r\n\r\n", GET.replace(b"/ ", b"/fails ", 1)) * 5:
            assert connected(port.url, say, stack).recv(100)[9:12] in (b"400", b"500")
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in warned] == [
        "Invalid HTTP request received.",
        "Exception in ASGI application",
    ]
    assert warned[1].exc_info is not None


@pytest.mark.parametrize("start", [b"GET /?", GET[:-2] + b"a: ", GET[:-2] + b"a: b\r\n" * 1000])
def test_a_head_without_an_end_ends_its_connection(start: bytes) -> None:
    with WebPort("127.0.0.1:0", None) as port, port.serving(app), ExitStack() as stack:
        endless = connected(port.url, start, stack)
        kinds = b"b" * 1000 if start[-1:] in b"? " else b"a: b\r\n" * 100
        with pytest.raises(ConnectionError):
            endless.sendall(kinds * 20_000)  # more than the buffers of both sockets hold
        assert b"200 OK" in connected(port.url, GET, stack).recv(1 << 16)


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_token_in_clear_off_loopback_logs_a_warning(
    host: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("a-word-of-sixteen-characters-or-more")
    with caplog.at_level(logging.WARNING), WebPort(f"{host}:0", token):
        assert ("in clear" in caplog.text) is (host == "0.0.0.0")
