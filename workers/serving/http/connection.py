"""One HTTP/1.1 connection of a client: reads whole requests, one at a time, and sends the answers in the same order.

A client may be slow, silent, or hostile. So no request is longer than the limit, and none may take longer to arrive
than `read_s` plus what its length allows. A client that does not read its answers is disconnected. Input that cannot
be read gets an answer, and then the connection ends: the server cannot tell where the next request would begin.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import httptools

from headrace.schemas.errors import HeadraceError
from headrace.schemas.errors.serving import MessageTooLargeError, ServingError
from headrace.workers.serving.http.requests import HttpRequest
from headrace.workers.serving.http.responses import CONTINUE, HttpAnswer, refused

HEAD_BYTES = 1 << 16
"""The longest request line and headers together."""
MOST_HEADERS = 256
"""Headers of different names in a request. In memory a short one takes thirty times its bytes."""
SLOWEST_BYTES_S = 100_000
"""A request that takes longer than `read_s` must arrive at this rate on average."""
MAX_REQUESTS_AT_ONCE = 16
"""Number of requests of one client that are handled before those of others."""
LINGER_S = 2.0
"""Seconds that a refused client may go on sending. If it were cut off at once, it might never read the refusal."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of one connection, in bytes and seconds."""

    body_bytes: int
    read_s: float
    """Seconds from the first byte of a request to its last, and from the connection to its first byte."""
    wait_s: float
    """Seconds from a request to its answer."""
    idle_s: float
    """Seconds from an answer to the next request."""


class HttpHandler(Protocol):
    """Admits connections and answers their requests. All calls come from the thread that runs the event loop."""

    limits: HttpLimits
    date: bytes
    """The value of the Date header."""

    def admit(self, connection: HttpConnection) -> HeadraceError | None:
        """Count a new connection; return the reason if there is no room for it."""

    def disconnected(self, connection: HttpConnection) -> None:
        """Forget a connection that has ended."""

    def refuse_head(self, target: bytes, headers: dict[bytes, bytes]) -> HeadraceError | None:
        """Return the reason if the body of such a request must not even be read."""

    def handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        """Start to handle a request. `connection.answer` is called later, or at once."""


