"""Tapes: what a worker, a learner and their broker once said, recorded between them and played to today's peers.

A tape is a file of JSON lines, in the order of the messages. Each has the `peer` that sent the message to the broker
or got it from there, whether it went `up` to the broker, its `kind`, and its frames in base64.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
import zmq

from headrace.broker.files.state_file import Endpoints
from headrace.schemas.frames.wire import Buffer, MessageKind, decode
from support.pipeline.delivery import Feeder, LoopThread
from support.waiting import TIMEOUT_S

PEERS = ("worker", "stream", "publisher")


@dataclass(frozen=True)
class Entry:
    """One message of a tape."""

    peer: str
    up: bool
    frames: list[bytes]

    @cached_property
    def kind(self) -> MessageKind:
        return decode(self.frames).kind

    @cached_property
    def header(self) -> dict[str, Any]:
        return decode(self.frames).header

    def line(self) -> bytes:
        frames = [base64.b64encode(frame).decode() for frame in self.frames]
        return orjson.dumps({"peer": self.peer, "up": self.up, "kind": self.kind.name, "frames": frames}) + b"\n"

    def news(self) -> list[int]:
        """How far the message says that things have gone: numbers that only rise."""
        header = self.header
        settled, position = header.get("settled"), header.get("position", [])
        return [
            header.get("seq", 0),
            header.get("accepted", 0),
            settled.get("seq", 0) if isinstance(settled, dict) else 0,
            int(header.get("closed", False)),
            sum(place["settled"]["seq"] for place in position),
            sum(place["ended"] for place in position),
            int(bool(header.get("spaces"))),
            header.get("published", (0, 0))[1],
        ]

    def covers(self, other: Entry) -> bool:
        """Return whether it is of the same kind, and has gone at least as far."""
        return self.kind is other.kind and all(own >= told for own, told in zip(self.news(), other.news(), strict=True))


def read_tape(path: Path) -> list[Entry]:
    lines = map(orjson.loads, path.read_bytes().splitlines())
    return [Entry(line["peer"], line["up"], [base64.b64decode(frame) for frame in line["frames"]]) for line in lines]


def write_tape(path: Path, entries: Sequence[Entry]) -> None:
    path.write_bytes(b"".join(entry.line() for entry in _essential(entries)))


def _essential(entries: Sequence[Entry]) -> Iterator[Entry]:
    """The messages with news. Others come by the clock, or are sent again."""
    kept: list[Entry] = []
    for entry in entries:
        if not any(before.peer == entry.peer and before.covers(entry) for before in kept):
            kept.append(entry)
            yield entry


def deaf(feeder: Feeder) -> Feeder:
    """A feeder that hears no broadcast of weights, so it pulls them through the connection that a tape has."""
    feeder.link._subscribe = lambda endpoint: None  # type: ignore[method-assign]
    return feeder


class Recorder(LoopThread):
    """Stands between the peers of a fleet and its broker, and keeps what both sides say in `entries`."""

    def __init__(self, broker: Endpoints) -> None:
        super().__init__("recorder")
        self._context = zmq.Context()
        self._broker = broker
        self.entries: list[Entry] = []
        self.worker, self.learner = (self._bind() for _ in range(2))
        self._fronts = {self.worker[0]: broker.worker, self.learner[0]: broker.learner}
        self._backs: dict[tuple[zmq.Socket[bytes], bytes], zmq.Socket[bytes]] = {}
        self._peers: dict[zmq.Socket[bytes], str] = {}

    def _bind(self) -> tuple[zmq.Socket[bytes], str]:
        socket = self._context.socket(zmq.ROUTER)
        return socket, f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                for front, endpoint in self._fronts.items():
                    while front.poll(1):
                        self._up(front, endpoint, front.recv_multipart())
                for (front, route), back in self._backs.items():
                    while back.poll(0):
                        self._down(front, route, back, back.recv_multipart())
        finally:
            self._context.destroy(linger=0)

    def _up(self, front: zmq.Socket[bytes], endpoint: str, frames: list[bytes]) -> None:
        route, body = frames[0], frames[1:]
        if (front, route) not in self._backs:
            back = self._context.socket(zmq.DEALER)
            back.connect(endpoint)
            hello = decode(body).header
            self._backs[front, route], self._peers[back] = back, hello.get("channel", hello["role"])
        back = self._backs[front, route]
        self.entries.append(Entry(self._peers[back], True, body))
        back.send_multipart(body)

    def _down(self, front: zmq.Socket[bytes], route: bytes, back: zmq.Socket[bytes], body: list[bytes]) -> None:
        self.entries.append(Entry(self._peers[back], False, body))
        front.send_multipart([route, *body])


class Player(LoopThread):
    """Says its side of a tape, and waits before each message until the other side has said what it said before.

    `send` and `receive` are the way to the other side; `receive` returns None where nothing has come. `check` judges
    each message from there. `error` is why the tape came to no end.
    """

    def __init__(
        self,
        tape: Sequence[Entry],
        send: Callable[[str, Sequence[Buffer]], None],
        receive: Callable[[], Entry | None],
        check: Callable[[Entry], None],
        *,
        up: bool,
    ) -> None:
        super().__init__("player")
        self._tape, self._send, self._receive, self._check, self._is_up = tape, send, receive, check, up
        self._heard: list[Entry] = []
        self.finished = threading.Event()
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            for entry in self._tape:
                if entry.up is self._is_up:
                    self._send(entry.peer, entry.frames)
                else:
                    self._await(entry)
        except BaseException as error:  # the test raises it
            self.error = error
        finally:
            self.finished.set()

    def _await(self, entry: Entry) -> None:
        while not any(heard.peer == entry.peer and heard.covers(entry) for heard in self._heard):
            heard = self._receive()
            if heard is not None:
                self._check(heard)
                self._heard.append(heard)
            elif self.stopping.is_set():
                raise AssertionError(f"the tape waits for {entry.kind.name} of the {entry.peer}, {entry.news()}")

    def wait(self) -> None:
        """Wait for the end of the tape; raise what went wrong."""
        if not self.finished.wait(TIMEOUT_S):
            self.stop()
        if self.error is not None:
            raise self.error


class OldBroker:
    """The broker's side of a tape, at two ports: one for workers, one for learners."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.ROUTER) for _ in range(2)]
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in self._sockets]
        self.worker, self.learner = (f"tcp://127.0.0.1:{port}" for port in ports)
        self._routes: dict[str, tuple[zmq.Socket[bytes], bytes]] = {}
        self._peers: dict[bytes, str] = {}

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        socket, route = self._routes[peer]
        socket.send_multipart([route, *frames])

    def receive(self) -> Entry | None:
        for socket in self._sockets:
            if socket.poll(5):
                route, *body = socket.recv_multipart()
                if route not in self._peers:
                    hello = decode(body).header
                    self._peers[route] = hello.get("channel", hello["role"])
                    self._routes[self._peers[route]] = socket, route
                return Entry(self._peers[route], True, body)
        return None

    def close(self) -> None:
        self._context.destroy(linger=0)


class OldPeers:
    """The side of the peers, each with a connection of its own to a broker."""

    def __init__(self, endpoints: Mapping[str, str]) -> None:
        self._context = zmq.Context()
        self._sockets = {peer: self._context.socket(zmq.DEALER) for peer in endpoints}
        for peer, endpoint in endpoints.items():
            self._sockets[peer].connect(endpoint)

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        self._sockets[peer].send_multipart(frames)

    def receive(self) -> Entry | None:
        for peer, socket in self._sockets.items():
            if socket.poll(5):
                return Entry(peer, False, socket.recv_multipart())
        return None

    def close(self) -> None:
        self._context.destroy(linger=0)
