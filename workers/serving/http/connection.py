"""One HTTP/1.1 connection of a client: reads whole requests, one at a time, and sends the answers in the same order.

No request is longer than the limit. A client that stops inside a request, or that does not read its answers, is
disconnected. Input that cannot be read gets an answer, and then the connection ends: the server cannot tell where the
next request would begin.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import TYPE_CHECKING

import httptools

from headrace.schemas.errors import HeadraceError
from headrace.schemas.errors.serving import MessageTooLargeError, ServingError
from headrace.workers.serving.http.requests import HttpRequest
from headrace.workers.serving.http.responses import HttpAnswer, refused

if TYPE_CHECKING:
    from headrace.workers.serving.http.server import HttpServer

HEAD_BYTES = 1 << 16
"""The longest request line and headers."""
_HEAD_TOO_LARGE = MessageTooLargeError(f"headers of more than {HEAD_BYTES} bytes")
LINGER_S = 2.0
"""Seconds that a refused client may go on sending. If it were cut off at once, it might never read the refusal."""


class HttpConnection(asyncio.Protocol):
    """One connection, for one event loop. `shutdown` answers the current request and then ends it."""

    def __init__(self, server: HttpServer) -> None:
        self._server, self._loop = server, asyncio.get_running_loop()
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
        self._got_eof = False
        """True once the client sends no more requests."""
        self._waiting_since = self._loop.time()
        """Time at which the server began to wait: for an answer, for the next bytes, or for the client to read."""
        self._in_request = self._in_head = True
        """True from the first byte of a request to its last, and before the first request."""
        self._request_bytes = 0
        """Number of bytes of that request that have been parsed."""
        self._head_bytes = 0
        self._target, self._headers, self._body = b"", dict[bytes, bytes](), bytearray()

    # -- called by asyncio and by the server --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit the client, or refuse it and close the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # asyncio does not set it on what it accepts from this listener; without it each answer waits 40 ms
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        full = self._server.admit(self)
        if full is not None:
            self._ignores_input = True
            transport.write(refused(full).frame(keep_alive=False))
            transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Drop all that waits."""
        self._current, self._ignores_input = None, True
        self._received.clear()
        self._server.disconnected(self)
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
        if self._current is None:
            self._waiting_since = self._loop.time()
        self._request_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._refuse(ServingError(f"this is no HTTP/1.1: {error}", "bad_request"))
        if self._in_head and self._request_bytes > HEAD_BYTES:
            self._refuse(_HEAD_TOO_LARGE)
        elif self._request_bytes > HEAD_BYTES + self._server.limits.max_message_bytes:
            self._refuse_body()
        self._process_requests()

    def on_message_begin(self) -> None:
        """Reset the parts of the request."""
        self._in_request = self._in_head = True
        self._head_bytes = 0
        self._target, self._headers, self._body = b"", {}, bytearray()

    def on_url(self, url: bytes) -> None:
        """Collect a piece of the target."""
        self._target += url
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header."""
        self._headers[name.lower()] = value
        self._head_bytes += len(name) + len(value) + len(": \r\n")

    def on_headers_complete(self) -> None:
        """Refuse a request as soon as its head shows that the server does not take it."""
        self._in_head = False
        if self._head_bytes > HEAD_BYTES:  # all of it came at once
            self._refuse(_HEAD_TOO_LARGE)
            return
        length = self._headers.get(b"content-length", b"")
        refusal = self._server.refuse_head(self._target, self._headers)
        if refusal is not None:
            self._refuse(refusal)
        elif self._parser.should_upgrade():
            self._refuse(ServingError("this server speaks only HTTP/1.1", "bad_request"))
        elif length.isdigit() and int(length) > self._server.limits.max_message_bytes:
            self._refuse_body()
        elif self._headers.get(b"expect", b"").lower() == b"100-continue" and self._current is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        """Collect a piece of the body."""
        self._body += part  # a list would have 35 bytes more for each part, and one of a chunked body may be a byte
        if len(self._body) > self._server.limits.max_message_bytes:
            self._refuse_body()

    def on_message_complete(self) -> None:
        """Enqueue the request."""
        if not self._ignores_input:
            method, keep_alive = self._parser.get_method().decode(), self._parser.should_keep_alive()
            self._received.append(HttpRequest(method, self._target, self._headers, bytes(self._body), keep_alive))
            self._in_request, self._request_bytes, self._body = False, 0, bytearray()

    def _refuse_body(self) -> None:
        self._refuse(MessageTooLargeError(f"a body of more than {self._server.limits.max_message_bytes} bytes"))

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

    def _process_requests(self) -> None:
        """Handle received requests in order, until one waits for its answer.

        Some are answered inside `handle`, which calls this method again. The inner call returns at once, so the stack
        stays flat however many requests have come.
        """
        if self._processing:
            return
        self._processing = True
        while self._received and self._current is None and not (self._writing_paused or self._closing):
            received = self._received.popleft()
            if isinstance(received, HttpRequest):
                self._current = received
                self._server.handle(self, received)
            else:
                self._write(refused(received), keep_alive=False)
        self._processing = False
        waits = self._received or self._writing_paused
        (self._transport.pause_reading if waits else self._transport.resume_reading)()

    def _write(self, answer: HttpAnswer, *, keep_alive: bool, head_only: bool = False) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(answer.frame(keep_alive=keep_alive, head_only=head_only))
        if not keep_alive:
            self._ignores_input = self._closing = True
            self._waiting_since = self._loop.time()
            self._received.clear()
            try:
                (self._transport.close if self._got_eof else self._transport.write_eof)()
            except OSError:  # the client has closed unseen: its system resets the connection when it gets the answer
                self._transport.abort()

    # -- time ---------------------------------------------------------------------------------------------------------

    def check_time(self, now: float) -> None:
        """End what takes too long. The server calls this several times a second."""
        waited, read_s, wait_s = now - self._waiting_since, self._server.limits.read_s, self._server.wait_s
        if self._closing or self._writing_paused:
            if waited > (LINGER_S if self._closing else read_s):
                self._transport.abort()
        elif self._current is not None:
            if waited > wait_s:
                late = ServingError(f"no answer within {wait_s:g} s; send the same request again", "not_yet")
                self.answer(self._current, refused(late))
        elif self._in_request:
            if waited > read_s:
                self._refuse(ServingError(f"nothing of the request came for {read_s:g} s", "too_slow"))
                self._process_requests()
        elif waited > self._server.idle_s:
            self._transport.close()
