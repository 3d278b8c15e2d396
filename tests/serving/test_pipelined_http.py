"""A client that pipelines hundreds of HTTP requests does not keep other clients from their turn."""

from __future__ import annotations

import asyncio
import socket

from headrace.schemas.errors import HeadraceError
from headrace.workers.serving.http.connection import HttpConnection, HttpLimits
from headrace.workers.serving.http.requests import HttpRequest
from headrace.workers.serving.http.responses import json_answer
from support.serving.raw_http import HEALTH

SAID = (300, 1, 300)
"""By each of those who say it all in one go."""


class AtOnce:
    """Lets everybody in, answers at once, and knows in what order it heard whom."""

    limits = HttpLimits(1 << 16, 100.0, 100.0, 100.0)
    date = b"today"

    def __init__(self) -> None:
        self.heard: list[HttpConnection] = []
        self.everything, self.nobody = asyncio.Event(), asyncio.Event()
        self._gone = 0

    def admit(self, connection: HttpConnection) -> HeadraceError | None:
        return None

    def disconnected(self, connection: HttpConnection) -> None:
        self._gone += 1
        if self._gone == len(SAID):
            self.nobody.set()

    def refuse_head(self, target: bytes, headers: dict[bytes, bytes]) -> HeadraceError | None:
        return None

    def handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        connection.answer(request, json_answer({}, 200))
        self.heard.append(connection)
        if len(self.heard) == sum(SAID):
            self.everything.set()


async def hear_all(server_ends: list[socket.socket]) -> list[HttpConnection]:
    place, loop = AtOnce(), asyncio.get_running_loop()
    transports = [(await loop.connect_accepted_socket(lambda: HttpConnection(place), end))[0] for end in server_ends]
    await asyncio.wait_for(place.everything.wait(), 20.0)
    for transport in transports:
        transport.abort()
    await asyncio.wait_for(place.nobody.wait(), 20.0)
    return place.heard


def test_a_single_request_does_not_wait_for_all_pipelined_requests_of_others() -> None:
    pairs = [socket.socketpair() for _ in SAID]
    for (client, _), requests in zip(pairs, SAID, strict=True):
        client.sendall(HEALTH * requests)
    heard = asyncio.run(hear_all([server_end for _, server_end in pairs]))
    for client, _ in pairs:
        client.close()
    (lone,) = [connection for connection in heard if heard.count(connection) == 1]
    assert heard.index(lone) < SAID[0]
    assert len(heard) == sum(SAID)


class NeverAnswers(AtOnce):
    """Lets a request wait for its answer."""

    def handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        self.heard.append(connection)
        self.everything.set()


async def wait_behind_one(server_end: socket.socket) -> list[object]:
    """Return what waits behind an unanswered request. End the connection."""
    place, loop = NeverAnswers(), asyncio.get_running_loop()
    transport, connection = await loop.connect_accepted_socket(lambda: HttpConnection(place), server_end)
    await asyncio.wait_for(place.everything.wait(), 20.0)
    waiting: list[object] = list(connection._received)
    assert not transport.is_reading()
    transport.abort()
    await asyncio.sleep(0)
    assert len(place.heard) == 1
    return waiting


def test_no_more_is_read_while_requests_of_the_client_wait() -> None:
    client, server_end = socket.socketpair()
    with client:
        client.sendall(HEALTH * 100)
        waiting = asyncio.run(wait_behind_one(server_end))
    assert len(waiting) == 99
