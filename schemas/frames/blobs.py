"""Frames of a message that stand one after another in one run of bytes."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.schemas.frames.wire import Buffer


def frames_of(blob: Buffer, sizes: Iterable[int]) -> list[Buffer]:
    """Return the frames of these `sizes` that make up `blob`, as views of it."""
    whole, start, frames = memoryview(blob), 0, list[Buffer]()
    for size in sizes:
        frames.append(whole[start : start + size])
        start += size
    return frames
