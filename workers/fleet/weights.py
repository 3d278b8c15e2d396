"""Where a worker's weights come from: whole by broadcast when small, pulled in pieces when large or missed.

A version is gathered aside, checked, and only then offered to the sampler; what is not newer than the newest gathered
is ignored, so the version in use never goes back.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from headrace.schemas.blobs import frames_of
from headrace.schemas.errors import DecodeError
from headrace.schemas.messages import Version, WeightsPart, WeightsPull, read
from headrace.schemas.weights import Arrays, read_weights
from headrace.schemas.wire import MessageKind, WireMessage, decode

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
PULL_RETRY_S = 2.0
BROADCAST_S = 0.2
"""How long a broadcast may be on its way before a version that heartbeats speak of is pulled instead."""


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """A whole, checked version."""

    version: Version
    digest: str
    arrays: Arrays


class WeightsReceiver:
    """Gathers versions; feed it messages, ask it for requests to send, and take what is newest."""

    def __init__(self, fleet_id: str) -> None:
        self.fleet_id = fleet_id
        self.newest: Version = (0, 0)
        """The newest version gathered."""
        self._ready: WeightsVersion | None = None
        self._wanted: Version = (0, 0)
        self._pulling: Version = (0, 0)
        self._blob = bytearray()
        self._ask_at: float | None = None

    def receive(self, message: WireMessage, now: float) -> None:
        """Take a WEIGHTS or WEIGHTS_PART message. One that is not what its checksums say is dropped and logged."""
        try:
            if message.kind is MessageKind.WEIGHTS_PART:
                self._take_part(message, now)
            else:
                self._take_weights(message, now)
        except DecodeError as error:
            log.warning("weights refused: %s", error)

    def hear_of(self, version: Version, now: float) -> None:
        """The broker has `version`: if broadcasts do not bring it soon, it will be pulled."""
        self._want(version, now + BROADCAST_S)

    @property
    def pulling(self) -> bool:
        """A version has come in part; the sooner the next piece is asked for, the sooner it is whole."""
        return bool(self._blob)

    def _want(self, version: Version, ask_at: float) -> None:
        if version > max(self.newest, self._wanted):
            self._wanted = version
            self._ask_at = ask_at if self._ask_at is None else min(self._ask_at, ask_at)

    def take(self) -> WeightsVersion | None:
        """The newest version gathered since the last call."""
        ready, self._ready = self._ready, None
        return ready

    def request(self, now: float) -> WeightsPull | None:
        """What to ask the broker for now: the next piece of a version being pulled."""
        if self._wanted <= self.newest or self._ask_at is None or now < self._ask_at:
            return None
        self._ask_at = now + PULL_RETRY_S
        return WeightsPull(version=self._pulling, offset=len(self._blob), length=PIECE_BYTES)

    def _take_weights(self, message: WireMessage, now: float) -> None:
        header, arrays = read_weights(message)
        if header.version <= self.newest or header.fleet_id != self.fleet_id:
            return
        if not arrays:
            self._want(header.version, now)
            return
        self.newest = header.version
        self._ask_at = None if self._wanted <= self.newest else now
        if self._pulling <= self.newest:
            self._pulling, self._blob = (0, 0), bytearray()
        self._ready = WeightsVersion(header.version, header.digest, arrays)

    def _take_part(self, message: WireMessage, now: float) -> None:
        part = read(WeightsPart, message.header)
        piece = message.arrays.get("part")
        if piece is None or part.version <= self.newest:
            return
        if part.version != self._pulling:
            self._pulling, self._blob = part.version, bytearray()
        if part.offset != len(self._blob):
            return
        self._blob += piece.tobytes()
        self._ask_at = now
        if len(self._blob) >= sum(part.frame_sizes):
            blob, self._blob, self._pulling = bytes(self._blob), bytearray(), (0, 0)
            self._ask_at = now + PULL_RETRY_S  # in case that what came is not what was published
            self._take_weights(decode(frames_of(blob, part.frame_sizes)), now)
