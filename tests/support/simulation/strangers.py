"""Strangers in the simulated world: they send the broker what honest sessions say, with faults, from other connections.

Numbers are beyond their types or far from the truth, and frames are left out or sent twice. No stranger says HELLO, so
the broker must not take over anything that it says.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import orjson

from headrace.schemas.chunks.batch import BatchHeader, read_batch_header
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import MessageKind, decode_header, encode
from headrace.schemas.messages import Bye, Commit, Heartbeat, Message, Obituary, Skip, read

Content = Message | BatchHeader

LARGE = (2**31 - 1, 2**40 - 1, 2**48 - 1, 2**53 - 1, 2**53, 2**62, 2**63 - 1, 2**64 - 1)
_REPEATED = (BatchHeader, Bye, Commit, Heartbeat, Obituary, Skip)


class Strangers:
    """Makes faulty messages out of what honest peers say. `said` counts them by kind of message and outcome."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"strangers {seed}")
        self.said: Counter[str] = Counter()
        self._peers = 0

    def beside(self, content: Content) -> list[tuple[bytes, Content]]:
        """The messages that reach the broker right before this honest one, each from its connection."""
        if not isinstance(content, _REPEATED) or self.random.random() > 0.3:
            return []
        self._peers += 1
        said = [self._mutated(content) for _ in range(self.random.choice((1, 1, 2)))]
        return [(b"stranger%d" % self._peers, message) for message in said if message is not None]

    def _mutated(self, content: Content) -> Content | None:
        """The message with one to three of its numbers changed, or its frames; None if no decoder takes it."""
        if self.random.random() < 0.1:
            return self._with_other_frames(content)
        header: Any = orjson.loads(orjson.dumps(content.model_dump()))
        places = _numbers_in(header)
        for place in self.random.sample(places, min(len(places), self.random.choice((1, 1, 2, 3)))):
            *path, last = place
            node = header
            for step in path:
                node = node[step]
            node[last] = self.random.choice(LARGE)
        return self._read(content, header)

    def _with_other_frames(self, content: Content) -> Content | None:
        kind = MessageKind.BATCH if isinstance(content, BatchHeader) else content.KIND
        frames = encode(kind, content.model_dump())
        at = self.random.randrange(len(frames))
        frames = frames[:at] + frames[at + 1 :] if self.random.random() < 0.5 else frames[: at + 1] + frames[at:]
        try:
            _, header = decode_header(frames)
        except DecodeError as error:
            self.said[f"{type(content).__name__} {error.reason}"] += 1
            return None
        return self._read(content, header)

    def _read(self, content: Content, header: dict[str, Any]) -> Content | None:
        name = type(content).__name__
        try:
            mutated = read_batch_header(header) if isinstance(content, BatchHeader) else read(type(content), header)
        except DecodeError as error:
            self.said[f"{name} {error.reason}"] += 1
            return None
        self.said[f"{name} read"] += 1
        return mutated


def _numbers_in(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(node, dict):
        return [place for name, value in node.items() for place in _numbers_in(value, (*path, name))]
    if isinstance(node, list):
        return [place for at, value in enumerate(node) for place in _numbers_in(value, (*path, at))]
    return [path] if type(node) is int or (node is None and path[-1:] == ("env_steps",)) else []
