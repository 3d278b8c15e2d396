"""A publisher's session with one broker: its lease, and the weights and rows that it has sent and the broker has."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from headrace.learner_stub import connection
from headrace.learner_stub.broker_link import BrokerLink
from headrace.learner_stub.row_queue import RowQueue
from headrace.schemas.basics.bounds import Version
from headrace.schemas.basics.headrace_version import headrace_version
from headrace.schemas.errors import DecodeError, RefusedWeightsError, refusal
from headrace.schemas.frames.wire import decode_header
from headrace.schemas.messages import (
    Fenced,
    LearnerHello,
    LearnerRows,
    LearnerWelcome,
    Message,
    Reject,
    Status,
    WeightsAck,
    WeightsRefusal,
    messages_to,
    read,
)
from headrace.schemas.messages.weights import encode_weights

_CONTROL = messages_to("publisher")
_RETRY_S = 1.0
_SILENCE_S = 3.0
"""Seconds of silence after which the broker may be a new one that knows neither this publisher nor its weights."""
_SLOWEST_BYTES_PER_S = 10e6
"""The slowest speed at which a broker may take a version before it is sent again. Sending too early only slows it."""

Arrays = dict[str, NDArray[Any]]
"""The tensors of one version by name, as they go to all brokers."""


class BrokerWeights:
    """The publisher's session with one broker. It keeps the newest version, and sends it again where it is lacking."""

    def __init__(self, link: BrokerLink, fleet_id: str) -> None:
        self.link = link
        self.epoch = 0
        self.seq = 0
        """Number of the newest version; before the first, the newest that an earlier publisher of this process sent."""
        self.acknowledged: Version = (0, 0)
        self.joined = False
        """True while the broker has welcomed this publisher, and answers."""
        self.refusal: tuple[str, str] | None = None
        """Code and sentence with which the broker ended this session."""
        self.rows = RowQueue()
        self._fleet_id = fleet_id
        self._arrays: Arrays | None = None
        self._digest = ""
        self._heard = 0.0
        self._next_send = 0.0
        self._refused: WeightsRefusal | None = None
        """A version that a worker could not load, until the error for it was taken."""
        self._told_of: Version = (0, 0)

    def publish(self, seq: int, arrays: Arrays, digest: str) -> None:
        """Make these the newest weights at this broker. `digest` is that of `arrays`."""
        self.seq, self._arrays, self._digest = seq, arrays, digest
        if self.epoch:  # else after the first WELCOME
            self._send_weights()

    def take_refused(self) -> RefusedWeightsError | None:
        """Return the error for a version that a worker refused, and forget it; None if there is none."""
        refused, self._refused = self._refused, None
        if refused is None:
            return None
        self._told_of = refused.version
        return RefusedWeightsError(refused.version, refused.slot, refused.detail)

    def pump(self) -> None:
        """Take answers; say HELLO again or send the newest version again when the broker lacks it."""
        while (frames := self.link.receive()) is not None:
            try:
                kind, header = decode_header(frames)
                if kind in _CONTROL:
                    self._receive(read(_CONTROL[kind], header))
            except DecodeError as error:
                if error.reason == "version_mismatch":
                    raise refusal(error.reason, f"broker at {self.link.endpoint}: {error.detail}") from error

    def tick(self, now: float) -> None:
        """Send what is due."""
        if self.joined and now - self._heard > _SILENCE_S:
            self.joined, self._next_send = False, now
        if self.link.follow(self.joined, now):
            self._next_send = 0.0
        if now >= self._next_send:
            if not self.joined:
                self._say_hello()
            elif self._arrays is not None and self.acknowledged < (self.epoch, self.seq):
                self._send_weights()
        if self.joined:
            self._send_rows(now)

    def close(self) -> None:
        """Close the connection. Rows not sent so far are sent once."""
        if self.joined:
            while self._send_rows(connection.now(), at_once=True):
                pass
        self.link.close()

    def _say_hello(self) -> None:
        self._next_send = connection.now() + _RETRY_S
        hello = LearnerHello(
            fleet_id=self._fleet_id,
            token=self.link.token,
            channel="publisher",
            epoch=self.epoch,
            headrace_version=headrace_version(),
        )
        if not self.link.send(hello.frames()):
            self._next_send = 0.0  # there is no connection yet: send again as soon as there is one

    def _send_weights(self) -> None:
        assert self._arrays is not None
        nbytes = sum(array.nbytes for array in self._arrays.values())
        self._next_send = connection.now() + _RETRY_S
        if self.link.send(encode_weights(self._fleet_id, (self.epoch, self.seq), self._arrays, self._digest)):
            self._next_send += nbytes / _SLOWEST_BYTES_PER_S

    def _send_rows(self, now: float, *, at_once: bool = False) -> bool:
        rows = self.rows.due(now, at_once=at_once)
        if not rows:
            return False
        sent = self.link.send(LearnerRows(epoch=self.epoch, rows=rows).frames())
        if not sent:
            self.rows.send_again()
        return sent

    def _receive(self, message: Message) -> None:
        self._heard = connection.now()
        if isinstance(message, LearnerWelcome):
            self._on_welcome(message)
        elif isinstance(message, Status):
            self._on_status(message)
        elif isinstance(message, WeightsAck):
            self.acknowledged = max(self.acknowledged, message.version)
        elif isinstance(message, Fenced):
            self.refusal = ("fenced", message.detail)
        elif isinstance(message, Reject):
            self._on_reject(message)

    def _on_welcome(self, welcome: LearnerWelcome) -> None:
        self.joined = True
        self.rows.send_again()
        self._fleet_id = welcome.fleet_id
        self.epoch = welcome.epoch
        connection.note_weight_shapes(self.link.token, welcome)
        if self._arrays is None and welcome.published[0] == self.epoch:
            # of an earlier publisher of this process; workers ignore a version that is not newer
            self.seq = welcome.published[1]
        self._lacks(welcome.published)

    def _on_status(self, status: Status) -> None:
        self.rows.stored(status.rows_stored)
        self.epoch = status.epoch
        if self.acknowledged == (self.epoch, self.seq):
            self._lacks(status.published)
        connection.note_weight_shapes(self.link.token, status)
        if status.refused is not None and status.refused.version > max(self._told_of, (self.epoch, 0)):
            self._refused = status.refused

    def _on_reject(self, reject: Reject) -> None:
        if reject.fatal:
            self.refusal = (reject.code, reject.detail)
        else:
            self.joined = False
            self._next_send = 0.0

    def _lacks(self, published: Version) -> None:
        """Send the newest version again if `published`, which the broker has, is older."""
        if self._arrays is not None and published < (self.epoch, self.seq):
            self.acknowledged = published
            self._next_send = min(self._next_send, connection.now() + 0.1)
