"""The port of the page and of the exporter, with a small app: who is kept out, and what it logs."""

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

from headrace.deploy.annexes.watch.web import web_port
from headrace.deploy.annexes.watch.web.access import Guard
from headrace.deploy.annexes.watch.web.web_port import WebPort
from support.waiting import TIMEOUT_S, wait_until

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once; at /slow with a part now and nothing more for a long time; or fail."""

    async def parts() -> AsyncIterator[bytes]:
        yield b"begun"
        await asyncio.sleep(TIMEOUT_S)

    match Request(scope).url.path:
        case "/slow":
            answer: Response = StreamingResponse(parts())
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


SLOW = GET.replace(b"/ ", b"/slow ", 1)


def status(url: str) -> bytes:
    with ExitStack() as own:
        return connected(url, GET, own).recv(1 << 16)[9:12]


def test_connections_beyond_the_cap_get_503_until_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_port, "MOST_CONNECTIONS", 4)  # uvicorn counts the new one too
    with WebPort("127.0.0.1:0", None) as port, port.serving(app), ExitStack() as stack:
        others = [connected(port.url, SLOW, stack) for _ in range(3)]
        for other in others:
            assert b"200 OK" in other.recv(1 << 16)
        assert status(port.url) == b"503"
        others[0].close()
        wait_until(lambda: status(port.url) == b"200", "a free place")


def test_requests_that_cannot_be_read_leave_no_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with WebPort("127.0.0.1:0", None) as port, port.serving(app), ExitStack() as stack:
        for say, code in ((b"garbage\r\n\r\n", b"400"), (GET.replace(b"/ ", b"/fails ", 1), b"500")):
            assert connected(port.url, say, stack).recv(100)[9:12] == code
    (failed,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert failed.getMessage() == "Exception in ASGI application\n"
    assert failed.exc_info is not None


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


@pytest.mark.parametrize("count", [1, 1000])
def test_headers_of_more_than_64_kib_are_refused_when_they_come_at_once(count: int) -> None:
    long = b"".join(b"x: " + b"a" * (98_000 // count) + b"\r\n" for _ in range(count))
    with WebPort("127.0.0.1:0", None) as port, port.serving(Guard(app, None, 1)), ExitStack() as stack:
        answer = connected(port.url, GET.replace(b"\r\n", b"\r\n" + long, 1), stack).recv(1 << 16)
    assert answer[9:12] in (b"400", b"431")
