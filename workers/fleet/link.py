"""The worker's sockets. They carry the session's messages to the broker and back, and weights to the receiver.

Only the sampling thread uses them, between two polls of the envs. A pump costs microseconds when nothing is due.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import zmq

from headrace.schemas import sockets
from headrace.schemas.errors import DecodeError, HeadraceError, refusal
from headrace.schemas.handshakes import CLIENT_EVENTS, Handshakes
from headrace.schemas.keys import ClientKeys
from headrace.schemas.messages import Ack, Fenced, Message, Reject, WorkerWelcome, read
from headrace.schemas.wire import MAGIC, MessageKind, WireLimits, WireMessage, decode
from headrace.workers.fleet.session import SessionState, WorkerSession
from headrace.workers.fleet.weights import WeightsReceiver
from headrace.workers.fleet.window import Shipment

log = logging.getLogger(__name__)

_SAY_WAITING_S = 10.0
_CONTROL: dict[MessageKind, type[Message]] = {m.KIND: m for m in (WorkerWelcome, Ack, Fenced, Reject)}
_CAPS = WireLimits(payload_bytes=1 << 30)


class StoppedError(HeadraceError):
    """The worker was told to stop before it got what it waited for."""


class BrokerLink:
    """DEALER to the broker and SUB to its weights relay. Call `pump` often and `close` once."""

    def __init__(
        self, endpoint: str, session: WorkerSession, weights: WeightsReceiver, keys: ClientKeys | None = None
    ) -> None:
        self.endpoint = endpoint
        self.session = session
        self.weights = weights
        self._context = zmq.Context()
        self._keys = keys.options() if keys is not None else {}
        self._dealer = _socket(self._context, zmq.DEALER, sockets.DEALER | self._keys)
        self._dealer.copy_threshold = sockets.COPY_BELOW_BYTES
        self._handshakes = Handshakes(endpoint, keys)
        self._monitor: zmq.Socket[bytes] = self._dealer.get_monitor_socket(CLIENT_EVENTS)
        self._dealer.connect(endpoint)
        self._subscriber: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def pump(self, wait_s: float = 0.0) -> None:
        """Send what is due and receive what has arrived, waiting up to `wait_s` for a message.

        Raises `KeysRefusedError` when the broker does not admit this worker.
        """
        self._send()
        ready = self._poller.poll(int(wait_s * 1000))
        for socket, _ in ready:
            if socket is self._monitor:
                self._handshakes.observe(self._monitor.recv_multipart())
            else:
                self._receive(socket)
        if ready:
            self._send()

    def join(self, timeout_s: float, stopping: threading.Event | None = None) -> None:
        """Wait for the broker's WELCOME, and log now and then that it has not come.

        Raises `UnreachableError`, the error of the broker's refusal, or `StoppedError` once `stopping` is set.
        """
        waited_s = 0.0
        stopping = stopping or threading.Event()
        while waited_s < timeout_s and self.session.state is SessionState.JOINING:
            if waited_s:
                log.info("no broker answers at %s for %.0f s (at most %.0f s)", self.endpoint, waited_s, timeout_s)
            slice_s = min(_SAY_WAITING_S, timeout_s - waited_s)
            self.wait_until(lambda: self.session.state is SessionState.ACTIVE or stopping.is_set(), slice_s)
            if stopping.is_set() and self.session.state is SessionState.JOINING:
                raise StoppedError(f"stopped while waiting for the broker at {self.endpoint}")
            waited_s += slice_s
        self.raise_refusal()
        if self.session.state is not SessionState.ACTIVE:
            raise self._handshakes.why_silent(timeout_s)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Pump until `condition` holds, the session is over, or time is up. Return whether `condition` holds."""
        deadline = time.monotonic() + timeout_s
        while not condition() and not self.session.over and (left := deadline - time.monotonic()) > 0:
            self.pump(min(left, 0.05))
        return condition()

    def raise_refusal(self) -> None:
        """Raise the typed error if a refusal or a fencing ended the session."""
        if self.session.refusal is not None:
            raise refusal(*self.session.refusal)

    def close(self) -> None:
        """Close the sockets, waiting up to 200 ms for queued messages. Anything still unsent is lost."""
        self._context.destroy(linger=200)

    def _send(self) -> None:
        now = time.monotonic()
        self.session.tick(now)
        pull = self.weights.request(now) if self.session.state is SessionState.ACTIVE else None
        if pull is not None:
            self._try_send(pull.frames())
        for out in self.session.take_outbox():
            frames = out.frames if isinstance(out, Shipment) else out.frames()
            if frames is not None and not self._try_send(frames):
                self.session.not_sent()
                break

    def _try_send(self, frames: list[bytes | bytearray | memoryview]) -> bool:
        """Send one message; return False without a connection. Large frames are not copied, so they must not change."""
        try:
            self._dealer.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._dispatch(decode(frames, _CAPS))
            except DecodeError as error:
                if error.reason == "version_mismatch":
                    raise refusal(error.reason, f"broker at {self.endpoint}: {error.detail}") from error

    def _dispatch(self, message: WireMessage) -> None:
        now = time.monotonic()
        if message.kind in (MessageKind.WEIGHTS, MessageKind.WEIGHTS_PART):
            self.weights.receive(message, now)
            return
        control = _CONTROL.get(message.kind)
        if control is None:
            return
        self.session.receive(read(control, message.header), now)
        self.weights.hear_of(self.session.weights_known, now)
        if self._subscriber is None and self.session.welcome is not None:
            self._subscribe(self.session.welcome.weights_endpoint)

    def _subscribe(self, endpoint: str) -> None:
        endpoint = _reachable(endpoint, self.endpoint)
        self._subscriber = _socket(self._context, zmq.SUB, sockets.SUB | self._keys)
        self._subscriber.subscribe(MAGIC)
        self._subscriber.connect(endpoint)
        self._poller.register(self._subscriber, zmq.POLLIN)


def _reachable(endpoint: str, beside: str) -> str:
    """Return `endpoint`, with its host replaced if its broker listens on all addresses.

    The host is then the one by which `beside` reached the broker.
    """
    host, _, port = endpoint.rpartition(":")
    return f"{beside.rpartition(':')[0]}:{port}" if host in ("tcp://0.0.0.0", "tcp://[::]") else endpoint


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, options: dict[str, int | bytes]) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    return socket
