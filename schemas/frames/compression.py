"""Compression of a message's payload, for peers on two hosts whose network is slower than lz4.

A payload whose header says `"encoding": "lz4"` has frames that are lz4 blocks, as the package `lz4` writes them without
a size. `raw_sizes` has the bytes of each frame before compression: 0 for a frame that is not compressed. `sizes` and
the checksum are those of the frames as they are sent, so a broker checks and forwards them as any others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from headrace.schemas.basics.bounds import ListOf
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.manifest import Buffer, WireLimits

try:
    import lz4.block as lz4
except ImportError:
    lz4 = None

LZ4 = "lz4"

Encodings = Annotated[ListOf[Annotated[str, Field(max_length=20)]], Field(max_length=16)]

_LEAST_BYTES = 4096
_MOST_SHARE = 0.9
"""A compressed frame is sent only if it is smaller than this share of the frame."""


def readable_encodings() -> list[str]:
    """Return the encodings that this process reads and writes: "lz4" where the package is installed."""
    return [] if lz4 is None else [LZ4]


def compress(frames: Sequence[Buffer]) -> tuple[list[Buffer], list[int]]:
    """Return (frames to send, raw sizes). A frame that lz4 hardly makes smaller stays as it is, with raw size 0.

    The package `lz4` must be installed.
    """
    pairs = [_compress(frame) for frame in frames]
    return [frame for frame, _ in pairs], [size for _, size in pairs]


def _compress(frame: Buffer) -> tuple[Buffer, int]:
    size = len(frame)
    if size < _LEAST_BYTES:
        return frame, 0
    smaller: bytes = lz4.compress(frame, store_size=False)
    return (smaller, size) if len(smaller) < _MOST_SHARE * size else (frame, 0)


def decompress(payload: dict[str, Any], frames: Sequence[Buffer], limits: WireLimits) -> list[Buffer]:
    """Return the frames that `compress` was given. `payload` is their description in the message's header.

    Raises `DecodeError` for an unknown encoding, and for more bytes than `limits` allow, before it allocates any.
    """
    encoding, raw = payload.get("encoding"), payload.get("raw_sizes")
    if encoding not in readable_encodings():
        detail = f"payload has encoding {encoding!r:.40}, which is not readable here"
        raise DecodeError("bad_encoding", f"{detail}; pip install headrace[lz4]" if encoding == LZ4 else detail)
    if not isinstance(raw, list) or len(raw) != len(frames) or not all(type(size) is int and size >= 0 for size in raw):
        raise DecodeError("bad_encoding", f"raw_sizes are not the sizes of {len(frames)} frames")
    whole = sum(size or len(frame) for size, frame in zip(raw, frames, strict=True))
    if whole > limits.payload_bytes:
        raise DecodeError("payload_too_large", f"payload unpacks to {whole} bytes; {limits.payload_bytes} are allowed")
    return [_decompress(frame, size) if size else frame for frame, size in zip(frames, raw, strict=True)]


def _decompress(frame: Buffer, size: int) -> bytes:
    try:
        raw: bytes = lz4.decompress(frame, uncompressed_size=size)
    except lz4.LZ4BlockError as error:
        raise DecodeError("bad_encoding", f"a frame of {len(frame)} bytes is no lz4 block: {error!s:.200}") from error
    if len(raw) != size:
        raise DecodeError("bad_encoding", f"a frame unpacks to {len(raw)} bytes, not to the {size} announced")
    return raw
