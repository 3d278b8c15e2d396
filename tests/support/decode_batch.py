"""Reads one BATCH message as a learner does."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch, read_batch_header
from headrace.schemas.chunks.batch_reader import BatchReader
from headrace.schemas.chunks.spaces import Space
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import DEFAULT_LIMITS, Buffer, MessageKind, WireLimits, decode_header


def decode_batch(
    frames: Sequence[Buffer], observation_space: Space, action_space: Space, limits: WireLimits = DEFAULT_LIMITS
) -> tuple[BatchHeader, ChunkBatch]:
    """Read one batch, as `BatchReader.read` does."""
    kind, raw_header = decode_header(frames, limits)
    if kind is not MessageKind.BATCH:
        raise DecodeError("unexpected_kind", f"{kind.name} where BATCH was expected")
    header = read_batch_header(raw_header)
    return header, BatchReader(observation_space, action_space, limits).read(header, raw_header, frames)
