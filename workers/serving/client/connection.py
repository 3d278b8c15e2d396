"""One connection to a policy server. It repeats each request until it is answered or its time is up."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import zmq
from numpy.typing import NDArray

from headrace.schemas.credentials.keys import CLIENT, ClientKeys, expected_key
from headrace.schemas.errors import ConfigError, DecodeError, HeadraceError, UnreachableError, no_fleet_error
from headrace.schemas.errors.serving import MessageTooLargeError, ServingError, error_of
from headrace.schemas.frames.wire import DEFAULT_LIMITS, decode, encode
from headrace.schemas.messages import Message, read
from headrace.schemas.peers import sockets
from headrace.schemas.peers.fleet_address import AddressSource, await_address
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.peers.handshakes import CLIENT_EVENTS, SUCCEEDED, Handshakes, read_event
from headrace.schemas.peers.rendezvous import RENDEZVOUS_VARIABLE, Rendezvous
from headrace.schemas.peers.worker_port_choice import WorkerPortChoice
from headrace.workers.serving.serving_messages import (
    ANSWERS,
    AnyStep,
    ChunkShipment,
    ClientAck,
    ClientHeartbeat,
    ClientReject,
    ClientRequest,
)
from headrace.workers.serving.single_frame import join_frames, split_frame

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 4.0
_LOOK_S = 0.5
"""Seconds between two looks whether a server that does not answer has moved."""
_LAST_HEARTBEAT_S = 2.0
"""Seconds that a server may take to confirm a heartbeat. This shows that it lives and only its worker waits."""
_SLOW_BYTES_S = 10_000_000
"""The slowest expected transfer. A retry that comes before the first message has arrived makes everything slower.
After a broken connection, the event of the new one triggers the retry, not this time."""
_OPTIONS = sockets.DEALER | {"IMMEDIATE": 0, "MAXMSGSIZE": DEFAULT_LIMITS.payload_bytes}
"""With IMMEDIATE, libzmq drops received but unread messages when a connection ends, such as the last message of a
leaving server. Instead, the client sends nothing before the monitor reports a connection.
"""
_numbers = itertools.count(1)
AnyRequest = TypeVar("AnyRequest", bound=ClientRequest)
SERVER = "policy server"


class Connection:
    """A DEALER socket among `own` that reconnects by itself. One thread at a time may use it.

    It goes where `place` moves. `agreed` says that the server has accepted an earlier connection of this client.
    """

    def __init__(self, own: sockets.OwnSockets, place: ServerPlace, keys: ClientKeys | None, *, agreed: bool) -> None:
        self._own, self._place, self._keys, self._agreed = own, place, keys, agreed
        self._connect(place.follow(is_connected=True))

    def _connect(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._handshakes = Handshakes(endpoint, CLIENT, self._keys, server=SERVER, agreed=self._agreed)
        self._socket: zmq.Socket[bytes] = self._own.open(zmq.DEALER, {**_OPTIONS, **self._handshakes.options()})
        self._monitor: zmq.Socket[bytes] = self._own.monitor(self._socket, CLIENT_EVENTS)
        try:
            self._socket.connect(endpoint)
        except (zmq.ZMQError, TypeError) as error:
            message = (
                f'{endpoint!r:.80} is no address of a policy server ({error}); it is "tcp://HOST:PORT" or "ipc:///PATH"'
            )
            raise ConfigError(message, key="endpoint") from error
        self._poller = zmq.Poller()
        for socket in (self._socket, self._monitor):
            self._poller.register(socket, zmq.POLLIN)

    def _follow(self) -> bool:
        """Connect to the server's new address if it has one. Return whether it has."""
        endpoint = self._place.follow(is_connected=self._handshakes.connected)
        if endpoint == self._endpoint:
            return False
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._connect(endpoint)
        return True

    def ask(
        self,
        request: ClientRequest,
        timeout_s: float,
        arrays: Mapping[str, NDArray[Any]] | None = None,
        max_message_bytes: int = DEFAULT_LIMITS.payload_bytes,
    ) -> tuple[Message, dict[str, NDArray[Any]]]:
        """Send a request, several times if needed, and return its answer, (message, arrays).

        Raises the error with which the server refuses it, `KeysRefusedError`, and `UnreachableError` after `timeout_s`.
        The latter says what the worker waits for if the server confirms a heartbeat within two more seconds.
        Raises `MessageTooLargeError` before it sends a message that is too large: the server would close the
        connection, and the client would send it for ever.
        """
        self._own.check()
        number = next(_numbers)
        frames = encode(request.KIND, request.model_copy(update={"request": number}).model_dump(), arrays)
        size, frames = sum(map(len, frames)), join_frames(frames)
        if size > max_message_bytes:
            raise MessageTooLargeError(f"a message of {size} bytes, and the server takes {max_message_bytes}")
        now = time.monotonic()
        until, retry_at, retry_s = now + timeout_s, now, _FIRST_RETRY_S + size / _SLOW_BYTES_S
        look_s = _LOOK_S if self._place.may_move else math.inf
        while now < until:
            if self._place.may_move and self._follow():
                retry_at = now
            if now >= retry_at:
                if self._handshakes.connected:
                    self._socket.send_multipart(frames, zmq.NOBLOCK)
                    retry_at, retry_s = now + retry_s, max(retry_s, min(2 * retry_s, _LONGEST_RETRY_S))
                else:
                    retry_at = until  # or once connected
            for socket, _ in self._poller.poll(max(1, math.ceil((min(until, retry_at, now + look_s) - now) * 1000))):
                if socket is self._monitor:
                    event = self._monitor.recv_multipart()
                    self._handshakes.observe(event)
                    if read_event(event)[0] == SUCCEEDED:  # repeat a request that the old connection may have lost
                        retry_at = 0.0
                else:
                    answer = self._read(self._socket.recv_multipart(), number)
                    if answer is not None:
                        return answer
            now = time.monotonic()
        raise self._why_no_answer(request, timeout_s)

    def _why_no_answer(self, request: ClientRequest, timeout_s: float) -> HeadraceError:
        """Return the error for a request without an answer. Steps and chunks wait for the worker, others do not."""
        if isinstance(request, AnyStep | ChunkShipment) and self._handshakes.connected:
            with suppress(HeadraceError):
                ack, _ = self.ask(ClientHeartbeat(session=request.session, token=request.token), _LAST_HEARTBEAT_S)
                waiting_for = ack.waiting_for if isinstance(ack, ClientAck) else ""
                why = f"its worker waits for {waiting_for}" if waiting_for else "it is alive, and its worker is busy"
                what = f"the policy server at {self._endpoint} gave no answer within {timeout_s:g} s"
                sentence = f"{what}: {why}; repeat the call"
                return UnreachableError("policy server", self._endpoint, timeout_s, sentence=sentence)
        return self._handshakes.why_silent(timeout_s)

    def _read(self, frames: list[bytes], number: int) -> tuple[Message, dict[str, NDArray[Any]]] | None:
        """Return the answer; None if it belongs to an earlier request that was repeated."""
        message = decode(split_frame(frames))
        kind = ANSWERS.get(message.kind)
        if kind is None:
            raise DecodeError("bad_message", f"{message.kind.name} is not a message that a policy server sends")
        answer = read(kind, message.header)
        if isinstance(answer, ClientReject) and answer.request in (number, 0):
            raise error_of(answer.error, answer.message, answer.facts)
        return (answer, message.arrays) if getattr(answer, "request", None) == number else None


