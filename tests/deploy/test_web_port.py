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
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from headrace.deploy.monitoring import web_port
from headrace.deploy.monitoring.web_port import WebPort
from support.waiting import TIMEOUT_S, wait_until

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once, or at /slow with a part now and nothing more for a long time."""

    async def parts() -> AsyncIterator[bytes]:
        yield b"begun"
        await asyncio.sleep(TIMEOUT_S)

    slow = Request(scope).url.path == "/slow"
    await (StreamingResponse(parts()) if slow else PlainTextResponse("told"))(scope, receive, send)


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


def test_silent_connections_end_and_those_with_an_answer_under_way_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_port, "SILENT_S", 0.5)
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


def test_connections_beyond_the_cap_get_503_until_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_port, "MOST_CONNECTIONS", 3)
    with WebPort("127.0.0.1:0", None) as port, port.serving(app), ExitStack() as stack:
        others = [connected(port.url, b"", stack) for _ in range(2)]

        def status() -> bytes:
            with ExitStack() as own:
                return connected(port.url, GET, own).recv(1 << 16)[:12]

        wait_until(lambda: status() == b"HTTP/1.1 503", "the cap")
        for other in others:
            other.close()
        wait_until(lambda: status() == b"HTTP/1.1 200", "a free place")


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
