"""One connection of an HTTP client: whole requests in, one at a time, and their answers out in the same order.

A client may be slow, silent, or an enemy: no request is longer than the cap, none takes longer to arrive than
`read_s` and what its length allows, and nobody is written to who does not read. What cannot be read is answered, and
the connection ends, since nobody could tell where the next request begins.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import httptools

from headrace.schemas.errors import HeadraceError
from headrace.schemas.serving_errors import BadRequestError, MessageTooLargeError, NotYetError, TooSlowError
from headrace.workers.serving.http.responses import CONTINUE, HttpAnswer, refused

HEAD_BYTES = 1 << 16
"""Of a request line with all headers."""
SLOWEST_BYTES_S = 100_000
"""Who sends more than `read_s` allows for has to send this fast on the whole."""
MAX_REQUESTS_AT_ONCE = 16
"""Requests of one client that are received before others have their turn."""
LINGER_S = 2.0
"""For so long a client that was refused may still be sending: were it cut off at once it might never read why."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one connection may take, in bytes and in time."""

    body_bytes: int
    read_s: float
    """From the first byte of a request to its last; from the connection to its first byte."""
    wait_s: float
    """For an answer."""
    idle_s: float
    """From an answer to the next request."""


@dataclass(slots=True, eq=False)
class HttpRequest:
    """A request, whole. Header names are in lower case."""

    method: bytes
    target: bytes
    headers: dict[bytes, bytes]
    body: bytes
    keeps: bool
    """Whether the client wants to go on with the connection."""


class HttpHandler(Protocol):
    """Where connections are let in, and their requests answered. All in the thread of the event loop."""

    limits: HttpLimits
    date: bytes
    """As the header wants it."""

    def admit(self, connection: HttpConnection) -> HeadraceError | None:
        """Why there is no handler for another."""

    def disconnected(self, connection: HttpConnection) -> None:
        """It has ended."""

    def refuse_head(self, target: bytes, headers: dict[bytes, bytes]) -> HeadraceError | None:
        """Why not even the body of such a request is read."""

    def handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        """Have `connection.answer` called in time."""