def request_of(kind: type[AnyRequest], **fields: Any) -> AnyRequest:
    """Return a request with these fields. Raises `ServingError`, which names a field that no server would take."""
    try:
        return read(kind, fields)
    except DecodeError as error:
        raise ServingError(f"this cannot be asked of a policy server: {error}", "bad_request") from error


class ServerPlace:
    """The address of one policy server, for all connections of a client. Without a `source` it stays.

    Any thread may call.
    """

    def __init__(self, endpoint: str, source: AddressSource | None = None) -> None:
        self.may_move = source is not None
        self._place = FleetPlace(endpoint, "clients", source, server=SERVER)
        self._lock = threading.Lock()

    def follow(self, *, is_connected: bool) -> str:
        """Return the address now. A caller without a connection makes it look for a new one."""
        if self.may_move:
            with self._lock:
                self._place.observe(is_connected, time.monotonic())
        return self._place.endpoint


def find_server(
    where: str | Path | None, keys: ClientKeys | None, slot: int | None = None, connect_timeout_s: float = 60.0
) -> ServerPlace:
    """Return the place of a worker that serves clients, once one is at the rendezvous `where`.

    `where` is a file or a URL; None: the one in HEADRACE_FLEET__RENDEZVOUS. `slot` None: any worker. Logs every ten
    seconds what it waits for. Raises `UnreachableError` when there is none within `connect_timeout_s`, and
    `ConfigError` for no such rendezvous.
    """
    where = str(where or os.environ.get(RENDEZVOUS_VARIABLE, ""))
    if not where or where.startswith("dns://"):
        raise ConfigError(f"give a file or URL, or set {RENDEZVOUS_VARIABLE}; got {where!r:.80}", key="rendezvous")
    source = WorkerPortChoice(Rendezvous(where), "clients", slot, expected_key(keys))
    endpoint = await_address(source, "clients", connect_timeout_s)
    if not endpoint:
        raise source.stopped() or no_fleet_error(where, source.problem)
    return ServerPlace(endpoint, source)
