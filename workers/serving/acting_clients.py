"""Requests of clients that act by themselves: pieces of weights, and shipments of chunks, each taken once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.schemas.errors.serving import ServingError
from headrace.workers.serving.acting_channel import ActingChannel
from headrace.workers.serving.serving_messages import ChunkShipment, ClientPart, ClientPull
from headrace.workers.serving.session_records import Address, Reply, SessionRecord, ack_of

PIECE_BYTES = 1 << 20


class ActingClients:
    """Serves weights to these clients and takes their chunks. Only the thread of the dispatcher's loop calls it.

    `post` has the loop call what another thread gives it.
    """

    def __init__(self, channel: ActingChannel, post: Callable[[Callable[[], None]], None]) -> None:
        self._channel = channel
        self._post = post

    def part(self, pull: ClientPull) -> Reply:
        """Return the next bytes of the newest weights; none if the client has all, or no weights exist yet."""
        blob = self._channel.weights()
        offset = pull.offset if pull.version == blob.version else 0
        piece = blob.bytes[offset : offset + PIECE_BYTES]
        part = ClientPart(version=blob.version, offset=offset, frame_sizes=blob.frame_sizes)
        return Reply.of(part, arrays={"part": np.frombuffer(piece, np.uint8)})

    def ship(self, session: SessionRecord, shipment: ChunkShipment, address: Address, batch: Any) -> Reply | None:
        """Take a shipment. The answer follows when the chunks are in the worker's stream.

        A repeated shipment is taken once. Raises `ServingError` for any but the next one, and what
        `ActingChannel.accept` raises.
        """
        if shipment.number == session.shipped:
            return ack_of()
        if shipment.number != session.shipped + 1:
            raise ServingError(
                f"shipment {shipment.number} is not the next one, which is {session.shipped + 1}", "step_order"
            )
        if session.shipment_reply_to is None:
            self._channel.accept(session, shipment, batch, lambda: self._post(lambda: self._shipped(session)))
        session.shipment_reply_to = address
        return None

    def gone(self, session: SessionRecord) -> None:
        """End a session. The episodes that it has shipped in part are aborted."""
        self._channel.lost(session)

    def _shipped(self, session: SessionRecord) -> None:
        session.shipped += 1
        address, session.shipment_reply_to = session.shipment_reply_to, None
        if address is not None:
            address.send(ack_of())
