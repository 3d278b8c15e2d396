"""The relay of the newest weights. It keeps them for late subscribers: small ones whole, large ones by announcement."""

from __future__ import annotations

import numpy as np

from headrace.schemas.basics.bounds import Version
from headrace.schemas.frames.wire import Buffer, MessageKind, encode, frames_of
from headrace.schemas.messages import WeightsHeader, WeightsPart, WeightsPull
from headrace.schemas.messages.weights_messages import PIECE_BYTES

INLINE_BYTES = 1 << 18
"""Larger versions are announced, and each worker fetches them."""


class WeightsRelay:
    """Holds one version. It ignores an equal or older version, so it never goes back."""

    def __init__(self) -> None:
        self.version: Version = (0, 0)
        self.frames: list[Buffer] = []
        """The whole WEIGHTS message of the version held."""
        self.broadcast: list[Buffer] = []
        """The frames for every subscriber, which each new one gets again; empty before the first version."""
        self._sizes: list[int] = []
        self._blob: memoryview | None = None
        """The frames one after another, once a piece was asked for."""
        self._pieces: dict[int, list[Buffer]] = {}
        """The encoded pieces of `PIECE_BYTES` by offset, as far as they were asked for."""

    def offer(self, header: WeightsHeader, frames: list[Buffer]) -> bool:
        """Keep this version if it is newer. Return whether it was. The frames are not copied."""
        if header.version <= self.version:
            return False
        self.version = header.version
        self.frames, self._sizes = frames, [len(frame) for frame in frames]
        self._blob, self._pieces = None, {}
        self.broadcast = encode(MessageKind.WEIGHTS, header.model_dump()) if self.is_large else frames
        return True

    @property
    def is_large(self) -> bool:
        """Return whether the version is announced, and each worker fetches it."""
        return sum(self._sizes) > INLINE_BYTES

    def part(self, pull: WeightsPull) -> list[Buffer]:
        """Return the piece asked for, of the newest version; its first piece when another version was asked for."""
        offset = pull.offset if pull.version == self.version else 0
        if pull.length != PIECE_BYTES or offset % PIECE_BYTES or offset >= sum(self._sizes):
            return self._encode_piece(offset, pull.length)
        if offset not in self._pieces:
            self._pieces[offset] = self._encode_piece(offset, pull.length)
        return self._pieces[offset]

    def _encode_piece(self, offset: int, length: int) -> list[Buffer]:
        piece = np.frombuffer(self._joined()[offset : offset + length], np.uint8)
        header = WeightsPart(version=self.version, offset=offset, frame_sizes=self._sizes)
        return encode(MessageKind.WEIGHTS_PART, header.model_dump(), {"part": piece})

    def _joined(self) -> memoryview:
        """Return the frames as one run of bytes. They are copied once a version."""
        if self._blob is None:
            self._blob = memoryview(b"".join(self.frames))
            self.frames = frames_of(self._blob, self._sizes)  # the received ones are not kept beside it
        return self._blob
