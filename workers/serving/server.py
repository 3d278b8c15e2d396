"""A policy server: its ports and the dispatcher that serves them, from one bind to the next."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from headrace.schemas.peers.advertised import in_url
from headrace.schemas.settings.serving_settings import ServingSection
from headrace.workers.envs.remote.router_port import RouterPort
from headrace.workers.serving.acting_channel import ActingChannel
from headrace.workers.serving.dispatcher import Dispatcher, Listener
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.session_episodes import ServedEpisodes
from headrace.workers.serving.session_records import ServingLimits
from headrace.workers.serving.zmq.listener import ZmqListener

log = logging.getLogger(__name__)


class Server:
    """Serves ZeroMQ clients at `router_port` and HTTP clients, who must show `token`, at `http_socket`.

    It owns both and closes them. `waiting_for`: see `ClientSessions`.
    """

    def __init__(
        self,
        settings: ServingSection,
        router_port: RouterPort,
        http_socket: socket.socket | None,
        token: str | None,
        channel: ActingChannel | None,
        waiting_for: Callable[[], str],
    ) -> None:
        self._settings = settings
        self._router_port, self._http_socket, self._token = router_port, http_socket, token
        self._channel, self._waiting_for = channel, waiting_for
        self._lock = threading.Lock()
        self.dispatcher: Dispatcher | None = None
        """Set by `run`."""
        self._closed = False
        self.endpoint = router_port.endpoint
        http_port = http_socket.getsockname()[1] if http_socket is not None else 0
        self.ports = int(router_port.endpoint.rsplit(":", 1)[1]), int(http_port)
        self.url = f"http://{in_url(settings.host)}:{http_port}" if http_socket is not None else ""
        """Address for HTTP clients; empty without HTTP."""
        log.info("serving clients at %s%s", self.endpoint, f" and {self.url}" if self.url else "")

    def run(self, episodes: ServedEpisodes, capacity: int, codec: EpisodeCodec) -> None:
        """Serve these episodes until `close`. At most `capacity` of them are open at once."""
        s = self._settings
        limits = ServingLimits(
            lease_s=s.lease_s,
            max_episodes=capacity,
            max_message_bytes=s.max_message_bytes,
        )
        with self._lock:
            if self._closed:
                return
            listener = self._open_listener(codec, limits)
            self.dispatcher = Dispatcher(episodes, codec, limits, listener, self._channel, self._waiting_for)
            episodes.driver_loop = self.dispatcher
        try:
            self.dispatcher.serve()
        finally:
            self.dispatcher.close()
            self._release()

    def _open_listener(self, codec: EpisodeCodec, limits: ServingLimits) -> Listener:
        zmq_listener = ZmqListener(self._router_port, codec, limits.max_message_bytes)
        if self._http_socket is None:
            return zmq_listener
        from headrace.workers.serving.http.combined_listener import CombinedListener  # needs the extra `http`

        host = self._settings.host.lower()
        return CombinedListener(zmq_listener, codec, limits, self._http_socket, self._token, frozenset([host]))

    def close(self) -> None:
        """Make `run` return. The ports are free when it has returned."""
        with self._lock:
            self._closed, dispatcher = True, self.dispatcher
        if dispatcher is None:
            self._release()
        else:
            dispatcher.stop()

    def _release(self) -> None:
        self._router_port.close()
        if self._http_socket is not None:
            self._http_socket.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `host` and `port`. Raises OSError.

    Its connections send small answers at once (TCP_NODELAY). They inherit the option only if it is set before a client
    can connect, and asyncio does not set it on a socket that it did not create. Without it, each answer on a connection
    that stays open waits 40 ms for the kernel of the client.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind((host, port))
        found.listen()
    except BaseException:
        found.close()
        raise
    return found
