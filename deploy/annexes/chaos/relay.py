"""A relay of Unix sockets in a thread. It can cut or hold back the connections that it forwards."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable
from enum import Enum

from headrace.schemas.peers.socket_folder import SCHEME, endpoint_of, new_socket_folder

_READ = 1 << 18
_STOP_S = 5.0


class LinkState(Enum):
    """The ways a relay treats the bytes that reach it."""

    FORWARDS = "forwards"
    HOLDS = "holds"
    """Connections stay open, and nothing passes."""
    REFUSES = "refuses"
    """Connections are closed, and new ones too."""


class Relay:
    """Listens on a Unix socket of its own and forwards to `target()`, asked at each connection; "" refuses it."""

    def __init__(self, target: Callable[[], str]) -> None:
        self._target = target
        self._state = LinkState.FORWARDS
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._may_pass = asyncio.Event()
        self._may_pass.set()
        self._folder = new_socket_folder()
        self.endpoint = endpoint_of(self._folder, "relay")
        path = self.endpoint.removeprefix(SCHEME)
        self._server = self._loop.run_until_complete(asyncio.start_unix_server(self._serve, path))
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()

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
        shutil.rmtree(self._folder, ignore_errors=True)

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
            target = self._target() if self._state is not LinkState.REFUSES else ""
            if not target:
                return
            far_reader, far = await asyncio.open_unix_connection(target.removeprefix(SCHEME))
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
