"""One life of a policy server: what it has bound, and the desk that serves there."""

from __future__ import annotations

import logging
import socket
import threading

from headrace.schemas.serving_settings import ServingSection
from headrace.workers.envs.remote.router_port import Door
from headrace.workers.serving import desk
from headrace.workers.serving.episodes import Episodes
from headrace.workers.serving.exchange import Exchange
from headrace.workers.serving.records import ServingLimits
from headrace.workers.serving.space_values import SpaceValues
from headrace.workers.serving.zmq.frames import FramesDoor

log = logging.getLogger(__name__)


class Server:
    """Serves at `door`, and by HTTP at `listener` to who shows `token`; what is bound is this one's to release."""

    def __init__(
        self,
        settings: ServingSection,
        door: Door,
        listener: socket.socket | None,
        token: str | None,
        exchange: Exchange | None,
    ) -> None:
        self._settings = settings
        self._door, self._listener, self._token = door, listener, token
        self._exchange = exchange
        self._lock = threading.Lock()
        self.desk: desk.Desk | None = None
        """From `run` on."""
        self._closed = False
        self.endpoint = door.endpoint
        http_port = listener.getsockname()[1] if listener is not None else 0
        self.ports = int(door.endpoint.rsplit(":", 1)[1]), int(http_port)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"http://{host}:{http_port}" if listener is not None else ""
        """Empty without HTTP."""
        log.info("serving clients at %s%s", self.endpoint, f" and {self.url}" if self.url else "")

    def run(self, episodes: Episodes, capacity: int, values: SpaceValues) -> None:
        """Serve these episodes, of which `capacity` may be open, until `close`."""
        s = self._settings
        limits = ServingLimits(
            lease_s=s.lease_s,
            max_sessions=s.max_sessions,
            max_episodes=capacity,
            max_message_bytes=s.max_message_bytes,
            max_connections=s.http_max_connections,
        )
        with self._lock:
            if self._closed:
                return
            self.desk = desk.Desk(episodes, values, limits, self._open(values, limits), self._exchange)
            episodes.turns = self.desk
        try:
            self.desk.serve()
        finally:
            self.desk.close()
            self._release()

    def _open(self, values: SpaceValues, limits: ServingLimits) -> desk.Door:
        frames = FramesDoor(self._door, values, limits.max_message_bytes)
        if self._listener is None:
            return frames
        from headrace.workers.serving.http.door import HttpDoor  # needs the extra `http`

        return HttpDoor(frames, values, limits, self._listener, self._token)

    def close(self) -> None:
        """Have `run` end; what is bound is free when it has."""
        with self._lock:
            self._closed, desk = True, self.desk
        if desk is None:
            self._release()
        else:
            desk.stop()

    def _release(self) -> None:
        self._door.close()
        if self._listener is not None:
            self._listener.close()
