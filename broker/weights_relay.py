"""The relay of the newest weights. It keeps them for late subscribers: small ones whole, large ones by announcement."""

from __future__ import annotations

import numpy as np

from headrace.schemas.messages import Version, WeightsHeader, WeightsPart, WeightsPull
from headrace.schemas.wire import Buffer, MessageKind, encode

INLINE_BYTES = 1 << 20


class WeightsRelay:
    """Holds one version. It ignores an equal or older version, so it never goes back."""

    def __init__(self) -> None:
        self.version: Version = (0, 0)
        self._frames: list[Buffer] = []
        self._announcement: list[Buffer] = []
        self._blob = memoryview(b"")
        self._sizes: list[int] = []

    def offer(self, header: WeightsHeader, frames: list[Buffer]) -> bool:
        """Keep this version if it is newer. Return whether it was."""
        if header.version <= self.version:
            return False
        self.version = header.version
        self._frames = [bytes(frame) for frame in frames]
        self._sizes = [len(frame) for frame in frames]
        self._blob = memoryview(b"".join(self._frames))
        large = len(self._blob) > INLINE_BYTES
        self._announcement = encode(MessageKind.WEIGHTS, header.model_dump()) if large else self._frames
        return True

    def broadcast(self) -> list[Buffer]:
        """Return the frames for every subscriber, which each new one gets again; empty before the first version."""
        return self._announcement

    def frames(self) -> list[Buffer]:
        """Return the whole WEIGHTS message of the version held."""
        return self._frames

    def part(self, pull: WeightsPull) -> list[Buffer]:
        """Return the piece asked for, of the newest version; its first piece when another version was asked for."""
        offset = pull.offset if pull.version == self.version else 0
        piece = np.frombuffer(self._blob[offset : offset + pull.length], np.uint8)
        header = WeightsPart(version=self.version, offset=offset, frame_sizes=self._sizes)
        return encode(MessageKind.WEIGHTS_PART, header.model_dump(), {"part": piece})
