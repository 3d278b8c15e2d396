"""A large value in Redis in pieces: a blob under a name of its own, then a pointer flipped to it.

A reader that follows the pointer finds a whole value or none, whenever the writer is killed: a blob that no pointer was
flipped to expires. Frames travel in pieces of 1 MiB. Each piece must get through within the client's timeout. The
pointer is a version (epoch, number) and never goes back, so a writer of an older epoch changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import orjson
import redis

from headrace.broker.redis.client import RedisReader
from headrace.broker.redis.scripts import FLIP
from headrace.schemas.accounts.redis_keys import WEIGHTS_BLOB, WEIGHTS_CURRENT, Key, key_name
from headrace.schemas.basics.bounds import Version
from headrace.schemas.frames.wire import Buffer

PIECE_BYTES = 1 << 20
LARGEST_WEIGHTS = 64 << 20
"""Bytes of a version of the weights that Redis keeps, at most."""
STAGED_S = 600
"""Seconds that an unfinished blob stays before Redis deletes it."""

_HOUR_S = 3600.0


@dataclass(slots=True)
class ByteBudget:
    """A bound on the bytes that one writer sends to Redis in an hour. After a large value it waits longer.

    `due` is the time from which the writer may send again; infinity if it may send nothing at all.
    """

    bytes_per_hour: int
    due: float = field(init=False)

    def __post_init__(self) -> None:
        self.due = 0.0 if self.bytes_per_hour else math.inf

    def spend(self, nbytes: int, now: float) -> None:
        """Note that `nbytes` are sent at the time `now`."""
        if self.bytes_per_hour:
            self.due = max(self.due, now) + nbytes * _HOUR_S / self.bytes_per_hour


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A value as it was stored. `version` is the pointer's. `about` is what its writer said of it."""

    version: Version
    frames: Sequence[Buffer]
    about: bytes = b""


@dataclass(frozen=True, slots=True)
class RedisBlob:
    """Writes and reads one value of one fleet. Every method may raise the errors in `client.REDIS_FAILURES`.

    `current` is the key of the pointer, `blob` that of a version. A value of more than `largest_bytes` counts as none.
    """

    client: redis.Redis
    fleet_id: str
    current: Key
    blob: Key
    largest_bytes: int

    def version(self) -> Version | None:
        """Return the version of the current value; None when there is none."""
        return _version(RedisReader(self.client).text(key_name(self.fleet_id, self.current)) or b"")

    def store(
        self,
        version: Version,
        frames: Sequence[Buffer],
        about: bytes = b"",
        spend: Callable[[int], object] = lambda _: None,
    ) -> str:
        """Make this version the current one. `spend` is called with the bytes of each piece.

        Return "flipped" when it is, "older" when a newer one was current (nothing changed), or "moved" (try again).
        """
        pointer = key_name(self.fleet_id, self.current)
        seen = RedisReader(self.client).text(pointer) or b""
        current = _version(seen)
        if current is not None and current >= version:
            return "older"
        blob = self.name(version)
        self.stage(blob, frames, about, spend)
        keys = (pointer, blob, self.name(current) if current else blob)
        answer = self.client.eval(FLIP, len(keys), *keys, *map(str, version), seen)
        return answer.decode() if isinstance(answer, bytes) else "moved"

    def load(self) -> StoredBlob | None:
        """Return the current value; None if there is none, or if its blob does not have the sizes that it names."""
        current = self.version()
        if current is None:
            return None
        reader, blob = RedisReader(self.client), self.name(current)
        sizes = orjson.loads(reader.field(blob, "sizes") or b"[]")
        if not sizes or sum(sizes) > self.largest_bytes:
            return None
        frames = [
            b"".join(reader.field(blob, name) or b"" for name, _, _ in _pieces(frame, size))
            for frame, size in enumerate(sizes)
        ]
        if [len(frame) for frame in frames] != sizes:
            return None
        return StoredBlob(current, frames, reader.field(blob, "about") or b"")

    def stage(
        self, blob: str, frames: Sequence[Buffer], about: bytes = b"", spend: Callable[[int], object] = lambda _: None
    ) -> None:
        """Write a blob that no pointer names yet."""
        views = [memoryview(frame).cast("B") for frame in frames]
        with self.client.pipeline(transaction=True) as pipe:
            pipe.delete(blob)
            pipe.hset(blob, "sizes", orjson.dumps([len(view) for view in views]))
            if about:
                pipe.hset(blob, "about", about)
            pipe.expire(blob, STAGED_S)
            pipe.execute()
        for frame, view in enumerate(views):
            for name, start, end in _pieces(frame, len(view)):
                self.client.hset(blob, name, bytes(view[start:end]))
                spend(end - start)

    def name(self, version: Version) -> str:
        """Return the key of the blob of a version."""
        return key_name(self.fleet_id, self.blob, version=f"{version[0]}-{version[1]}")


def _pieces(frame: int, size: int) -> Iterator[tuple[str, int, int]]:
    """Yield (field, start, end) of each piece of a frame."""
    for piece, start in enumerate(range(0, size, PIECE_BYTES)):
        yield f"{frame}/{piece}", start, min(start + PIECE_BYTES, size)


def _version(text: bytes) -> Version | None:
    match = re.fullmatch(rb"(\d{1,15})/(\d{1,15})", text)
    return (int(match[1]), int(match[2])) if match else None


def weights_in(client: redis.Redis, fleet_id: str) -> RedisBlob:
    """Return access to the weights of one fleet: the frames of a WEIGHTS message as they were published."""
    return RedisBlob(client, fleet_id, WEIGHTS_CURRENT, WEIGHTS_BLOB, LARGEST_WEIGHTS)
