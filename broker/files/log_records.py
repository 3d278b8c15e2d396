"""The form of the broker's log on disk: segments of records, each with its length and a checksum.

    segment   8 bytes "HRLOG", version, then records
    record    checksum u32 | kind 4 bytes | number of frames u32 | bytes of what follows u64
              length of each frame u64 ... | the frames

The checksum covers all of the record that follows it. A record that is cut short, or whose checksum differs, ends the
readable part of a segment: what follows has no known beginning.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.schemas.basics.run_files import open_own
from headrace.schemas.frames.wire import Buffer

MAGIC = b"HRLOG\x00\x00\x01"
BATCH, NOTE = b"BTCH", b"NOTE"

_CHECKSUM = struct.Struct("<I")
_HEAD = struct.Struct("<4sIQ")
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Record:
    """One record. `frames` of a segment that was read are views of the file."""

    kind: bytes
    frames: list[Buffer]


def encode_record(record: Record) -> list[Buffer]:
    """Return the bytes of a record in pieces, the frames without a copy."""
    sizes = [memoryview(frame).nbytes for frame in record.frames]
    lengths = struct.pack(f"<{len(sizes)}Q", *sizes)
    head = _HEAD.pack(record.kind, len(sizes), len(lengths) + sum(sizes)) + lengths
    checksum = zlib.crc32(head)
    for frame in record.frames:
        checksum = zlib.crc32(frame, checksum)
    return [_CHECKSUM.pack(checksum) + head, *record.frames]


class SegmentReader:
    """The records of one segment, read through a memory map, which lives as long as a frame of it does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = open_own(path, os.O_RDONLY)
        try:
            self.nbytes = os.fstat(descriptor).st_size
            self._view = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if self.nbytes else b"")
        finally:
            os.close(descriptor)
        self.readable = 0
        """Bytes up to the end of the last whole record, once `records` has ended."""

    def records(self) -> Iterator[Record]:
        """Return all whole records, up to the first that is not."""
        if self._view[: len(MAGIC)] != MAGIC:
            return
        self.readable = len(MAGIC)
        while (found := self._record_at(self.readable)) is not None:
            record, self.readable = found
            yield record

    def _record_at(self, at: int) -> tuple[Record, int] | None:
        head_at = at + _CHECKSUM.size
        if head_at + _HEAD.size > self.nbytes:
            return None
        (checksum,) = _CHECKSUM.unpack_from(self._view, at)
        kind, frames, size = _HEAD.unpack_from(self._view, head_at)
        begin = head_at + _HEAD.size
        if size > self.nbytes - begin or frames * _LENGTH_BYTES > size:
            return None
        if zlib.crc32(self._view[head_at : begin + size]) != checksum:
            return None
        lengths = struct.unpack_from(f"<{frames}Q", self._view, begin)
        place = begin + frames * _LENGTH_BYTES
        if sum(lengths) != begin + size - place:
            return None
        parts: list[Buffer] = []
        for length in lengths:
            parts.append(self._view[place : place + length])
            place += length
        return Record(bytes(kind), parts), begin + size