class HttpConnection(asyncio.Protocol):
    """One connection, for one event loop. `shutdown` answers the current request and then ends it."""

    def __init__(self, handler: HttpHandler) -> None:
        self._handler, self._limits = handler, handler.limits
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._received: deque[HttpRequest | HeadraceError] = deque()
        """Requests that wait for their turn. An error is always the last."""
        self._current: HttpRequest | None = None
        """The request that waits for its answer."""
        self._processing = False
        self._ignores_input = False
        self._closing = False
        """True once the last answer was sent."""
        self._writing_paused = False
        """True while the client does not read its answers."""
        self._reading_paused = False
        self._got_eof = False
        """True once the client sends no more requests."""
        self._waiting_since = self._loop.time()
        """Time at which the server began to wait for an answer, or for the next request."""
        self._request_began: float | None = self._waiting_since
        """Time at which the first byte came of a request that is not whole yet; None between requests."""
        self._request_bytes = 0
        """Number of bytes of that request that have been parsed."""
        self.is_known = False
        """True once the server took a request of this connection."""
        self._in_head = True
        self._target, self._headers, self._head_bytes = b"", dict[bytes, bytes](), 0
        self._body = bytearray()

    # -- called by asyncio and by the server --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit the client, or refuse it and close the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # asyncio does not set it on what it accepts from this listener; without it each answer waits 40 ms
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        full = self._handler.admit(self)
        if full is not None:
            self._ignores_input = True
            transport.write(refused(full).frame(self._handler.date, keep_alive=False))
            transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Drop all that waits."""
        self._current, self._ignores_input = None, True
        self._received.clear()
        self._handler.disconnected(self)
        del self._parser  # the parser refers to this object; without the cycle both are freed at once

    def eof_received(self) -> bool:
        """Keep the connection open for answers while a request waits."""
        self._got_eof = True
        return self._current is not None or bool(self._received)

    def pause_writing(self) -> None:
        """Handle no more requests: the client does not read its answers."""
        self._writing_paused, self._waiting_since = True, self._loop.time()
        self._process_requests()

    def resume_writing(self) -> None:
        """Handle requests again."""
        self._writing_paused, self._waiting_since = False, self._loop.time()
        self._process_requests()

    def shutdown(self) -> None:
        """End the connection when the current request is answered."""
        if self._current is not None:
            self._current.keep_alive = False
        elif self._closing or self._writing_paused:
            self._transport.abort()
        else:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        self._transport.abort()

    # -- reading; the on_ methods are called by the parser ------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse what has come, and handle the requests in it."""
        if self._ignores_input:
            return
        self._request_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._refuse(ServingError(f"this is no HTTP/1.1: {error}", "bad_request"))
        except httptools.HttpParserUpgrade:
            self._refuse(ServingError("this server speaks only HTTP/1.1", "bad_request"))
        if self._in_head and self._request_bytes > HEAD_BYTES:
            self._refuse_head()
        elif self._request_bytes > HEAD_BYTES + self._limits.body_bytes:
            self._refuse_body()
        self._process_requests()

    def on_message_begin(self) -> None:
        """Reset the parts of the request."""
        self._request_began, self._in_head = self._loop.time(), True
        self._target, self._headers, self._head_bytes, self._body = b"", {}, 0, bytearray()

    def on_url(self, url: bytes) -> None:
        """Collect a piece of the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header."""
        self._head_bytes += len(name) + len(value) + 4  # the colon, the blank and the line's end
        name = name.lower()
        if name == b"host" and name in self._headers:
            self._refuse(ServingError("two Host headers; send one", "bad_request"))
        elif len(self._headers) < MOST_HEADERS:
            self._headers[name] = value
        elif name not in self._headers:
            self._refuse(MessageTooLargeError(f"more than {MOST_HEADERS} headers"))

    def on_headers_complete(self) -> None:
        """Refuse a request as soon as its head shows that the server does not take it."""
        self._in_head = False
        length = self._headers.get(b"content-length", b"")
        refusal = self._handler.refuse_head(self._target, self._headers)
        if len(self._target) + self._head_bytes > HEAD_BYTES:
            self._refuse_head()
        elif refusal is not None:
            self._refuse(refusal)
        elif self._parser.should_upgrade():
            self._refuse(ServingError("this server speaks only HTTP/1.1", "bad_request"))
        elif length.isdigit() and (len(length) > 18 or int(length) > self._limits.body_bytes):
            self._refuse_body()
        elif self._headers.get(b"expect", b"").lower() == b"100-continue" and self._current is None:
            self._transport.write(CONTINUE)

    def on_body(self, part: bytes) -> None:
        """Collect a piece of the body."""
        self._body += part  # a list would have 35 bytes more for each part, and one of a chunked body may be a byte
        if len(self._body) > self._limits.body_bytes:
            self._refuse_body()

    def on_message_complete(self) -> None:
        """Enqueue the request."""
        if not self._ignores_input:
            method, keep_alive = self._parser.get_method().decode(), self._parser.should_keep_alive()
            self._received.append(HttpRequest(method, self._target, self._headers, bytes(self._body), keep_alive))
            self._request_began, self._request_bytes, self._body = None, 0, bytearray()

    def _refuse_head(self) -> None:
        self._refuse(MessageTooLargeError(f"headers of more than {HEAD_BYTES} bytes"))

    def _refuse_body(self) -> None:
        self._refuse(MessageTooLargeError(f"a body of more than {self._limits.body_bytes} bytes"))

    def _refuse(self, error: HeadraceError) -> None:
        """Enqueue an error as the last answer, and ignore later input."""
        if not self._ignores_input:
            self._ignores_input = True
            self._received.append(error)

    # -- handling and writing -----------------------------------------------------------------------------------------

    def answer(self, request: HttpRequest, answer: HttpAnswer) -> None:
        """Send an answer, unless the client is gone or `check_time` has answered the request already."""
        if self._current is request:
            self._current, self._waiting_since = None, self._loop.time()
            keep_alive = request.keep_alive and not self._got_eof
            self._write(answer, keep_alive=keep_alive, head_only=request.method == "HEAD")
            self._process_requests()

    @property
    def _is_free(self) -> bool:
        """Return whether the next request may be handled."""
        return self._current is None and not (self._writing_paused or self._closing)

    def _process_requests(self) -> None:
        """Handle received requests in order, until one waits for its answer.

        Some are answered inside `handle`, which calls this method again. The inner call returns at once, so the stack
        stays flat however many requests have come.
        """
        if self._processing:
            return
        self._processing, left = True, MAX_REQUESTS_AT_ONCE
        while left and self._is_free and self._received:
            received, left = self._received.popleft(), left - 1
            if isinstance(received, HttpRequest):
                self._current, self._waiting_since = received, self._loop.time()
                self._handler.handle(self, received)
            else:
                self._write(refused(received), keep_alive=False)
        self._processing = False
        waits = bool(self._received)
        if waits and self._is_free:
            self._loop.call_soon(self._process_requests)
        wants_input = not (waits or self._writing_paused)
        if wants_input is self._reading_paused and not self._transport.is_closing():
            self._reading_paused = not wants_input
            (self._transport.resume_reading if wants_input else self._transport.pause_reading)()

    def _write(self, answer: HttpAnswer, *, keep_alive: bool, head_only: bool = False) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(answer.frame(self._handler.date, keep_alive=keep_alive, head_only=head_only))
        if not keep_alive:
            self._ignores_input = self._closing = True
            self._waiting_since = self._loop.time()
            self._received.clear()
            (self._transport.close if self._got_eof else self._end_output)()

    def _end_output(self) -> None:
        """Tell the client that it has the last answer."""
        try:
            self._transport.write_eof()
        except OSError:  # the client has closed unseen: its system resets the connection as soon as it gets the answer
            self._transport.abort()

    # -- time ---------------------------------------------------------------------------------------------------------

    def check_time(self, now: float) -> None:
        """End what takes too long. The server calls this several times a second."""
        waited, limits = now - self._waiting_since, self._limits
        if self._closing or self._writing_paused:
            if waited > (LINGER_S if self._closing else limits.read_s):
                self._transport.abort()
        elif self._current is not None:
            if waited > limits.wait_s:
                late = ServingError(f"no answer within {limits.wait_s:g} s; send the same request again", "not_yet")
                self.answer(self._current, refused(late))
        elif self._request_began is not None:
            if now - self._request_began > limits.read_s + self._request_bytes / SLOWEST_BYTES_S:
                self._refuse(ServingError(f"no whole request within {limits.read_s:g} s", "too_slow"))
                self._process_requests()
        elif waited > limits.idle_s:
            self._transport.close()
