"""The clients of the serving bench: many in one process, each with a connection of its own."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import numpy as np
import zmq

from headrace.schemas.frames.wire import MessageKind, decode, encode
from headrace.workers.serving.serving_messages import ClientHello, EpisodeStart, EpisodeStep
from headrace.workers.serving.single_frame import join_frames, split_frame

OBSERVATION = np.full(4, 0.01, np.float32)
AHEAD, MOST_AHEAD = 40_000, 10_000
"""Number of messages of all clients, and of one, that are encoded ahead."""
KIND_BYTE = 6
"""Of frame 0, as `schemas/frames/wire.py` draws it."""
_BODY = b'{"observation": [0.01, 0.01, 0.01, 0.01], "reward": 1.0}'
_START_S = 60.0


class Written:
    """Requests of `count` clients, one after another; many are encoded ahead."""

    def __init__(self, count: int, write: Callable[[int, int], Any]) -> None:
        """`write` encodes the request of one client for one step."""
        self._write = write
        self._next = [0] * count
        self._ahead: list[deque[Any]] = [deque() for _ in range(count)]

    def fill(self) -> None:
        """Encode enough requests for a turn."""
        for client, ahead in enumerate(self._ahead):
            while len(ahead) < min(AHEAD // len(self._ahead), MOST_AHEAD):
                self._add(client)

    def take(self, client: int) -> Any:
        """Return the client's next request."""
        if not self._ahead[client]:
            self._add(client)
        return self._ahead[client].popleft()

    def _add(self, client: int) -> None:
        self._ahead[client].append(self._write(client, self._next[client]))
        self._next[client] += 1


class _Sockets:
    """ZeroMQ clients."""

    def __init__(self, endpoint: str, count: int, kind: int) -> None:
        self.count = count
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets = [self._context.socket(kind) for _ in range(count)]
        self._numbers = {one: client for client, one in enumerate(self._sockets)}
        for one in self._sockets:
            one.connect(endpoint)
            self._poller.register(one, zmq.POLLIN)

    def answered(self) -> Iterable[int]:
        found = [self._numbers[one] for one, _ in self._poller.poll(10)]
        for client in found:
            self._take(self._sockets[client].recv_multipart())
        return found

    def _take(self, frames: list[bytes]) -> None:
        assert len(frames[0]) == OBSERVATION.itemsize * 2, frames

    def close(self) -> None:
        self._context.destroy(linger=0)


class Bare(_Sockets):
    """REQ sockets that send only the observation's bytes."""

    def __init__(self, endpoint: str, count: int) -> None:
        super().__init__(endpoint, count, zmq.REQ)
        self._said = OBSERVATION.tobytes()

    def write(self) -> None:
        """Return the request, which is always the same."""

    def ask(self, client: int) -> None:
        self._sockets[client].send(self._said)


class ByZmq(_Sockets):
    """The policy server's own messages. The episode of each client never ends."""

    def __init__(self, endpoint: str, count: int) -> None:
        super().__init__(endpoint, count, zmq.DEALER)
        self._who = [{"session": f"z{client}", "token": "t"} for client in range(count)]
        self._written = Written(count, self._step)
        self.write = self._written.fill
        for client, one in enumerate(self._sockets):
            one.send_multipart(join_frames(ClientHello(**self._who[client]).frames()))
            assert decode(split_frame(one.recv_multipart())).kind is MessageKind.WELCOME
            one.send_multipart(join_frames(EpisodeStart(**self._who[client], episode=f"z{client}").frames()))
            self._take(one.recv_multipart())

    def ask(self, client: int) -> None:
        self._sockets[client].send(self._written.take(client))

    def _step(self, client: int, step: int) -> Any:
        fields = {**self._who[client], "episode": f"z{client}", "step": step, "reward": float(step > 0)}
        return join_frames(encode(EpisodeStep.KIND, fields, {"obs": OBSERVATION}))[0]

    def _take(self, frames: list[bytes]) -> None:
        assert frames[0][KIND_BYTE] == MessageKind.EPISODE_ANSWER, decode(split_frame(frames))


class ByHttp:
    """HTTP/1.1 over persistent connections, written by hand so that the client costs little."""

    def __init__(self, port: int, count: int) -> None:
        self.count = count
        self._poller = zmq.Poller()
        self._sockets = [_connect(port) for _ in range(count)]
        self._numbers = {one.fileno(): client for client, one in enumerate(self._sockets)}
        self._written = Written(count, self._step)
        self.write = self._written.fill
        for client, one in enumerate(self._sockets):
            self._poller.register(one.fileno(), zmq.POLLIN)
            for path in (f"/v1/sessions/h{client}", f"/v1/sessions/h{client}/episodes/h{client}"):
                one.sendall(_request(path, b"{}"))
                _hear(one)

    def ask(self, client: int) -> None:
        self._sockets[client].sendall(self._written.take(client))

    def _step(self, client: int, step: int) -> bytes:
        body = _BODY if step else _BODY.replace(b"1.0}", b"0.0}")
        return _request(f"/v1/sessions/h{client}/episodes/h{client}/steps/{step}", body)

    def answered(self) -> Iterable[int]:
        found = [self._numbers[int(fd)] for fd, _ in self._poller.poll(10)]
        for client in found:
            _hear(self._sockets[client])
        return found

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def _connect(port: int) -> socket.socket:
    """Connect as soon as the server listens."""
    until: Any = perf_counter() + _START_S
    while True:
        try:
            one = socket.create_connection(("127.0.0.1", port), timeout=_START_S)
        except ConnectionRefusedError:
            if perf_counter() > until:
                raise
        else:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return one


def _request(path: str, body: bytes) -> bytes:
    head = f"PUT {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nHeadrace-Client: t\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _hear(one: socket.socket) -> None:
    answer = b""
    while True:
        answer += one.recv(1 << 16)
        head, found, body = answer.partition(b"\r\n\r\n")
        if found and len(body) >= int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]):
            assert head.startswith(b"HTTP/1.1 200"), answer
            return
