"""The relay of the newest weights. It keeps them for late subscribers: small ones whole, large ones by announcement."""

from __future__ import annotations

import numpy as np

from headrace.schemas.basics.bounds import Version
from headrace.schemas.frames.wire import Buffer, MessageKind, encode
from headrace.schemas.messages import WeightsHeader, WeightsPart, WeightsPull
from headrace.schemas.messages.weights import INLINE_BYTES, MAPPED_BYTES
from headrace.schemas.messages.weights_messages import PIECE_BYTES


class WeightsRelay:
    """Holds one version. It ignores an equal or older version, so it never goes back."""

    def __init__(self) -> None:
        self.version: Version = (0, 0)
        self.frames: list[Buffer] = []
        """The whole WEIGHTS message of the version held."""
        self.broadcast: list[Buffer] = []
        """The frames for every subscriber, which each new one gets again; empty before the first version."""
        self.to_mappers: list[Buffer] = []
        """The same for subscribers that map versions from this machine's memory."""
        self._sizes: list[int] = []
        self._pieces: dict[int, list[Buffer]] = {}
        """The encoded pieces of `PIECE_BYTES` by offset, as far as they were asked for."""

    def offer(self, header: WeightsHeader, frames: list[Buffer]) -> bool:
        """Keep this version if it is newer. Return whether it was. The frames are not copied."""
        if header.version <= self.version:
            return False
        self.version = header.version
        self.frames, self._sizes = frames, [len(frame) for frame in frames]
        self._pieces = {}
        self.broadcast = self.to_mappers = _announcement(header) if self.is_large else frames
        return True

    def announce(self, header: WeightsHeader) -> None:
        """Announce the version held to subscribers that map versions: it lies in this machine's memory."""
        self.to_mappers = _announcement(header)

    @property
    def is_large(self) -> bool:
        """Return whether the version is announced to all workers, which map or fetch it."""
        return sum(self._sizes) > INLINE_BYTES

    @property
    def is_to_be_mapped(self) -> bool:
        """Return whether the workers of this machine should map the version."""
        return sum(self._sizes) > MAPPED_BYTES

    def part(self, pull: WeightsPull) -> list[Buffer]:
        """Return the piece around the offset asked for, of the newest version; its first piece for another version.

        All peers get the same frames, so what waits for a peer that does not read takes no further memory.
        """
        offset = pull.offset - pull.offset % PIECE_BYTES if pull.version == self.version else 0
        if offset >= sum(self._sizes):
            return self._encode_piece(offset)
        if offset not in self._pieces:
            self._pieces[offset] = self._encode_piece(offset)
        return self._pieces[offset]

    def _encode_piece(self, offset: int) -> list[Buffer]:
        header = WeightsPart(version=self.version, offset=offset, frame_sizes=self._sizes)
        piece = np.frombuffer(self._cut(offset, PIECE_BYTES), np.uint8)
        return encode(MessageKind.WEIGHTS_PART, header.model_dump(), {"part": piece})

    def _cut(self, offset: int, length: int) -> Buffer:
        """Return bytes of the frames one after another: a view where one frame has them all."""
        parts, start = list[memoryview](), 0
        for frame, size in zip(self.frames, self._sizes, strict=True):
            part = memoryview(frame)[max(0, offset - start) : max(0, offset + length - start)]
            if part:
                parts.append(part)
            start += size
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _announcement(header: WeightsHeader) -> list[Buffer]:
    return encode(MessageKind.WEIGHTS, header.model_dump())
