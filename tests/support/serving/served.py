"""A policy server of its own in this process, over the plain table, with a thread that plays the sampler."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from headrace.schemas.keys import CLIENT_PORT, BrokerKeys
from headrace.schemas.spaces import Spaces
from headrace.workers.envs.remote.router_port import Door, DoorSettings
from headrace.workers.policy.columns import PolicyColumns
from headrace.workers.serving.desk import Desk
from headrace.workers.serving.exchange import Exchange
from headrace.workers.serving.http.door import HttpDoor
from headrace.workers.serving.http.listening import listen
from headrace.workers.serving.records import ServingLimits
from headrace.workers.serving.space_values import SpaceValues
from headrace.workers.serving.zmq.frames import FramesDoor
from support.serving.plain_episodes import SPACES, PlainEpisodes

LIMITS = ServingLimits(lease_s=10.0, max_sessions=50, max_episodes=20, max_message_bytes=1 << 16)


class Served:
    """`endpoint` is for ZeroMQ, `url` for HTTP; `episodes` is what became of it all."""

    def __init__(
        self,
        limits: ServingLimits = LIMITS,
        *,
        capacity: int = 100,
        port: int = 0,
        keys: BrokerKeys | None = None,
        token: str | None = None,
        spaces: Spaces = SPACES,
        host: str = "127.0.0.1",
        away_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`away_s`: how long the sampler does something else, each time that it has answered."""
        self.episodes = PlainEpisodes(capacity)
        values = SpaceValues.of(spaces)
        settings = DoorSettings(
            host,
            port,
            keys,
            domain=CLIENT_PORT,
            who="clients",
            setting="serving",
            largest_frame=limits.max_message_bytes,
        )
        self._door = Door(settings)
        self.endpoint = self._door.endpoint
        self.exchange = Exchange(limits.max_message_bytes)
        self.exchange.open(
            {"default_policy": spaces}, capacity, {"default_policy": PolicyColumns({}, looks_back=False)}
        )
        self._listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        frames = FramesDoor(self._door, values, limits.max_message_bytes)
        door = HttpDoor(frames, values, limits, self._listener, token)
        self.desk = Desk(self.episodes, values, limits, door, self.exchange)
        self.hold = threading.Event()
        """While it is set, nobody is answered."""
        self._away_s = away_s
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self.desk.serve), threading.Thread(target=self._sample)]
        for thread in self._threads:
            thread.start()

    def _sample(self) -> None:
        while not self._stopping.wait(self._away_s()):
            self.desk.turn(0.02)
            if not self.hold.is_set():
                self.episodes.answer_all()
                while (delivery := self.exchange.take()) is not None:
                    delivery.done()

    def counts(self) -> dict[str, int]:
        """Of the sessions, told by the desk's thread."""
        told: queue.SimpleQueue[dict[str, int]] = queue.SimpleQueue()
        self.desk.post(lambda sessions, now: told.put(sessions.counts()))
        return told.get(timeout=100)

    def close(self) -> None:
        self.desk.stop()
        self._stopping.set()
        for thread in self._threads:
            thread.join(100)
        self.desk.close()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
