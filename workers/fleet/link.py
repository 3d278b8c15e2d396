"""The worker's sockets. They carry the session's messages to the broker and back, and weights to the receiver.

Only the sampling thread uses them, between two polls of the envs. A pump costs microseconds when nothing is due.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import zmq

from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.basics.stop_event import StoppedError
from headrace.schemas.credentials.keys import ClientKeys
from headrace.schemas.errors import DecodeError, refusal
from headrace.schemas.frames.wire import MAGIC, MessageKind, WireMessage, decode
from headrace.schemas.messages import Reject, WorkerWelcome, messages_to, read
from headrace.schemas.messages.weights_messages import MAPPING_TOPIC
from headrace.schemas.peers import sockets
from headrace.schemas.peers.advertised import is_own_address
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.peers.handshakes import CLIENT_EVENTS, Handshakes
from headrace.workers.fleet.session import SessionState, WorkerSession
from headrace.workers.fleet.weights import WeightsReceiver
from headrace.workers.fleet.window import Shipment

log = logging.getLogger(__name__)

_SAY_WAITING_S = 10.0
_CONTROL = messages_to("worker")


class FleetLink:
    """DEALER to the broker and SUB to its weights relay. Call `pump` often and `close` once."""

    def __init__(
        self, place: FleetPlace, session: WorkerSession, weights: WeightsReceiver, keys: ClientKeys | None = None
    ) -> None:
        self.place = place
        self.session = session
        self.weights = weights
        self._keys = keys
        self._warnings = CountedWarnings(log)
        self._was_connected = False
        self._connect()

    @property
    def endpoint(self) -> str:
        """Return the broker's address."""
        return self.place.endpoint

    def _connect(self) -> None:
        self._handshakes = Handshakes(self.endpoint, "worker", self._keys)
        self._own = sockets.OwnSockets(zmq.Context(), f"a worker's connection to {self.endpoint}", 0.2)
        self._dealer: zmq.Socket[bytes] = self._own.open(zmq.DEALER, {**sockets.DEALER, **self._handshakes.options()})
        self._dealer.copy_threshold = sockets.COPY_BELOW_BYTES
        self._monitor: zmq.Socket[bytes] = self._own.monitor(self._dealer, CLIENT_EVENTS)
        self._dealer.connect(self.endpoint)
        self._subscriber: zmq.Socket[bytes] | None = None
        self._refused: str | None = None
        """The newest address of weights that the broker told, and that is none."""
        self._poller = zmq.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def pump(self, wait_s: float = 0.0) -> None:
        """Send what is due and receive what has arrived, waiting up to `wait_s` for a message.

        Raises `KeysRefusedError` when the broker does not admit this worker.
        """
        newest = self.weights.newest
        self._send()
        if self.weights.newest != newest:  # it lay in this machine's memory, and the caller is to have it at once
            wait_s = 0.0
        ready = self._poller.poll(int(min(wait_s, self.weights.patience_s) * 1000))
        for socket, _ in ready:
            if socket is self._monitor:
                self._handshakes.observe(self._monitor.recv_multipart())
                if self._handshakes.connected:
                    self.session.connected(time.monotonic(), again=self._was_connected)
                    self._was_connected = True
            elif not socket.closed:
                self._receive(socket)
        if ready:
            self._send()
        self._follow_broker()

    def join(self, timeout_s: float, stopping: threading.Event | None = None) -> None:
        """Wait for the broker's WELCOME. Log from time to time that the worker still waits.

        Raises `UnreachableError`, the error of the broker's refusal, or `StoppedError` once `stopping` is set.
        """
        waited_s = 0.0
        stopping = stopping or threading.Event()
        while waited_s < timeout_s and self.session.state is SessionState.JOINING:
            if waited_s:
                log.info("%s (waits for at most %.0f s)", self._handshakes.why_silent(waited_s), timeout_s)
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

    def fleet_has_stopped(self) -> bool:
        """Return whether the broker is gone and the fleet says that it has stopped, so that no batch is taken any more.

        A connected broker counts more than a file, which may be of an earlier run.
        """
        return not self._handshakes.connected and self.place.has_stopped(time.monotonic())

    def raise_refusal(self) -> None:
        """Raise the typed error if a refusal or a fencing ended the session."""
        if self.session.refusal is not None:
            raise refusal(*self.session.refusal)

    def close(self) -> None:
        """Close the sockets, waiting up to 200 ms for queued messages. Anything still unsent is lost."""
        self._own.close()

    def _follow_broker(self) -> None:
        """Connect to the broker's new address if it has one."""
        now = time.monotonic()
        if self.place.observe(self.session.state is not SessionState.JOINING, now) is not None:
            self._own.close(0.0)
            self._connect()
            self.session.not_sent(now)

    def _send(self) -> None:
        now = time.monotonic()
        self.session.tick(now)
        for pull in self.weights.requests(now) if self.session.state is SessionState.ACTIVE else ():
            self._try_send(pull.frames())
        for out in self.session.take_outbox():
            frames = out.frames if isinstance(out, Shipment) else out.frames()
            if frames is not None and not self._try_send(frames):
                self.session.not_sent(now)
                break

    def _try_send(self, frames: list[bytes | bytearray | memoryview]) -> bool:
        """Send one message; return False without a connection. Large frames are not copied, so they must not change."""
        try:
            sockets.send(self._dealer, frames)
        except zmq.Again:
            return False
        return True

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = sockets.receive(socket)
            except zmq.Again:  # the connection has ended in the midst of the message
                return
            if frames is None:
                return
            if frames[0] == MAPPING_TOPIC:
                del frames[0]
            try:
                self._dispatch(decode(frames))
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
        told = read(control, message.header)
        if isinstance(told, Reject) and told.fatal and self.place.disowns(told.code, told.detail):
            return
        self.session.receive(told, now)
        self.weights.hear_of(self.session.weights_known, now)
        welcome = self.session.welcome
        if welcome is told and self._subscriber is None and welcome.weights_endpoint != self._refused:
            self._subscribe(welcome)

    def _subscribe(self, welcome: WorkerWelcome) -> None:
        """Connect to the weights relay. Without an address of a relay, the worker pulls weights from the broker.

        On the broker's machine, ask for announcements of the versions that it can map.
        """
        endpoint = _reachable(welcome.weights_endpoint, self.endpoint)
        maps = welcome.maps_weights and self.weights.maps and is_own_address(self.endpoint)
        subscriber: zmq.Socket[bytes] = self._own.open(zmq.SUB, {**sockets.SUB, **self._handshakes.options()})
        subscriber.subscribe(MAPPING_TOPIC if maps else MAGIC)
        try:
            subscriber.connect(endpoint)
        except zmq.ZMQError as error:
            subscriber.close()
            self._refused = welcome.weights_endpoint
            self._warnings.warn(b"", "weights", f"the broker tells an address of weights that is none: {error}")
            return
        self._subscriber = subscriber
        self._poller.register(subscriber, zmq.POLLIN)


def _reachable(endpoint: str, beside: str) -> str:
    """Return `endpoint`, with its host replaced if its broker listens on all addresses.

    The host is then the one by which `beside` reached the broker.
    """
    host, _, port = endpoint.rpartition(":")
    return f"{beside.rpartition(':')[0]}:{port}" if host in ("tcp://0.0.0.0", "tcp://[::]") else endpoint