class HttpConnection(asyncio.Protocol):
    """For one event loop. `shutdown` ends it once what was asked is answered."""

    def __init__(self, handler: HttpHandler) -> None:
        self._handler, self._limits = handler, handler.limits
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._received: deque[HttpRequest | HeadraceError] = deque()
        """Before their turn; an error is the last."""
        self._current: HttpRequest | None = None
        self._processing = False
        self._ignores_input = self._closing = False
        """Hears nothing more; has been told its last."""
        self._writing_paused = self._reading_paused = self._got_eof = False
        """Does not read what it is told; is not read from for now; says nothing more."""
        self._waiting_since = self._loop.time()
        """Of what is waited for now: an answer, or another request."""
        self._request_began: float | None = self._waiting_since
        """When the request that is not whole yet did."""
        self._request_bytes = 0
        """Bytes of it."""
        self._in_head = True
        self._target, self._headers, self._head_bytes = b"", dict[bytes, bytes](), 0
        self._body: list[bytes] = []
        self._body_bytes = 0

    # -- of asyncio and the server -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        full = self._handler.admit(self)
        if full is not None:
            self._ignores_input = True
            transport.write(refused(full).frame(self._handler.date, keeps=False))
            transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._current, self._ignores_input = None, True
        self._received.clear()
        self._handler.disconnected(self)
        del self._parser  # it knows this connection: so both are disconnected at once

    def eof_received(self) -> bool:
        """A client that says nothing more may still wait for its answer."""
        self._got_eof = True
        return self._current is not None or bool(self._received)

    def pause_writing(self) -> None:
        self._writing_paused, self._waiting_since = True, self._loop.time()
        self._process_requests()

    def resume_writing(self) -> None:
        self._writing_paused, self._waiting_since = False, self._loop.time()
        self._process_requests()

    def shutdown(self) -> None:
        """Answer what was asked, and abort."""
        if self._current is not None:
            self._current.keeps = False
        elif self._closing or self._writing_paused:
            self._transport.abort()
        else:
            self._transport.close()

    # -- in -----------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        self._request_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._refuse(BadRequestError(f"this is no HTTP/1.1: {error}"))
        except httptools.HttpParserUpgrade:
            self._refuse(BadRequestError("nothing but HTTP/1.1 is spoken here"))
        if self._in_head and self._request_bytes > HEAD_BYTES:
            self._refuse_head()
        elif self._request_bytes > HEAD_BYTES + self._limits.body_bytes:
            self._refuse_body()
        self._process_requests()

    def on_message_begin(self) -> None:
        self._request_began, self._in_head = self._loop.time(), True
        self._target, self._headers, self._head_bytes = b"", {}, 0
        self._body, self._body_bytes = [], 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4  # of a colon, a blank and the line's abort
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._in_head = False
        length = self._headers.get(b"content-length", b"")
        refusal = self._handler.refuse_head(self._target, self._headers)
        if len(self._target) + self._head_bytes > HEAD_BYTES:
            self._refuse_head()
        elif refusal is not None:
            self._refuse(refusal)
        elif self._parser.should_upgrade():
            self._refuse(BadRequestError("nothing but HTTP/1.1 is spoken here"))
        elif length.isdigit() and (len(length) > 18 or int(length) > self._limits.body_bytes):
            self._refuse_body()
        elif self._headers.get(b"expect", b"").lower() == b"100-continue" and self._current is None:
            self._transport.write(CONTINUE)

    def on_body(self, part: bytes) -> None:
        self._body_bytes += len(part)
        self._body.append(part)
        if self._body_bytes > self._limits.body_bytes:
            self._refuse_body()

    def on_message_complete(self) -> None:
        if not self._ignores_input:
            method, keeps = self._parser.get_method(), self._parser.should_keep_alive()
            self._received.append(HttpRequest(method, self._target, self._headers, b"".join(self._body), keeps))
            self._request_began, self._request_bytes = None, 0

    def _refuse_head(self) -> None:
        self._refuse(MessageTooLargeError(f"headers of more than {HEAD_BYTES} bytes"))

    def _refuse_body(self) -> None:
        self._refuse(MessageTooLargeError(f"a body of more than {self._limits.body_bytes} bytes"))

    def _refuse(self, error: HeadraceError) -> None:
        """In its turn. What comes after it cannot be told apart any more."""
        if not self._ignores_input:
            self._ignores_input = True
            self._received.append(error)

    # -- out ----------------------------------------------------------------------------------------------------------

    def answer(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """Tell the client, unless it is disconnected, or was told already that it should ask again."""
        if self._current is request:
            self._current, self._waiting_since = None, self._loop.time()
            self._write(answer, keeps=request.keeps and not self._got_eof, bare=request.method == b"HEAD")
            self._process_requests()

    @property
    def _can_process(self) -> bool:
        return bool(self._received) and self._current is None and not (self._writing_paused or self._closing)

    def _process_requests(self) -> None:
        """To what was received next. Some are answered at once, so this is a loop and nothing else."""
        if self._processing:
            return
        self._processing, left = True, MAX_REQUESTS_AT_ONCE
        while self._can_process and left:
            received, left = self._received.popleft(), left - 1
            if isinstance(received, HttpRequest):
                self._current, self._waiting_since = received, self._loop.time()
                self._handler.handle(self, received)
            else:
                self._write(refused(received), keeps=False)
        self._processing = False
        if self._can_process:
            self._loop.call_soon(self._process_requests)
        wants = not (self._received or self._writing_paused)
        if wants is self._reading_paused and not self._transport.is_closing():  # else there is nothing to change
            self._reading_paused = not wants
            (self._transport.resume_reading if wants else self._transport.pause_reading)()

    def _write(self, answer: HttpAnswer, *, keeps: bool, bare: bool = False) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(answer.frame(self._handler.date, keeps=keeps, bare=bare))
        if not keeps:
            self._ignores_input = self._closing = True
            self._waiting_since = self._loop.time()
            self._received.clear()
            (self._transport.close if self._got_eof else self._transport.write_eof)()

    # -- time ---------------------------------------------------------------------------------------------------------

    def check_time(self, now: float) -> None:
        """Give up what takes too long. To be called now and then."""
        waited, limits = now - self._waiting_since, self._limits
        if self._closing or self._writing_paused:
            if waited > (LINGER_S if self._closing else limits.read_s):
                self._transport.abort()
        elif self._current is not None:
            if waited > limits.wait_s:
                late = NotYetError(f"no answer within {limits.wait_s:g} s; send the same request again")
                self.answer(self._current, refused(late))
        elif self._request_began is not None:
            if now - self._request_began > limits.read_s + self._request_bytes / SLOWEST_BYTES_S:
                self._refuse(TooSlowError(f"no whole request within {limits.read_s:g} s"))
                self._process_requests()
        elif waited > limits.idle_s:
            self._transport.close()

    def abort(self) -> None:
        """At once."""
        self._transport.abort()
