"""One version of the weights as a file in memory: how it is written, and how it is mapped.

count u64le | size of each frame u64le | the frames of its WEIGHTS message, each at 64 bytes' multiple
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from headrace.schemas.basics.bounds import Version
from headrace.schemas.basics.run_files import open_own
from headrace.schemas.frames.manifest import pack, view
from headrace.schemas.frames.wire import DEFAULT_LIMITS, Buffer, MessageKind, encode_packed
from headrace.schemas.messages import WeightsHeader
from headrace.schemas.messages.weights import MOST_WEIGHTS_BYTES, Arrays, in_order, weights_digest

_ALIGN = 64
_TAG_BYTES = 16
_MOST_DIGITS = 21
"""Characters of a number of 64 bits in JSON, with its comma."""


def write_frames(path: Path, frames: Sequence[Buffer]) -> None:
    """Write the frames of a WEIGHTS message to a new file, which this user alone can read. Raises `OSError`."""
    with os.fdopen(_create(path), "wb") as file:
        for part in (_head([len(frame) for frame in frames]), *frames):
            file.write(part)
            file.write(bytes(-len(part) % _ALIGN))


def write_arrays(path: Path, fleet_id: str, version: Version, arrays: Arrays) -> tuple[WeightsHeader, Arrays]:
    """Write the WEIGHTS message of `arrays` to a new file. Return its header, and its arrays as views of the file.

    The file is their one copy: each byte of `arrays` is read once. Digest and checksum are taken of the file's bytes,
    so they match even where another thread writes to `arrays` meanwhile.

    Raises `OSError`, and `EncodeError` for arrays that may not go on the wire.
    """
    payload, manifest = pack(in_order(arrays))
    blank = WeightsHeader(fleet_id=fleet_id, version=version, digest="0" * 32)
    draft = encode_packed(MessageKind.WEIGHTS, blank.model_dump(), [], manifest)
    header_bytes = len(draft[1]) + _MOST_DIGITS * (1 + len(payload))
    write_frames(path, [bytes(_TAG_BYTES), bytes(header_bytes), *payload])
    frames = map_frames(path)
    views = [view([name, dtype, list(shape), *at], frames, DEFAULT_LIMITS) for name, dtype, shape, *at in manifest]
    header = blank.model_copy(update={"digest": weights_digest(dict(views))})
    message = encode_packed(MessageKind.WEIGHTS, header.model_dump(), frames[2:], manifest, header_bytes=header_bytes)
    descriptor = open_own(path, os.O_WRONLY)
    try:
        start = _aligned(8 * (1 + len(frames)))
        os.pwrite(descriptor, message[0], start)
        os.pwrite(descriptor, message[1], _aligned(start + _TAG_BYTES))
    finally:
        os.close(descriptor)
    return header, dict(views)


class ArrivingFile:
    """A new file of a version whose frames come piece by piece. Close it when the last one has come.

    A piece is copied once, and no process can read the file by its name until it has its final one.
    """

    def __init__(self, path: Path, sizes: Sequence[int]) -> None:
        """`sizes`: those of all frames. Raises `OSError`, as `put` does where memory has no room."""
        head = _head(sizes)
        ends = accumulate(map(_aligned, sizes), initial=_aligned(len(head)))
        self._descriptor = _create(path)
        try:
            *self._starts, end = ends
            os.ftruncate(self._descriptor, end)
            _write_at(self._descriptor, head, 0)
            self.frames = map_frames(path)
            """All frames, as views of the file: zeros where nothing has come."""
        except BaseException:
            self.close()
            raise

    def put(self, frame: int, offset: int, part: Buffer) -> None:
        """Write bytes of one frame."""
        _write_at(self._descriptor, part, self._starts[frame] + offset)

    def close(self) -> None:
        """Close the file. Its views stay."""
        os.close(self._descriptor)


def map_frames(path: Path) -> list[Buffer]:
    """Return the frames in a file, as views of its memory. Raises `OSError` and `ValueError` for any other file.

    Its numbers are claims: nothing beyond the file's own bytes is touched.
    """
    descriptor = open_own(path, os.O_RDONLY)
    try:
        about = os.fstat(descriptor)
        if about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise PermissionError(f"{path} is not this user's alone")
        if not 8 <= about.st_size <= MOST_WEIGHTS_BYTES:
            raise ValueError(f"{path} has {about.st_size} bytes")
        whole = memoryview(mmap.mmap(descriptor, about.st_size, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)
    return _frames_in(whole, path)


def _frames_in(whole: memoryview, path: Path) -> list[Buffer]:
    (count,) = struct.unpack_from("<Q", whole)
    if count > DEFAULT_LIMITS.frames or 8 * (1 + count) > len(whole):
        raise ValueError(f"{path} tells of {count} frames")
    frames, start = list[Buffer](), _aligned(8 * (1 + count))
    for size in struct.unpack_from(f"<{count}Q", whole, 8):
        if size > len(whole) - start:
            raise ValueError(f"{path} tells of more bytes than it has")
        frames.append(whole[start : start + size])
        start = _aligned(start + size)
    return frames


def _head(sizes: Sequence[int]) -> bytes:
    return struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes)


def _write_at(descriptor: int, part: Buffer, start: int) -> None:
    """Write all of a part. The system may take less of it at a time."""
    left = memoryview(part)
    while left:
        written = os.pwrite(descriptor, left, start)
        left, start = left[written:], start + written


def _create(path: Path) -> int:
    path.unlink(missing_ok=True)  # left by a process of the same number that was killed
    return open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGN
