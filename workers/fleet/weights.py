"""Collects a worker's weights: from broadcasts when small; when large, mapped from this machine's shared memory.

Weights that are not in shared memory, and missed broadcasts, are pulled in pieces.

A version is collected and checked before the sampler gets it. Versions that are not newer than the newest collected one
are ignored, so the version in use never goes back.
"""

from __future__ import annotations

import logging

import numpy as np

from headrace.schemas.basics.bounds import Version
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import Buffer, MessageKind, WireMessage, decode, frames_of
from headrace.schemas.messages import WeightsHeader, WeightsPart, WeightsPull, read
from headrace.schemas.messages.shared_weights import SharedWeights
from headrace.schemas.messages.weights import MOST_WEIGHTS_BYTES, Arrays, WeightsVersion, read_weights
from headrace.schemas.messages.weights_messages import PIECE_BYTES

log = logging.getLogger(__name__)

PIECES_IN_FLIGHT = 8
"""Most pieces requested and not received. They fill a fast link, and bound the queue at the broker."""
PULL_RETRY_S = 2.0
OTHERS_PULL_S = 10.0
"""Seconds to wait for a version that another worker of this machine pulls, before the worker pulls it too."""
BROADCAST_S = 0.2
"""Seconds to wait for the broadcast of a version that the broker announced, before the worker pulls it."""


class WeightsReceiver:
    """Collects versions from messages, says which requests to send, and returns the newest version."""

    def __init__(self, fleet_id: str, shared: SharedWeights | None = None) -> None:
        self.fleet_id = fleet_id
        self._shared = shared
        self.newest: Version = (0, 0)
        """The newest version collected."""
        self._ready: WeightsVersion | None = None
        self._wanted: Version = (0, 0)
        self._pulling: Version = (0, 0)
        self._blob = np.empty(0, np.uint8)
        """Memory for the whole version, from its first piece on: `_have` bytes have come, `_asked` are asked for."""
        self._have = self._asked = 0
        self._ask_at: float | None = None
        self._sought: WeightsHeader | None = None
        """An announced version that another worker of this machine pulls."""

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
        """Return whether part of a version has arrived. Asking early for the next pieces completes it sooner."""
        return self._blob.size > 0

    def take(self) -> WeightsVersion | None:
        """Return the newest version collected since the last call, or None."""
        ready, self._ready = self._ready, None
        return ready

    def requests(self, now: float) -> list[WeightsPull]:
        """Return the requests to send to the broker now: the next pieces of a version being pulled.

        The first piece tells how many there are. Pieces that have not come in time are asked for again.
        """
        if self._sought is not None:
            self._seek(self._sought, now)
        if self._wanted <= self.newest or self._ask_at is None:
            return []
        if now >= self._ask_at:
            self._asked, self._ask_at = self._have, now + PULL_RETRY_S
        elif not self.pulling:
            return []
        end = min(self._have + PIECES_IN_FLIGHT * PIECE_BYTES, self._blob.size or 1)
        offsets = range(self._asked, end, PIECE_BYTES)
        self._asked += len(offsets) * PIECE_BYTES
        return [WeightsPull(version=self._pulling, offset=offset, length=PIECE_BYTES) for offset in offsets]

    def _want(self, version: Version, ask_at: float) -> None:
        if version > max(self.newest, self._wanted):
            self._wanted = version
            if not self.pulling or self._ask_at is None:  # otherwise the requested pieces bring the newer version
                self._ask_at = ask_at if self._ask_at is None else min(self._ask_at, ask_at)

    def _expect(self, version: Version, ask_at: float) -> None:
        """Pull an announced version at `ask_at`, overriding a time set by an earlier heartbeat."""
        self._want(version, ask_at)
        if version == self._wanted and not self._asked:
            self._ask_at = ask_at

    def _take_weights(self, message: WireMessage, now: float, pulled: list[Buffer] | None = None) -> None:
        """Take a version, or look for one that is announced. `pulled`: its frames, for this machine's other workers."""
        header, arrays = read_weights(message)
        if header.version <= self.newest or header.fleet_id != self.fleet_id:
            return
        if not arrays:
            self._seek(header, now)
            return
        if pulled is not None and self._shared is not None and self._shared.claimed:
            self._shared.write(header, pulled)
        self._take_arrays(header, arrays, now)

    def _take_arrays(self, header: WeightsHeader, arrays: Arrays, now: float) -> None:
        self.newest = header.version
        self._ask_at = None if self._wanted <= self.newest else now
        if self._pulling <= self.newest:
            self._begin((0, 0), 0)
        self._ready = WeightsVersion(header.version, header.digest, arrays)
        self._sought = None
        if self._shared is not None:
            self._shared.release()

    def _seek(self, header: WeightsHeader, now: float) -> None:
        """Take an announced version from this machine's memory, or pull it, unless another worker pulls it for all.

        If the other worker ends without writing the version, this worker pulls it.
        """
        shared = self._shared
        arrays = shared.read(header.version, header.digest) if shared is not None else None
        may_pull = shared is None or (arrays is None and shared.claim())
        if may_pull and shared is not None:
            arrays = shared.read(header.version, header.digest)  # another may have written it before it ended
        if arrays is not None:
            self._take_arrays(header, arrays, now)
        elif may_pull:
            self._sought = None
            self._expect(header.version, now)
        elif self._sought != header:
            self._sought = header
            self._expect(header.version, now + OTHERS_PULL_S)

    def _take_part(self, message: WireMessage, now: float) -> None:
        part = read(WeightsPart, message.header)
        piece = message.arrays.get("part")
        if piece is None or part.version <= self.newest:
            return
        size = sum(part.frame_sizes)
        if part.version != self._pulling or size != self._blob.size:
            self._begin(part.version, size)
        if part.offset != self._have or piece.nbytes > size - self._have:
            return
        self._blob[self._have : self._have + piece.nbytes] = piece.reshape(-1).view(np.uint8)
        self._have += piece.nbytes
        self._asked = max(self._asked, self._have)
        self._ask_at = now + PULL_RETRY_S  # a retry, also in case the collected bytes are not the published ones
        if self._have == size:
            blob = self._blob
            self._begin((0, 0), 0)
            frames = frames_of(blob.data, part.frame_sizes)
            self._take_weights(decode(frames), now, frames)

    def _begin(self, version: Version, size: int) -> None:
        """Make room for a version of `size` bytes. The memory is taken as pieces come, not at once."""
        if size > MOST_WEIGHTS_BYTES:
            raise DecodeError(
                "payload_too_large", f"weights {version} of {size} bytes; {MOST_WEIGHTS_BYTES} are allowed"
            )
        self._pulling, self._blob = version, np.empty(size, np.uint8)
        self._have = self._asked = 0
