"""The relay of the newest weights. It keeps them for late subscribers: small ones whole, large ones by announcement."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from headrace.schemas.basics.bounds import Version
from headrace.schemas.frames.wire import Buffer, MessageKind, decode, encode
from headrace.schemas.messages import WeightsHeader, WeightsPart, WeightsPull
from headrace.schemas.messages.weights import INLINE_BYTES, Arrays, encode_weights, has_digest, merge_received
from headrace.schemas.messages.weights_messages import PIECE_BYTES

PULLED_S = 10.0
"""Seconds for which a version counts as being pulled once a piece of it was asked for."""

_PART = 16
"""How many times larger than a part the whole is at least. Workers get the part each, and the whole once a machine."""


@dataclass(slots=True)
class _Held:
    """One version, and the pieces of it that were asked for."""

    version: Version = (0, 0)
    frames: list[Buffer] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    pieces: dict[int, list[Buffer]] = field(default_factory=dict)
    """The encoded pieces of `PIECE_BYTES` by offset, as far as they were asked for."""
    pulled_until: float = 0.0
    """The time until which it counts as being pulled. A pull ends with the request for the last piece."""

    def piece(self, offset: int) -> list[Buffer]:
        """Return the piece at `offset`. All peers get the same frames."""
        if offset >= sum(self.sizes):
            return self._encode(offset)
        if offset not in self.pieces:
            self.pieces[offset] = self._encode(offset)
        return self.pieces[offset]

    def _encode(self, offset: int) -> list[Buffer]:
        header = WeightsPart(version=self.version, offset=offset, frame_sizes=self.sizes)
        piece = np.frombuffer(self._cut(offset, PIECE_BYTES), np.uint8)
        return encode(MessageKind.WEIGHTS_PART, header.model_dump(), {"part": piece})

    def _cut(self, offset: int, length: int) -> Buffer:
        """Return bytes of the frames one after another: a view where one frame has them all."""
        parts, start = list[memoryview](), 0
        for frame, size in zip(self.frames, self.sizes, strict=True):
            part = memoryview(frame)[max(0, offset - start) : max(0, offset + length - start)]
            if part:
                parts.append(part)
            start += size
        return parts[0] if len(parts) == 1 else b"".join(parts)


class WeightsRelay:
    """Holds the newest version. It ignores an equal or older version, so it never goes back.

    It also holds one older version as long as that is being pulled. A pull that takes longer than the learner takes to
    publish would never end otherwise.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.broadcast: list[Buffer] = []
        """The frames for every subscriber, which each new one gets again; empty before the first version."""
        self.to_mappers: list[Buffer] = []
        """The same for subscribers that map versions from this machine's memory."""
        self._clock = clock
        self._newest = _Held()
        self._pulled: _Held | None = None
        """The older version."""

    @property
    def version(self) -> Version:
        """Return the newest version."""
        return self._newest.version

    @property
    def frames(self) -> list[Buffer]:
        """Return the whole WEIGHTS message of the newest version."""
        return self._newest.frames

    def offer(self, header: WeightsHeader, frames: list[Buffer]) -> bool:
        """Keep this version if it is newer. Return whether it was. The frames are not copied."""
        if header.version <= self.version:
            return False
        before, now = self._newest, self._clock()
        if self._pulled is None or now > self._pulled.pulled_until:
            self._pulled = before if now < before.pulled_until else None
        self._newest = _Held(header.version, frames, [len(frame) for frame in frames])
        self.broadcast = self.to_mappers = _announcement(header) if self.is_large else frames
        return True

    def merge(self, header: WeightsHeader, part: Arrays) -> list[Buffer]:
        """Return the whole message of a version of which a part came; no frames if its base is not the newest here."""
        if not self.frames:
            return []
        held = decode(self.frames)
        arrays = merge_received(header, held.header["digest"], held.arrays, part)
        if not arrays or not has_digest(arrays, header.digest):
            return []
        return encode_weights(header.fleet_id, header.version, arrays, header.digest)

    def announce(self, header: WeightsHeader) -> None:
        """Announce the version held to subscribers that map versions: it lies in this machine's memory."""
        self.to_mappers = _announcement(header)

    @property
    def is_large(self) -> bool:
        """Return whether the version is announced to all workers, which map or fetch it."""
        return sum(self._newest.sizes) > INLINE_BYTES

    def is_small_part(self, frames: list[Buffer]) -> bool:
        """Return whether to broadcast this part of the version, and not have each machine pull all of it."""
        return self.is_large and sum(map(len, frames)) <= max(INLINE_BYTES, sum(self._newest.sizes) // _PART)

    def part(self, pull: WeightsPull) -> list[Buffer]:
        """Return the piece around the offset asked for; the first one of the newest version for a version not held.

        All peers get the same frames, so what waits for a peer that does not read takes no further memory.
        """
        held, offset = self._newest, 0
        if pull.version == held.version:
            offset = pull.offset
        elif self._pulled is not None and pull.version == self._pulled.version:
            held, offset = self._pulled, pull.offset
        is_last = offset + PIECE_BYTES >= sum(held.sizes)
        held.pulled_until = 0.0 if is_last else self._clock() + PULLED_S
        return held.piece(offset - offset % PIECE_BYTES)


def _announcement(header: WeightsHeader) -> list[Buffer]:
    return encode(MessageKind.WEIGHTS, header.model_dump())
