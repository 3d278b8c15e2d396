"""A small message in one ZeroMQ frame, where each frame would cost more than its content.

    16 bytes   the tag, as frame 0 of `wire.py`
    u32le      bytes of the header
    header     as frame 1
    payload    as frame 2, up to the end; nothing where the message has no arrays

The checksums are those of the message in frames. Only a policy server and its clients use this form: a broker forwards
frames that it does not read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import Buffer

LARGEST = 64 * 1024
"""From this size on bytes cost more than frames."""
_TAG_BYTES = 16
_LENGTH = struct.Struct("<I")
_HEAD_BYTES = _TAG_BYTES + _LENGTH.size


def join_frames(frames: Sequence[Buffer]) -> list[Buffer]:
    """Join a message's frames into one.

    A large message, one with several frames of arrays, and one with an empty frame stay as they are.
    """
    sizes = [len(frame) for frame in frames]
    if len(sizes) > 3 or 0 in sizes or sum(sizes) > LARGEST:
        return list(frames)
    return [b"".join((frames[0], _LENGTH.pack(len(frames[1])), *frames[1:]))]


def split_frame(frames: Sequence[bytes]) -> Sequence[bytes]:
    """Split a single frame into the frames of its message; return several frames as they are. Raises `DecodeError`."""
    if len(frames) != 1:
        return frames
    joined = frames[0]
    if len(joined) < _HEAD_BYTES:
        raise DecodeError("bad_tag", f"a single frame of {len(joined)} bytes; a message has {_HEAD_BYTES} or more")
    stop = _HEAD_BYTES + _LENGTH.unpack_from(joined, _TAG_BYTES)[0]
    if stop > len(joined):
        raise DecodeError("bad_tag", f"a header that would end at byte {stop} of {len(joined)}")
    parts = [joined[:_TAG_BYTES], joined[_HEAD_BYTES:stop]]
    return [*parts, joined[stop:]] if stop < len(joined) else parts
