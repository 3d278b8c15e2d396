"""A version of the weights while its pieces come. It is checked meanwhile, so little is left to do after the last."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import xxhash

from headrace.schemas.basics.bounds import Version
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import (
    Buffer,
    MessageKind,
    decode,
    decode_header,
    frames_of,
    is_compressed,
    views_of,
)
from headrace.schemas.messages import WeightsHeader, read
from headrace.schemas.messages.weights import Arrays, check_digest, digested, new_digest, read_weights


class Room(Protocol):
    """The place for the frames of a version: a file that other processes will map, or memory of this process."""

    frames: list[Buffer]

    def put(self, frame: int, offset: int, part: Buffer) -> None:
        """Write bytes of one frame. Raises `OSError` where there is no room."""
        ...

    def close(self) -> None:
        """End the writing. The frames stay."""
        ...


class OwnMemory:
    """Memory of this process. It is taken as pieces come, not at once."""

    def __init__(self, sizes: list[int]) -> None:
        self.frames = frames_of(np.empty(sum(sizes), np.uint8).data, sizes)

    def put(self, frame: int, offset: int, part: Buffer) -> None:
        """Write bytes of one frame."""
        memoryview(self.frames[frame])[offset : offset + len(part)] = part

    def close(self) -> None:
        """Do nothing."""


class ArrivingWeights:
    """The frames of one version's WEIGHTS message, of which the first `have` bytes have come."""

    def __init__(self, version: Version, sizes: list[int], room: Room) -> None:
        self.version, self.sizes, self.size = version, sizes, sum(sizes)
        self.have = 0
        self._room = room
        self._starts = list(accumulate(sizes, initial=0))
        self._header: dict[str, Any] | None = None
        self._arrays: Arrays = {}
        self._checksum, self._digest = xxhash.xxh3_64(), new_digest()
        self._hashes: list[_RunningHash] = []

    def add(self, piece: Buffer) -> None:
        """Take the bytes that follow. Raises `DecodeError` for a header that is wrong, and `OSError` without room."""
        left = memoryview(piece)
        while left:
            frame = bisect_right(self._starts, self.have) - 1
            part = left[: self._starts[frame + 1] - self.have]
            self._room.put(frame, self.have - self._starts[frame], part)
            self.have, left = self.have + len(part), left[len(part) :]
        if self._header is None and self.have >= sum(self.sizes[:2]):
            self._read_header()
        for running in self._hashes:
            running.follow(self.have)

    def message(self) -> tuple[WeightsHeader, Arrays]:
        """Return header and arrays of the whole message, as `read_weights` does. Raises `DecodeError`."""
        if self._header is None or not self._hashes:  # without arrays, or with compressed ones
            return read_weights(decode(self._room.frames))
        if self._header["payload"].get("checksum") != self._checksum.intdigest():
            raise DecodeError("payload_checksum", "payload does not match its checksum")
        header = read(WeightsHeader, self._header)
        check_digest(header, self._digest.hexdigest())
        return header, self._arrays

    def close(self) -> None:
        """End the writing. The arrays stay."""
        self._room.close()

    def _read_header(self) -> None:
        """Read the header, which says where the arrays will lie, and begin to hash them."""
        kind, self._header = decode_header(self._room.frames)
        if kind is not MessageKind.WEIGHTS:
            raise DecodeError("unexpected_kind", f"{kind.name} was pulled for weights")
        payload = self._header.get("payload")
        if payload is None or is_compressed(self._header):
            return
        self._arrays = views_of(payload, self._room.frames)
        if not self._arrays:
            return
        at = {name: self._starts[2 + frame] + offset for name, _, _, frame, offset in payload["arrays"]}
        named = zip(sorted(self._arrays), digested(self._arrays), strict=True)
        parts = [part for name, (about, data) in named for part in ((about, 0), (data, at[name] + len(data)))]
        self._hashes = [
            _RunningHash(self._checksum.update, zip(self._room.frames[2:], self._starts[3:], strict=True)),
            _RunningHash(self._digest.update, parts),
        ]


class _RunningHash:
    """A hash over parts of a blob, taken in order as far as the blob has come."""

    def __init__(self, update: Callable[[Buffer], object], parts: Iterable[tuple[Buffer, int]]) -> None:
        """`parts`: (its bytes, where it ends in the blob); 0 for what is there already."""
        self._update = update
        self._parts = list(parts)
        self._at = self._done = 0
        """The part that is hashed now, and how many of its bytes are."""

    def follow(self, have: int) -> None:
        """Hash on, where the first `have` bytes of the blob have come."""
        while self._at < len(self._parts):
            part, end = self._parts[self._at]
            come = len(part) - max(0, end - have)
            if come > self._done:
                self._update(memoryview(part)[self._done : come])
                self._done = come
            if come < len(part):
                return
            self._at, self._done = self._at + 1, 0
