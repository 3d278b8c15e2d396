"""A client that pipelines HTTP requests: the server reads no more while some of them wait."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from headrace.workers.serving.http.connection import HttpConnection
from headrace.workers.serving.session_records import ServingLimits
from support.serving.raw_http import HEALTH


async def wait_behind_one(server_end: socket.socket) -> list[object]:
    """Return what waits behind an unanswered request. End the connection."""
    begun, loop = asyncio.Event(), asyncio.get_running_loop()
    never_answers: Any = SimpleNamespace(
        limits=ServingLimits(),
        admit=lambda connection: None,
        disconnected=lambda connection: None,
        refuse_head=lambda target, headers: None,
        handle=lambda connection, request: begun.set(),
    )
    transport, connection = await loop.connect_accepted_socket(lambda: HttpConnection(never_answers), server_end)
    await asyncio.wait_for(begun.wait(), 20.0)
    waiting: list[object] = list(connection._received)
    assert not transport.is_reading()
    transport.abort()
    await asyncio.sleep(0)
    return waiting


def test_no_more_is_read_while_requests_of_the_client_wait() -> None:
    server_end, client = socket.create_server(("127.0.0.1", 0)), socket.socket()
    with server_end, client:
        client.connect(server_end.getsockname())
        client.sendall(HEALTH * 100)
        waiting = asyncio.run(wait_behind_one(server_end.accept()[0]))
    assert len(waiting) == 99
