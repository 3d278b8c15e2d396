"""One version of the weights as a file in memory: how it is written, and how it is mapped.

count u64le | size of each frame u64le | the frames of its WEIGHTS message, each at 64 bytes' multiple
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from headrace.schemas.basics.bounds import Version
from headrace.schemas.basics.closable import Closable
from headrace.schemas.basics.run_files import open_own
from headrace.schemas.frames.manifest import view
from headrace.schemas.frames.wire import WEIGHTS_LIMITS, Buffer, MessageKind, encode_packed
from headrace.schemas.messages import WeightsHeader
from headrace.schemas.messages.weights import Arrays, lay_out_weights, weights_digest

_ALIGN = 64
_TAG_BYTES = 16
_PIECE_BYTES = 1 << 20
_MOST_DIGITS = 21
"""Characters of a number of 64 bits in JSON, with its comma."""


def write_frames(path: Path, frames: Sequence[Buffer]) -> None:
    """Write the frames of a WEIGHTS message to a new file, which this user alone can read. Raises `OSError`."""
    with NewFile(path, [len(frame) for frame in frames]) as file:
        for number, frame in enumerate(frames):
            file.put(number, 0, frame)


def write_arrays(path: Path, fleet_id: str, version: Version, arrays: Arrays) -> tuple[Arrays, str]:
    """Write the WEIGHTS message of `arrays` to a new file. Return its arrays as views of the file, and their digest.

    The file is their one copy: each byte of `arrays` is read once. Digest and checksum are taken of the file's bytes,
    so they match even where another thread writes to `arrays` meanwhile.

    Raises `OSError`, and `EncodeError` for arrays that may not go on the wire.
    """
    joined, own, manifest = lay_out_weights(arrays)
    sizes = [*([sum(map(_nbytes, joined))] if joined else []), *map(len, own)]
    header = WeightsHeader(fleet_id=fleet_id, version=version, digest="0" * 32).model_dump()
    draft = encode_packed(MessageKind.WEIGHTS, header, [], manifest)
    header_bytes = len(draft[1]) + _MOST_DIGITS * (1 + len(sizes))
    with NewFile(path, [_TAG_BYTES, header_bytes, *sizes]) as file:
        for offset, piece in _in_pieces(joined):
            file.put(2, offset, piece)
        for number, frame in enumerate(own, 2 + bool(joined)):
            file.put(number, 0, frame)
        views = _views(manifest, file.frames)
        header["digest"] = weights_digest(views)
        message = encode_packed(MessageKind.WEIGHTS, header, file.frames[2:], manifest, header_bytes=header_bytes)
        for number in (0, 1):
            file.put(number, 0, message[number])
    return views, header["digest"]


def _in_pieces(joined: list[Any]) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of what is joined: many small parts at once, and never a copy of all."""
    offset, size, parts = 0, 0, list[Any]()
    for part in joined:
        parts.append(part)
        size += _nbytes(part)
        if size >= _PIECE_BYTES:
            yield offset, b"".join(parts)
            offset, size, parts = offset + size, 0, []
    yield offset, b"".join(parts)


def _nbytes(part: Any) -> int:
    return memoryview(part).nbytes


def _views(manifest: list[list[Any]], frames: list[Buffer]) -> Arrays:
    """Return a file's arrays. Names with the same bytes have the same array, as `pack_weights` found them."""
    found: dict[tuple[Any, ...], NDArray[Any]] = {}
    arrays: dict[str, NDArray[Any]] = {}
    for name, dtype, shape, *at in manifest:
        _, array = view([name, dtype, list(shape), *at], frames, WEIGHTS_LIMITS, of_weights=True)
        arrays[name] = found.setdefault((dtype, shape, *at), array)
    return arrays


class NewFile(Closable):
    """A new file for the frames of one version, which come whole or piece by piece. Close it after the last one.

    A piece is copied once, and no process can read the file by its name until it has its final one.
    """

    def __init__(self, path: Path, sizes: Sequence[int]) -> None:
        """`sizes`: those of all frames. Raises `OSError`, as `put` does where memory has no room."""
        head = struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes)
        *self._starts, end = accumulate(map(_aligned, sizes), initial=_aligned(len(head)))
        self._descriptor = _create(path)
        try:
            os.ftruncate(self._descriptor, end)
            _write_at(self._descriptor, head, 0)
            whole = memoryview(mmap.mmap(self._descriptor, end, prot=mmap.PROT_READ))
        except BaseException:
            self.close()
            raise
        self.frames: list[Buffer] = [whole[at : at + size] for at, size in zip(self._starts, sizes, strict=True)]
        """All frames, as views of the file: zeros where nothing has come."""

    def put(self, frame: int, offset: int, part: Buffer) -> None:
        """Write bytes of one frame."""
        _write_at(self._descriptor, part, self._starts[frame] + offset)

    def close(self) -> None:
        """Close the file. Its views stay."""
        os.close(self._descriptor)


def map_frames(path: str) -> list[Buffer]:
    """Return the frames in a file, as views of its memory. Raises `OSError`."""
    descriptor = open_own(path, os.O_RDONLY)
    try:
        about = os.fstat(descriptor)
        if about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise PermissionError(f"{path} is not this user's alone")
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # all of it is read at once, for its checksum
        whole = memoryview(mmap.mmap(descriptor, about.st_size, flags, mmap.PROT_READ))
    finally:
        os.close(descriptor)
    (count,) = struct.unpack_from("<Q", whole)
    frames, start = list[Buffer](), _aligned(8 * (1 + count))
    for size in struct.unpack_from(f"<{count}Q", whole, 8):
        frames.append(whole[start : start + size])
        start = _aligned(start + size)
    return frames


def _write_at(descriptor: int, part: Buffer, start: int) -> None:
    """Write all of a part. The system may take less of it at a time."""
    left = memoryview(part)
    while left:
        written = os.pwrite(descriptor, left, start)
        left, start = left[written:], start + written


def _create(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        return open_own(path, flags, 0o600)
    except FileExistsError:  # left by a process of the same number that was killed
        path.unlink()
        return open_own(path, flags, 0o600)


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGN
