"""An env host's socket to its worker. It reconnects for ever, unless the worker's port refuses the host's keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import zmq

from headrace.schemas.credentials.keys import ENV_HOST, ClientKeys
from headrace.schemas.errors import KeysRefusedError
from headrace.schemas.frames.wire import DEFAULT_LIMITS, Buffer
from headrace.schemas.messages import Message
from headrace.schemas.peers import sockets
from headrace.schemas.peers.handshakes import CLIENT_EVENTS, SUCCEEDED, Handshakes, read_event

_LARGEST_FRAME = DEFAULT_LIMITS.payload_bytes + (1 << 20)


class WorkerLink:
    """A DEALER socket to the worker at `endpoint`, for one thread. `is_connected` is as of the last `wait`."""

    def __init__(self, endpoint: str, keys: ClientKeys | None) -> None:
        self._handshakes = Handshakes(endpoint, ENV_HOST, keys)
        self._own = sockets.OwnSockets(zmq.Context(), f"an env host's connection to {endpoint}", 0.5)
        options = {**sockets.DEALER, "MAXMSGSIZE": _LARGEST_FRAME, **self._handshakes.options()}
        self._socket: zmq.Socket[bytes] = self._own.open(zmq.DEALER, options)
        self._endpoint = endpoint
        self.is_connected = False
        self._monitor: zmq.Socket[bytes] = self._own.monitor(self._socket, CLIENT_EVENTS | zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        for socket in (self._socket, self._monitor):
            self._poller.register(socket, zmq.POLLIN)

    def watch(self, what: Any) -> None:
        """Have `wait` also return when `what`, which has a `fileno`, is readable."""
        self._poller.register(what.fileno(), zmq.POLLIN)

    def forget(self, what: Any) -> None:
        """Stop watching `what`."""
        self._poller.unregister(what.fileno())

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a message or an event arrives. Return whether it is a new connection.

        Raises `KeysRefusedError` when the worker does not let this host in.
        """
        is_new = False
        for socket, _ in self._poller.poll(max(int(timeout_s * 1000), 1)):
            if socket is self._monitor:
                event = self._monitor.recv_multipart()
                self._handshakes.observe(event)
                kind, _ = read_event(event)
                is_new = is_new or kind == SUCCEEDED
                self.is_connected = kind == SUCCEEDED or (self.is_connected and kind != zmq.EVENT_DISCONNECTED)
        return is_new

    def why_silent(self, waited_s: float) -> str:
        """Return in words the known reason why the worker has been silent for `waited_s` seconds."""
        if not self.is_connected:
            return str(self._handshakes.why_silent(waited_s))
        return (
            f"{self._endpoint} takes the connection and has said nothing for {waited_s:g} s; check that it is a "
            "worker's port for env hosts, and that the worker is not stopped"
        )

    def refusal(self) -> KeysRefusedError | None:
        """Return the error of a worker that breaks off each handshake and has never let this host in, if it does."""
        why = self._handshakes.why_silent(0.0)
        return why if isinstance(why, KeysRefusedError) else None

    def receive(self) -> Iterator[list[bytes]]:
        """Yield the received messages."""
        while sockets.has_message(self._socket):
            try:
                yield self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def say(self, message: Message) -> bool:
        """Send a message without arrays."""
        return self.send(message.frames())

    def send(self, frames: list[Buffer]) -> bool:
        """Send without waiting. Return False without a connection.

        Then the message is lost, and the worker repeats its order.
        """
        try:
            sockets.send(self._socket, frames)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Close the socket. Sent messages have a moment to leave."""
        self._own.close()
