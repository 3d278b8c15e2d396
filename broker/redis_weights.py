"""The newest weights in Redis: a blob under a name of its own, then a pointer flipped to it.

A reader that follows the pointer finds whole weights or none, whenever the writer is killed: a blob that no pointer was
flipped to expires. Frames travel in pieces of 1 MiB. Each piece must get through within the client's timeout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson
import redis

from headrace.broker.redis_client import RedisReader
from headrace.broker.redis_scripts import FLIP
from headrace.schemas.messages import Version
from headrace.schemas.redis_keys import WEIGHTS_BLOB, WEIGHTS_CURRENT, key_name
from headrace.schemas.wire import Buffer

LARGEST_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
MOST_FRAMES = 64
STAGED_S = 600
"""Seconds that an unfinished blob stays before Redis deletes it."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The frames of a WEIGHTS message as they were published. `version` is the pointer's, not the header's."""

    version: Version
    frames: list[bytes]


@dataclass(frozen=True, slots=True)
class RedisWeights:
    """Writes and reads the weights of one fleet. Every method may raise the errors in `redis_client.REDIS_FAILURES`."""

    client: redis.Redis
    fleet_id: str

    def store(self, version: Version, frames: Sequence[Buffer]) -> str:
        """Make this version the current one.

        Return "flipped" when it is, "older" when a newer one was current (nothing changed), or "moved" (try again).
        """
        pointer = key_name(self.fleet_id, WEIGHTS_CURRENT)
        seen = RedisReader(self.client).text(pointer) or b""
        current = _version(seen)
        if current is not None and current >= version:
            return "older"
        blob = self._blob(version)
        self._stage(blob, frames)
        keys = (pointer, blob, self._blob(current) if current else blob)
        answer = self.client.eval(FLIP, len(keys), *keys, *map(str, version), seen)
        return answer.decode() if isinstance(answer, bytes) else "moved"

    def load(self) -> StoredWeights | None:
        """Return the current weights, whole; None when there are none or the value is not weights."""
        current = _version(RedisReader(self.client).text(key_name(self.fleet_id, WEIGHTS_CURRENT)) or b"")
        if current is None:
            return None
        reader, blob = RedisReader(self.client), self._blob(current)
        sizes = _sizes(reader.field(blob, "sizes"))
        if sizes is None:
            return None
        layout = [(name, end - start) for frame, size in enumerate(sizes) for name, start, end in _pieces(frame, size)]
        if reader.lengths(blob, [name for name, _ in layout]) != [length for _, length in layout]:
            return None
        frames = [
            b"".join(reader.field(blob, name) or b"" for name, _, _ in _pieces(frame, size))
            for frame, size in enumerate(sizes)
        ]
        return StoredWeights(current, frames) if [len(frame) for frame in frames] == sizes else None

    def _stage(self, blob: str, frames: Sequence[Buffer]) -> None:
        views = [memoryview(frame).cast("B") for frame in frames]
        with self.client.pipeline(transaction=True) as pipe:
            pipe.delete(blob)
            pipe.hset(blob, "sizes", orjson.dumps([len(view) for view in views]))
            pipe.expire(blob, STAGED_S)
            pipe.execute()
        for frame, view in enumerate(views):
            for name, start, end in _pieces(frame, len(view)):
                self.client.hset(blob, name, bytes(view[start:end]))

    def _blob(self, version: Version) -> str:
        return key_name(self.fleet_id, WEIGHTS_BLOB, version=f"{version[0]}-{version[1]}")


def _pieces(frame: int, size: int) -> Iterator[tuple[str, int, int]]:
    """Yield (field, start, end) of each piece of a frame."""
    for piece, start in enumerate(range(0, size, PIECE_BYTES)):
        yield f"{frame}/{piece}", start, min(start + PIECE_BYTES, size)


def _version(text: bytes) -> Version | None:
    match = re.fullmatch(rb"(\d{1,15})/(\d{1,15})", text)
    return (int(match[1]), int(match[2])) if match else None


def _sizes(text: bytes | None) -> list[int] | None:
    try:
        sizes = orjson.loads(text or b"null")
    except orjson.JSONDecodeError:
        return None
    if not isinstance(sizes, list) or not 0 < len(sizes) <= MOST_FRAMES:
        return None
    if not all(type(size) is int and size >= 0 for size in sizes) or sum(sizes) > LARGEST_BYTES:
        return None
    return sizes
