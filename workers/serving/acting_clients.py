"""What sessions promise to clients that act by themselves: weights in pieces, and each shipment taken once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.schemas.serving_errors import StepOrderError
from headrace.schemas.serving_messages import ChunkShipment, ClientAck, ClientPart, ClientPull
from headrace.workers.serving.exchange import Exchange
from headrace.workers.serving.records import Address, Reply, SessionRecord

PIECE_BYTES = 1 << 20

Tell = Callable[[], tuple[Address, Reply] | None]


class ActingClients:
    """For whoever has the desk's turn. `post` has what another thread tells said in a turn."""

    def __init__(self, exchange: Exchange, post: Callable[[Tell], None]) -> None:
        self._exchange = exchange
        self._post = post

    def part(self, pull: ClientPull) -> Reply:
        """The next bytes of the newest weights; none where the client has them all, or there are none yet."""
        blob = self._exchange.weights()
        offset = pull.offset if pull.version == blob.version else 0
        piece = blob.bytes[offset : offset + PIECE_BYTES]
        part = ClientPart(request=pull.request, version=blob.version, offset=offset, frame_sizes=blob.frame_sizes)
        return Reply.of(part, arrays={"part": np.frombuffer(piece, np.uint8)})

    def ship(self, session: SessionRecord, shipment: ChunkShipment, address: Address, batch: Any) -> Reply | None:
        """Answered when the worker has the chunks in its stream. What comes again is taken once.

        Raises `StepOrderError` for another than the next shipment, and what `Exchange.accept` raises.
        """
        if shipment.number == session.shipped:
            return Reply.of(ClientAck(request=shipment.request))
        if shipment.number != session.shipped + 1:
            raise StepOrderError(f"shipment {shipment.number} is not the next one, which is {session.shipped + 1}")
        if session.ships_at is None:
            self._exchange.accept(session, shipment, batch, lambda: self._post(lambda: self._shipped(session)))
        session.ships_at, session.ships_as = address, shipment.request
        return None

    def gone(self, session: SessionRecord) -> None:
        """Nothing more comes of the session: episodes of which it has shipped a part will never finish."""
        self._exchange.lost(session)

    def _shipped(self, session: SessionRecord) -> tuple[Address, Reply] | None:
        session.shipped += 1
        address, session.ships_at = session.ships_at, None
        return (address, Reply.of(ClientAck(request=session.ships_as))) if address is not None else None
