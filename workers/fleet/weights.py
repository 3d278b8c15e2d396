"""Collects a worker's weights: broadcast whole when small, pulled in pieces when large or missed.

A version is collected and checked before the sampler gets it. Versions that are not newer than the newest collected one
are ignored, so the version in use never goes back.
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
"""Seconds to wait for the broadcast of a version that the broker announced, before the worker pulls it."""


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """A whole, checked version."""

    version: Version
    digest: str
    arrays: Arrays


class WeightsReceiver:
    """Collects versions from messages, says which requests to send, and returns the newest version."""

    def __init__(self, fleet_id: str) -> None:
        self.fleet_id = fleet_id
        self.newest: Version = (0, 0)
        """The newest version collected."""
        self._ready: WeightsVersion | None = None
        self._wanted: Version = (0, 0)
        self._pulling: Version = (0, 0)
        self._blob = bytearray()
        self._ask_at: float | None = None

    def receive(self, message: WireMessage, now: float) -> None:
        """Handle a WEIGHTS or WEIGHTS_PART message. One that fails its checksums is dropped and logged."""
        try:
            if message.kind is MessageKind.WEIGHTS_PART:
                self._take_part(message, now)
            else:
                self._take_weights(message, now)
        except DecodeError as error:
            log.warning("weights refused: %s", error)

    def hear_of(self, version: Version, now: float) -> None:
        """Note that the broker has `version`. If no broadcast brings it within `BROADCAST_S`, it will be pulled."""
        self._want(version, now + BROADCAST_S)

    @property
    def pulling(self) -> bool:
        """Return whether part of a version has arrived. Asking early for the next piece completes it sooner."""
        return bool(self._blob)

    def _want(self, version: Version, ask_at: float) -> None:
        if version > max(self.newest, self._wanted):
            self._wanted = version
            self._ask_at = ask_at if self._ask_at is None else min(self._ask_at, ask_at)

    def take(self) -> WeightsVersion | None:
        """Return the newest version collected since the last call, or None."""
        ready, self._ready = self._ready, None
        return ready

    def request(self, now: float) -> WeightsPull | None:
        """Return the request to send to the broker now: the next piece of a version being pulled, or None."""
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
            self._ask_at = now + PULL_RETRY_S  # a retry, in case the collected bytes are not the published ones
            self._take_weights(decode(frames_of(blob, part.frame_sizes)), now)
