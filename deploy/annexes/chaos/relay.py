"""A TCP relay in a thread. It can cut or hold back the connections that it forwards, without root."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from enum import Enum

_READ = 1 << 18
_STOP_S = 5.0

Address = tuple[str, int]


class LinkState(Enum):
    """The ways a relay treats the bytes that reach it."""

    FORWARDS = "forwards"
    HOLDS = "holds"
    """Connections stay open, and nothing passes."""
    REFUSES = "refuses"
    """Connections are closed, and new ones too."""


class Relay:
    """Listens on a free loopback port and forwards to `target()`, asked at each connection; None refuses it."""

    def __init__(self, target: Callable[[], Address | None]) -> None:
        self._target = target
        self._state = LinkState.FORWARDS
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._may_pass = asyncio.Event()
        self._may_pass.set()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Return the address to connect to."""
        return f"tcp://127.0.0.1:{self.port}"

    def set(self, state: LinkState) -> None:
        """Change what happens to connections, open and new ones."""
        self._loop.call_soon_threadsafe(self._set, state)

    def close(self) -> None:
        """Close every connection and end the thread."""
        self.set(LinkState.REFUSES)
        self._loop.call_soon_threadsafe(self._server.close)
        asyncio.run_coroutine_threadsafe(self._wait_for_tasks(), self._loop).result(_STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        self._loop.close()

    def _set(self, state: LinkState) -> None:
        self._state = state
        if state is LinkState.HOLDS:
            self._may_pass.clear()
        else:
            self._may_pass.set()
        if state is LinkState.REFUSES:
            for task in self._tasks:
                task.cancel()

    async def _wait_for_tasks(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far: asyncio.StreamWriter | None = None
        try:
            target = self._target() if self._state is not LinkState.REFUSES else None
            if target is None:
                return
            far_reader, far = await asyncio.open_connection(*target)
            ways = [asyncio.ensure_future(self._pump(*way)) for way in ((reader, far), (far_reader, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            return  # refused by the broker, or cut by us: the peer sees a closed connection either way
        finally:
            self._tasks.discard(task)
            for end in (writer, far):
                if end is not None:
                    end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ):
                await self._may_pass.wait()
                writer.write(data)
                await writer.drain()
