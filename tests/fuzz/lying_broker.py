"""A broker that answers each HELLO of one peer with the frames that a test gives, in a thread of its own."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import zmq
from fuzz.mutations import peek

from headrace.schemas.frames.wire import Buffer, MessageKind
from headrace.schemas.peers.socket_folder import endpoint_of, new_socket_folder

Frames = Sequence[Buffer]


class LyingBroker:
    """A ROUTER on a Unix socket. `answer` is called in its thread with (kind, header, frames) of each message it hears.

    What `answer` returns goes to the peer that spoke.
    """

    def __init__(self, answer: Callable[[MessageKind, dict[str, object], list[bytes]], Iterable[Frames]]) -> None:
        self._answer = answer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._folder = new_socket_folder()
        self.endpoint = endpoint_of(self._folder, "broker")
        self._socket.bind(self.endpoint)
        self.error: BaseException | None = None
        """The unexpected exception that ended the broker's thread, if any."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._socket.poll(20):
                    self._take()
        except BaseException as error:
            self.error = error

    def _take(self) -> None:
        peer, *frames = self._socket.recv_multipart()
        kind, header, _ = peek(frames)
        if kind is None:
            return
        for said in self._answer(kind, header, frames):
            if said:
                self._socket.send_multipart([peer, *said])

    def check(self) -> None:
        """Raise what ended the broker's thread, if anything did."""
        if self.error is not None:
            raise self.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder)
        self.check()
