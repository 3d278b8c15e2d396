"""A policy server of its own in this process, over the plain table, with a thread that plays the sampler."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from typing import Self

from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.credentials.keys import CLIENT_PORT, BrokerKeys
from headrace.schemas.peers.socket_folder import SocketPlace
from headrace.workers.envs.remote.router_port import RouterPort
from headrace.workers.policy.batch_columns import PolicyColumns
from headrace.workers.serving.acting_channel import ActingChannel
from headrace.workers.serving.dispatcher import Dispatcher
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.http.combined_listener import CombinedListener
from headrace.workers.serving.session_records import ServingLimits
from headrace.workers.serving.zmq.listener import ZmqListener
from support.serving.plain_episodes import SPACES, PlainEpisodes
from support.waiting import TIMEOUT_S

LIMITS = ServingLimits(lease_s=10.0, max_sessions=50, max_episodes=20, max_message_bytes=1 << 16)


class Served:
    """`endpoint` is for ZeroMQ, `url` for HTTP; `episodes` is what became of it all."""

    def __init__(
        self,
        limits: ServingLimits = LIMITS,
        *,
        capacity: int = 100,
        socket_dir: str = "",
        host: str = "",
        port: int = 0,
        keys: BrokerKeys | None = None,
        token: str | None = None,
        spaces: Spaces = SPACES,
        away_s: Callable[[], float] = lambda: 0.0,
        http_hosts: frozenset[str] = frozenset(),
    ) -> None:
        """Serve by a Unix socket in `socket_dir`, or for "" in a new folder. With a host, a port or keys: by TCP.

        `away_s`: how long the sampler does something else, each time that it has answered.
        """
        by_tcp = host or port or keys is not None
        self._at = (host or "127.0.0.1", port) if by_tcp else SocketPlace(socket_dir, "clients-0")
        self.episodes = PlainEpisodes(capacity)
        codec = EpisodeCodec.of(spaces)
        self._router_port = RouterPort(
            self._at,
            keys,
            allow_insecure=keys is None,
            domain=CLIENT_PORT,
            largest_message=limits.max_message_bytes,
        )
        self.endpoint = self._router_port.endpoint
        self.acting_channel = ActingChannel(limits.max_message_bytes)
        self.acting_channel.open(
            {"default_policy": spaces}, capacity, {"default_policy": PolicyColumns({}, looks_back=False)}
        )
        self._http_socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._http_socket.getsockname()[1]}"
        frames = ZmqListener(self._router_port, codec, limits.max_message_bytes)
        listener = CombinedListener(frames, codec, limits, self._http_socket, token, http_hosts)
        self.dispatcher = Dispatcher(self.episodes, codec, limits, listener, self.acting_channel)
        self.hold = threading.Event()
        """While it is set, nobody is answered."""
        self._away_s = away_s
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self.dispatcher.serve), threading.Thread(target=self._sample)]
        for thread in self._threads:
            thread.start()

    def _sample(self) -> None:
        while not self._stopping.wait(self._away_s()):
            self.dispatcher.run_once(0.02)
            if not self.hold.is_set():
                self.episodes.answer_all()
                while (delivery := self.acting_channel.take()) is not None:
                    delivery.done()

    def counts(self) -> dict[str, int]:
        """Return the counts of the sessions. The dispatcher's thread reads them."""
        told: queue.SimpleQueue[dict[str, int]] = queue.SimpleQueue()
        self.dispatcher.post(lambda sessions, now: told.put(sessions.counts()))
        return told.get(timeout=TIMEOUT_S)

    def close(self) -> None:
        self.dispatcher.stop()
        self._stopping.set()
        for thread in self._threads:
            thread.join(100)
        self.dispatcher.close()
        self._http_socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
