"""Liars in the simulated world: they mutate what honest sessions say, and send it to the broker too.

    on the same connection   numbers far beyond what the honest peer could mean
    as a stranger            the same, of any kind, also with ids of other peers, frames left out or sent twice
    as a worker of its own   a slot that no honest worker has, with claims of every kind about itself

A liar never sends what only a key could tell from the truth: a plausible HELLO for an honest slot, or a new learner's.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import orjson

from headrace.schemas.chunks.batch import BatchHeader, read_batch_header
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import MessageKind, decode_header, encode
from headrace.schemas.messages import (
    Bye,
    Commit,
    Heartbeat,
    LearnerHello,
    Message,
    Obituary,
    Skip,
    SupervisorHello,
    WorkerHello,
    read,
)

Content = Message | BatchHeader

LARGE = (2**31 - 1, 2**40 - 1, 2**48 - 1, 2**53 - 1, 2**53, 2**62, 2**63 - 1, 2**64 - 1)
"""Beyond what the time of a schedule allows: a lie within that would be one that only its own worker could correct."""

FIRST_SLOT = 5000
"""Slots from here on are those of liars."""

SPACES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"default_policy": {}},
    {"": {"observation": 1}},
    {"observation": {"kind": "abyss"}, "action": {"kind": "discrete", "n": 2}},
)
"""Spaces that a liar tells: none, or some that no learner can read."""

_ON_SAME_CONNECTION = (Heartbeat, Commit, Obituary, Bye)
_HARMS_ITSELF = {"consumed_batches", "slot", "incarnation", "weights", "refused"}
"""Fields by which a peer harms only itself until its next HELLO, or that make its message one about a liar's slot."""


class Liars:
    """Makes lies out of what honest peers say. `said` counts them by kind of message and outcome."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"liars {seed}")
        self.said: Counter[str] = Counter()
        self._peers = 0
        self._workers: dict[bytes, tuple[int, int]] = {}
        """Liars that are workers: connection -> (slot, incarnation)."""

    def lies_beside(self, peer: bytes, content: Content) -> list[tuple[bytes, Content]]:
        """The lies that reach the broker right before this honest message, each from its connection."""
        lies: list[tuple[bytes, Content | None]] = []
        if isinstance(content, _ON_SAME_CONNECTION) and self.random.random() < 0.3:
            lies.append((peer, self._mutated(content, _HARMS_ITSELF)))
        if self.random.random() < 0.2:
            lies += self._of_a_stranger(content)
        if self.random.random() < 0.1:
            lies += self._of_a_worker(content)
        return [(liar, lie) for liar, lie in lies if lie is not None]

    def _of_a_stranger(self, content: Content) -> list[tuple[bytes, Content | None]]:
        self._peers += 1
        liar = b"stranger%d" % self._peers
        if isinstance(content, WorkerHello):
            stolen = content.model_copy(update={"token": "stranger"})
            return [(liar, self._with_number(stolen, "incarnation"))]
        if isinstance(content, LearnerHello):
            return [(liar, self._with_number(content.model_copy(update={"token": "stranger"}), "epoch"))]
        if isinstance(content, SupervisorHello):
            return [(liar, content)]
        return [(liar, self._mutated(content, set())) for _ in range(self.random.choice((1, 1, 2)))]

    def _of_a_worker(self, content: Content) -> list[tuple[bytes, Content | None]]:
        """A worker joins with the truth or a lie, and then says what others said as if it were its own."""
        if not self._workers or self.random.random() < 0.1:
            liar, key = b"liar%d" % len(self._workers), (FIRST_SLOT + self.random.randrange(8), len(self._workers) + 1)
            self._workers[liar] = key
            spaces = self.random.choice(SPACES)
            hello = WorkerHello(
                fleet_id="simulated", token=liar.decode(), slot=key[0], incarnation=key[1], spaces=spaces
            )
            return [(liar, hello if self.random.random() < 0.5 else self._mutated(hello, {"slot"}))]
        liar, (slot, incarnation) = self.random.choice(list(self._workers.items()))
        if not isinstance(content, Heartbeat | BatchHeader | Skip | Bye):
            return []
        own = content.model_copy(update={"slot": slot, "incarnation": incarnation})
        return [(liar, own if self.random.random() < 0.3 else self._mutated(own, {"slot", "incarnation"}))]

    # -- mutations ----------------------------------------------------------------------------------------------------

    def _with_number(self, content: Message, name: str) -> Content | None:
        header = content.model_dump()
        header[name] = self.random.choice(LARGE)
        return self._read(content, orjson.loads(orjson.dumps(header)))

    def _mutated(self, content: Content, keep: set[str]) -> Content | None:
        """The message with one to three of its numbers changed, or its frames; None if no decoder takes it."""
        if self.random.random() < 0.1:
            return self._with_other_frames(content)
        header: Any = orjson.loads(orjson.dumps(content.model_dump()))
        places = [place for place in _numbers_in(header) if place[0] not in keep]
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
            lie = read_batch_header(header) if isinstance(content, BatchHeader) else read(type(content), header)
        except DecodeError as error:
            self.said[f"{name} {error.reason}"] += 1
            return None
        self.said[f"{name} read"] += 1
        return lie


def _numbers_in(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(node, dict):
        return [place for name, value in node.items() for place in _numbers_in(value, (*path, name))]
    if isinstance(node, list):
        return [place for at, value in enumerate(node) for place in _numbers_in(value, (*path, at))]
    return [path] if type(node) is int or (node is None and path[-1:] == ("env_steps",)) else []
