"""A publisher's session with one broker: its lease, and the weights and rows that it has sent and the broker has."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from contextlib import suppress

from headrace.learner_stub.link import connection
from headrace.learner_stub.link.broker_link import BrokerLink, await_message
from headrace.learner_stub.publishing.row_queue import RowQueue
from headrace.schemas.basics.bounds import Version
from headrace.schemas.basics.headrace_version import headrace_version, program_name
from headrace.schemas.errors import EncodeError, HeadraceError, RefusedWeightsError
from headrace.schemas.frames.wire import Buffer, MessageKind, encode
from headrace.schemas.messages import (
    Fenced,
    LearnerHello,
    LearnerRows,
    LearnerWelcome,
    Message,
    Reject,
    Status,
    WeightsAck,
    WeightsHeader,
    WeightsRefusal,
    messages_to,
)
from headrace.schemas.messages.shared_weights import SharedWeights
from headrace.schemas.messages.weights import MAPPED_BYTES, Arrays, encode_weights, nbytes_of
from headrace.schemas.peers.advertised import is_own_address

_CONTROL = messages_to("publisher")
_RETRY_S = 1.0
_SILENCE_S = 3.0
"""Seconds of silence after which the broker may be a new one that knows neither this publisher nor its weights."""
_SLOWEST_BYTES_PER_S = 10e6
"""The slowest speed at which a broker may take a version before it is sent again. Sending too early only slows it."""

_PACED_BYTES = 16 << 20
"""A newer version waits until a message of more bytes has arrived, so that the memory of two is taken at most."""

_CLOSING_S = 0.5
"""Seconds to wait at the end for a broker that has not mapped the newest version so far."""


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
        self._shared: SharedWeights | None = None
        """The memory from which this broker maps versions; None where it gets them whole."""
        self._written: Version = (0, 0)
        """The newest version that was to be written there, and whether it was."""
        self._is_written = False
        self._is_part = False
        """True while the broker may ask for all of the newest version, of which it was sent a part."""
        self._sent: Version = (0, 0)
        """The newest version that was sent, and whether its message is a large one."""
        self._is_large = False
        self._heard = 0.0
        self._next_send = 0.0
        self._refused: WeightsRefusal | None = None
        """A version that a worker could not load, until the error for it was taken."""
        self._told_of: Version = (0, 0)

    def share(self, seq: int, arrays: Arrays) -> tuple[Arrays, str] | None:
        """Write a version to memory that this broker maps. Return its arrays as views of that copy, and their digest.

        None where this broker gets versions over its socket: it is on another machine, or memory has no room, or the
        version is small.
        """
        memory = self._memory_for(arrays)
        if memory is None:
            return None
        before, self._written = self._written, (self.epoch, seq)
        if self.acknowledged < before:  # else the broker has removed the versions before it
            memory.remove_older(before)
        written = memory.write_arrays(self._written, arrays)
        self._is_written = written is not None
        return written

    def publish(self, seq: int, arrays: Arrays, digest: str, changed: Collection[str]) -> None:
        """Make these the newest weights at this broker. `digest` is that of `arrays`.

        Only `changed` are sent if they are fewer. A broker that lacks the version before asks for all.

        Raises `EncodeError` for arrays that may not go on the wire. The newest weights are the ones before then.
        """
        before = self.seq, self._arrays, self._digest
        self.seq, self._arrays, self._digest = seq, arrays, digest
        try:
            if self.epoch and not self._is_sending:  # else after the first WELCOME, or once the one before is there
                is_part = before[2] != "" and len(changed) < len(arrays)
                self._send_weights({name: arrays[name] for name in changed} if is_part else None, before[2])
        except EncodeError:
            self.seq, self._arrays, self._digest = before
            raise

    def take_refused(self) -> RefusedWeightsError | None:
        """Return the error for a version that a worker refused, and forget it; None if there is none."""
        refused, self._refused = self._refused, None
        if refused is None:
            return None
        self._told_of = refused.version
        return RefusedWeightsError(refused.version, refused.slot, refused.detail)

    def pump(self) -> None:
        """Take answers; say HELLO again or send the newest version again when the broker lacks it."""
        for message in self.link.messages(_CONTROL):
            self._receive(message)

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
        """Close the connection. Rows not sent so far are sent once.

        Wait until the broker has mapped the newest version, at most `_CLOSING_S`.
        """
        if not self.link.usable:
            return
        if self.joined:
            while self._send_rows(connection.now(), at_once=True):
                pass
            if self._arrays is not None and self._sent < (self.epoch, self.seq):
                self._send_weights()
            with suppress(HeadraceError):  # the publisher ends anyway
                self._await_mapped()
        self.link.close()
        if self._shared is not None:
            self._shared.close(remove=not self._waits_for_broker())

    def _say_hello(self) -> None:
        self._next_send = connection.now() + _RETRY_S
        hello = LearnerHello(
            fleet_id=self._fleet_id,
            token=self.link.token,
            channel="publisher",
            epoch=self.epoch,
            host=platform.node(),
            pid=os.getpid(),
            program=program_name(),
            headrace_version=headrace_version(),
        )
        if not self.link.send(hello.frames()):
            self._next_send = 0.0  # there is no connection yet: send again as soon as there is one

    def _send_weights(self, part: Arrays | None = None, base: str = "") -> None:
        assert self._arrays is not None
        self._next_send = connection.now() + _RETRY_S
        self._is_part = part is not None
        frames = self._message(self._arrays, part, base)
        if self.link.send(frames):
            self._sent, self._is_large = (self.epoch, self.seq), sum(map(len, frames)) > _PACED_BYTES
            self._next_send += nbytes_of(self._arrays) / _SLOWEST_BYTES_PER_S

    @property
    def _is_sending(self) -> bool:
        """Return whether a large message is probably on its way."""
        waits = self._is_large and self.joined and self.acknowledged < self._sent
        return waits and connection.now() < self._next_send

    def _message(self, arrays: Arrays, part: Arrays | None, base: str) -> list[Buffer]:
        """Return the newest version's announcement if it lies in memory that the broker maps, else the part or all."""
        header = WeightsHeader(fleet_id=self._fleet_id, version=(self.epoch, self.seq), digest=self._digest)
        memory = self._memory_for(arrays)
        if memory is not None and self._written != header.version:  # written for another broker, or an earlier lease
            frames = encode_weights(self._fleet_id, header.version, arrays, self._digest)
            self._written, self._is_written = header.version, memory.write(header, frames)
        if memory is not None and self._is_written:
            return encode(MessageKind.WEIGHTS, header.model_dump())
        if part is not None:
            return encode_weights(self._fleet_id, header.version, part, self._digest, base)
        return encode_weights(self._fleet_id, header.version, arrays, self._digest)

    def _memory_for(self, arrays: Arrays) -> SharedWeights | None:
        """Return the memory from which the broker maps such a version; None where it gets it whole."""
        return self._shared if nbytes_of(arrays) > MAPPED_BYTES else None

    def _share_memory(self, *, shared: bool) -> None:
        """Use memory that the broker maps, or stop using it."""
        if self._shared is not None and not shared:
            self._shared.close()
            self._shared, self._is_written = None, False
        elif self._shared is None and shared:
            self._shared, self._written = SharedWeights(self._fleet_id), (0, 0)

    def _await_mapped(self) -> None:
        """Wait until the broker has mapped the announced version, or asked for all of it and got it."""
        deadline = connection.now() + _CLOSING_S
        while self._waits_for_broker():
            await_message([self.link], _CLOSING_S / 10)
            self.pump()
            self.tick(connection.now())
            if connection.now() > deadline:
                return

    def _waits_for_broker(self) -> bool:
        """Return whether the broker may still map the newest version, or ask for it."""
        lacks = (self._is_written and self.acknowledged < self._written) or (
            self._is_part and self.acknowledged < (self.epoch, self.seq)
        )
        return lacks and self.refusal is None

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
            self._on_ack(message)
        elif isinstance(message, Fenced):
            self.refusal = ("fenced", message.detail)
        elif isinstance(message, Reject) and not self.link.disowns(message):
            self._on_reject(message)

    def _on_welcome(self, welcome: LearnerWelcome) -> None:
        self.joined = True
        self.rows.send_again()
        self._fleet_id = welcome.fleet_id
        self.epoch = welcome.epoch
        self._share_memory(shared=welcome.maps_weights and is_own_address(self.link.endpoint))
        connection.shared(self.link.token).learn_weights(welcome)
        if self._arrays is None and welcome.published[0] == self.epoch:
            # of an earlier publisher of this process; workers ignore a version that is not newer
            self.seq = welcome.published[1]
        self._lacks(welcome.published)

    def _on_ack(self, ack: WeightsAck) -> None:
        """Note what the broker holds. If it does not find the newest version in memory, send that whole."""
        if ack.is_held:
            self.acknowledged = max(self.acknowledged, ack.version)
            if self._sent <= self.acknowledged < (self.epoch, self.seq):
                self._next_send = 0.0
        elif ack.version == self._written:  # an older one may have been removed meanwhile
            self._share_memory(shared=False)
            self._next_send = 0.0
        elif ack.version == (self.epoch, self.seq):
            self._next_send = 0.0

    def _on_status(self, status: Status) -> None:
        self.rows.stored(status.rows_stored)
        self.epoch = status.epoch
        if self.acknowledged == (self.epoch, self.seq):
            self._lacks(status.published)
        connection.shared(self.link.token).learn_weights(status)
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
