"""The connections of a read-only HTTP port: how many there are, how long they are silent, and what they leave unread.

uvicorn accepts every connection, and waits without an end for a client that does not read its answer. Its options
and an ASGI application see neither a connection without a request nor a transport. So `WebConnection`
extends its protocol.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.schemas.basics.counted_warnings import CountedWarnings

MOST_CONNECTIONS = 256
"""At once. A browser has six, of which one follows a page."""
SILENT_S = 10.0
"""A connection may take so many seconds for a request, from an answer to the next request, and to read of an answer."""
MOST_UNREAD_BYTES = 64 << 20
"""Parts of answers that wait in this process until their clients read them, of all connections together."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 21\r\n"
    b"connection: close\r\n\r\nall places are taken\n"
)


class WebConnections:
    """Admits connections and ends those beyond a bound. All calls come from the event loop."""

    def __init__(self) -> None:
        self._known: dict[WebConnection, None] = {}
        """In the order in which they came."""
        self._marks: dict[WebConnection, tuple[object, float]] = {}
        """By connection that waits for its client: its mark, and since when it has this one."""

    def protocol(self, **of_uvicorn: Any) -> WebConnection:
        """Return the protocol of a new connection."""
        return WebConnection(self, **of_uvicorn)

    def admit(self, new: WebConnection) -> None:
        """Give a new connection the place of one that is idle, if all are taken. If none is, answer it with 503.

        The first one that has made no request goes first, then the first one whose answer was read.
        """
        if len(self._known) >= MOST_CONNECTIONS:
            idle = [each for each in self._known if each.is_idle]
            if not idle:
                new.transport.write(_FULL)
                new.transport.close()
                return
            self._end(min(idle, key=lambda each: each.cycle is not None))
        self._known[new] = None

    def forget(self, gone: WebConnection) -> None:
        """Forget a connection that has ended."""
        self._known.pop(gone, None)
        self._marks.pop(gone, None)

    def bound_unread(self) -> None:
        """End the connections that have the most to read until the rest is within the bound."""
        unread = {each: each.unread_bytes for each in self._known}
        total = sum(unread.values())
        while total > MOST_UNREAD_BYTES:
            largest = max(unread, key=lambda each: unread[each])
            total -= unread.pop(largest)
            self._end(largest)

    def end_silent(self, now: float) -> None:
        """End connections that have waited for their clients for longer than `SILENT_S`. Call it once a second."""
        for each in list(self._known):
            mark = each.waits_for_client
            last, since = self._marks.get(each, (None, now))
            self._marks[each] = mark, since if mark is not None and mark == last else now
            if now - self._marks[each][1] > SILENT_S:
                self._end(each)

    def _end(self, connection: WebConnection) -> None:
        """End a connection at once: `close` would wait until the client has read all."""
        self.forget(connection)
        connection.transport.abort()


class _NoBodies(h11.Connection):
    """Reads requests without a body. A body of tiny chunks would take the event loop a second for each 256 KiB."""

    def next_event(self) -> Any:
        """Return the next event. Raises `h11.RemoteProtocolError` for the head of a request that has a body."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            fields = dict(event.headers)
            if b"transfer-encoding" in fields or int(fields.get(b"content-length", b"0")):
                raise h11.RemoteProtocolError("this server reads no bodies")
        return event


class WebConnection(H11Protocol):
    """A connection of uvicorn that asks for its place."""

    def __init__(self, places: WebConnections, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._places = places
        self.conn = _NoBodies(h11.SERVER, self.config.h11_max_incomplete_event_size or 0)

    def connection_made(self, transport: Any) -> None:
        """Take a place."""
        super().connection_made(transport)
        self._places.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the place."""
        self._places.forget(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Have the bytes counted that wait: the client reads more slowly than the answer comes."""
        super().pause_writing()
        self._places.bound_unread()

    @property
    def unread_bytes(self) -> int:
        """Return the bytes of answers that wait in this process."""
        return self.transport.get_write_buffer_size()

    @property
    def is_idle(self) -> bool:
        """Return whether no request is under way, and all answers have left."""
        answered = cast(Any, self.cycle) is None or self.cycle.response_complete
        return answered and not self.unread_bytes

    @property
    def waits_for_client(self) -> object | None:
        """Return a mark that changes when the client does something; None while it waits for an answer of ours."""
        unread = self.unread_bytes
        return (self.cycle, unread) if unread or self.is_idle else None


class CountedLines(logging.Filter):
    """Has warnings of uvicorn about single requests counted, so that clients cannot fill the log."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._warnings = CountedWarnings(log, clock)

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass what is no warning. Log a warning itself, or count it."""
        if record.levelno < logging.WARNING:
            return True
        error = record.exc_info[1] if record.exc_info else None
        self._warnings.warn(b"", str(record.msg), record.getMessage().strip(), cast(Any, error))
        return False
