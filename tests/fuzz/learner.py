"""Fuzzing of a learner's stream: a broker mutates what it says; an honest worker's batches still come, each once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import golden_samples
import lz4.block
from fuzz.lying_broker import Frames, LyingBroker
from fuzz.mutations import Mutator, peek, uncounted

from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.ledger import HeldBatch, Settled
from headrace.schemas.chunks.module_spaces import module_spaces_from_json, module_spaces_to_json
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import DecodeError, HeadraceError
from headrace.schemas.frames.compression import LZ4
from headrace.schemas.frames.wire import Buffer, MessageKind, decode_header, encode_packed
from headrace.schemas.messages import Fenced, LearnerWelcome, Message, Reject, SourceEnd, SourceGap, SourceStart, Status

FLEET = "f"
LIES = 600
HONEST_SLOT = 777_000_000
HONEST_BATCHES = 3
DEADLINE_S = 60.0

_BOX = golden_samples.SPACES["box"]
SPACES = module_spaces_to_json({"shared": Spaces(observation=_BOX[0], action=_BOX[1])})
_LAST = (Fenced(detail="x"), Reject(code="fleet_full", detail="x"))


@cache
def batch_of(slot: int, seq: int) -> list[Buffer]:
    """The frames of a worker's batch; some of its episodes stay open."""
    batch = golden_samples.make_batch(_BOX, ends=(0, 3, 0, 1))
    return golden_samples.encoded(replace(batch, slot=slot, incarnation=1, seq=seq))


@cache
def compressed_batch_of(slot: int, seq: int) -> list[Buffer]:
    """The same with compressed arrays, although they are too small to be worth it."""
    kind, header = decode_header(batch_of(slot, seq))
    frames = [bytes(frame) for frame in batch_of(slot, seq)[2:]]
    told = {"encoding": LZ4, "raw_sizes": list(map(len, frames))}
    small = [lz4.block.compress(frame, store_size=False) for frame in frames]
    return encode_packed(kind, header, list[Buffer](small), header.pop("payload")["arrays"], told)


def source_end(slot: int, seq: int = 4) -> SourceEnd:
    """The end of a source."""
    return SourceEnd(slot=slot, incarnation=1, seq=seq, reason="worker_killed")


@cache
def truth(slot: int) -> list[list[Buffer]]:
    """Return a broker's messages about a source, in order, and about itself."""
    settled = Settled(seq=1, committed=(6, 4), dropped={"stale": (3, 1)})
    messages: list[Message] = [
        SourceStart(slot=slot, incarnation=1, settled=settled),
        SourceGap(slot=slot, incarnation=1, batch=HeldBatch(seq=3, steps=6, chunks=4), reason="overflow"),
        source_end(slot),
        source_end(slot + 10, seq=0),
        source_end(slot + 20, seq=0),
        Status(epoch=1, spaces=SPACES, published=(1, 5)),
        LearnerWelcome(fleet_id=FLEET, epoch=1, spaces=SPACES, weight_shapes={"shared": {"w": [2]}}),
        Reject(code="later", detail="x", fatal=False),
    ]
    start, gap, *others = (message.frames() for message in messages)
    return [start, batch_of(slot, 2), gap, compressed_batch_of(slot, 4), *others]


class Schedule:
    """One stream and its broker, which lies once and then goes on as it should."""

    def __init__(self, seed: int, said: Counter[str]) -> None:
        self._mutator = Mutator(seed, "learner")
        self._said = said
        self._has_lied = self._is_to_end = False
        self._knows_spaces = seed % 3 > 0
        """Return whether the stream hears the spaces before the lies."""

    def play(self) -> None:
        """Read the stream until all of the honest worker's batches have come, or the stream ends with its error."""
        got: list[int] = []
        with LyingBroker(self._answer) as broker:
            try:
                with EpisodeStream(broker.endpoint, connect_timeout_s=DEADLINE_S) as stream:
                    deadline = time.monotonic() + DEADLINE_S
                    while len(got) < HONEST_BATCHES:
                        batch = stream.next(timeout_s=0.5)
                        broker.check()
                        got += [batch.seq] if batch is not None and batch.slot == HONEST_SLOT else []
                        assert time.monotonic() < deadline, f"only the honest batches {got} came"
                    stream.position()
            except HeadraceError as error:
                if not self._is_to_end:
                    raise
                self._said[f"then {type(error).__name__}"] += 1
                return
        assert got == list(range(1, HONEST_BATCHES + 1)), got

    def _answer(self, kind: MessageKind, header: dict[str, object], frames: list[bytes]) -> Iterator[Frames]:
        if kind is not MessageKind.HELLO:
            return
        if not self._has_lied:
            self._has_lied = True
            yield welcome(SPACES if self._knows_spaces else {})
            yield from self._lies()
        yield welcome(SPACES)
        yield from (batch_of(HONEST_SLOT, seq) for seq in range(1, HONEST_BATCHES + 1))

    def _lies(self) -> Iterator[Frames]:
        rng = self._mutator.random
        self._is_to_end = rng.random() < 0.1
        for _ in range(LIES):
            frames = rng.choice(truth(rng.choice((0, 1, 2))))
            kind = decode_header(frames)[0]
            if rng.random() < 0.7:
                frames = self._mutator.message(frames)
            if _ends(frames):
                continue
            if self._knows_spaces or not _contradicts(frames):
                self._said[kind.name] += 1
                yield frames
        if self._is_to_end:
            yield rng.choice(_LAST).frames()


def welcome(spaces: dict[str, object]) -> list[Buffer]:
    """The broker's answer to a HELLO."""
    return LearnerWelcome(fleet_id=FLEET, epoch=1, spaces=spaces).frames()


def _ends(frames: Frames) -> bool:
    """Return whether a message ends the stream, as another version of the protocol does."""
    kind, header, why = peek(frames)
    return (
        why == "version_mismatch"
        or kind is MessageKind.FENCED
        or (kind is MessageKind.REJECT and header.get("fatal", True) is True)
    )


def _contradicts(frames: Frames) -> bool:
    """Return whether a message has other spaces, which only the workers could recognise as wrong."""
    kind, header, _ = peek(frames)
    told = header.get("spaces") if kind in (MessageKind.STATUS, MessageKind.WELCOME) else None
    with uncounted():
        try:
            return bool(told) and module_spaces_from_json(told) != module_spaces_from_json(SPACES)
        except DecodeError:
            return False


@contextmanager
def learner() -> Iterator[Callable[[int, Counter[str]], None]]:
    """Yield a function that plays the schedule of a seed."""
    yield lambda seed, said: Schedule(seed, said).play()
