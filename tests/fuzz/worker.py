"""Fuzzing of a worker's session and weights: a broker mutates what it says, then takes each batch, once and in order.

The lies leave out what only a broker can know: that a batch was cut and is settled, or accepted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import golden_samples
import numpy as np
from fuzz.lying_broker import Frames, LyingBroker
from fuzz.mutations import Mutator, peek

from headrace.schemas.accounts.ledger import HeldBatch, Settled, WorkerTotals
from headrace.schemas.basics.bounds import MOST_EPOCH, MOST_WEIGHTS_SEQ
from headrace.schemas.errors import HeadraceError
from headrace.schemas.frames.wire import Buffer, MessageKind, decode_header, encode
from headrace.schemas.messages import Ack, Fenced, Message, Reject, WeightsPart, WorkerHello, WorkerWelcome
from headrace.schemas.messages.weights import encode_weights
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.workers.fleet.link import FleetLink
from headrace.workers.fleet.session import WorkerSession
from headrace.workers.fleet.weights import WeightsReceiver
from headrace.workers.fleet.window import SessionLimits, Shipment

FLEET = "f"
SLOT = 3
LIES = 600
BATCHES = 6
DEADLINE_S = 60.0
NEWEST = (MOST_EPOCH, MOST_WEIGHTS_SEQ)
_LAST = (Fenced(detail="x"), Reject(code="fleet_full", detail="x"))
_ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
_BATCH = golden_samples.make_batch(golden_samples.SPACES["box"])


def shipment(seq: int) -> Shipment:
    """A batch as the worker submits it."""
    totals = WorkerTotals(seq=seq, stepped=6 * seq, shipped=6 * seq, shipped_chunks=4 * seq)
    header = golden_samples.header_of(_BATCH).model_copy(
        update={"slot": SLOT, "incarnation": 1, "seq": seq, "totals": totals}
    )
    frames = encode(MessageKind.BATCH, header.model_dump())
    return Shipment(HeldBatch(seq=seq, steps=6, chunks=4), 100, frames, totals)


def settled(seq: int) -> Settled:
    """Return the settlement of the first `seq` batches: all are committed."""
    return Settled(seq=seq, committed=(6 * seq, 4 * seq))


def welcome(accepted: int) -> WorkerWelcome:
    """The broker's honest answer to a HELLO."""
    return WorkerWelcome(
        fleet_id=FLEET,
        slot=SLOT,
        incarnation=1,
        accepted=accepted,
        credit=accepted + 3,
        max_batch_bytes=1 << 20,
        heartbeat_interval_s=0.05,
        weights_endpoint="tcp://127.0.0.1:9",
        counters={"num_episodes_lifetime": 2},
    )


def part_of(frames: list[Buffer], version: tuple[int, int], offset: int = 0) -> list[Buffer]:
    """A WEIGHTS_PART with all that is left of a version from `offset` on."""
    blob = b"".join(bytes(frame) for frame in frames)
    header = WeightsPart(version=version, offset=offset, frame_sizes=[len(frame) for frame in frames])
    return encode(WeightsPart.KIND, header.model_dump(), {"part": np.frombuffer(blob[offset:], np.uint8)})


class Schedule:
    """One worker and its broker, which lies for a while and then goes on as it should."""

    def __init__(self, seed: int, said: Counter[str]) -> None:
        self._mutator = Mutator(seed, "worker")
        self._said = said
        self._left = LIES
        self._took: list[int] = []
        """Batches that the broker has accepted, or heard to be skipped."""
        self._is_to_end = self._mutator.random.random() < 0.1
        self._weights = encode_weights(FLEET, NEWEST, _ARRAYS)

    def play(self) -> None:
        """Deliver all batches and get the newest weights, or end with the error that the broker meant."""
        hello = WorkerHello(fleet_id=FLEET, token="t", slot=SLOT, incarnation=1)
        session = WorkerSession(hello, SessionLimits(window_batches=4, retry_s=0.1))
        weights = WeightsReceiver(FLEET)
        got: set[tuple[int, int]] = set()
        with LyingBroker(self._answer) as broker:
            link = FleetLink(FleetPlace(broker.endpoint), session, weights)
            try:
                deadline, next_seq = time.monotonic() + DEADLINE_S, 1
                while len(self._took) < BATCHES or session.window() or NEWEST not in got or self._left:
                    if next_seq <= BATCHES and session.has_room():
                        assert session.next_seq == next_seq, f"batch {session.next_seq} is next, not {next_seq}"
                        session.submit(shipment(next_seq))
                        next_seq += 1
                    link.pump(0.01)
                    broker.check()
                    if (version := weights.take()) is not None:
                        got.add(version.version)
                    if session.over:
                        break
                    state = (self._took, self._left, session.state, len(session.window()), weights.newest)
                    assert time.monotonic() < deadline, f"no progress: {state}"
                link.raise_refusal()
            except HeadraceError as error:
                if not self._is_to_end:
                    raise
                self._said[f"then {type(error).__name__}"] += 1
                return
            finally:
                link.close()
        assert self._took == list(range(1, BATCHES + 1)), self._took

    # -- the broker's thread ------------------------------------------------------------------------------------------

    def _answer(self, kind: MessageKind, header: dict[str, Any], frames: list[bytes]) -> Iterator[Frames]:
        if kind is MessageKind.BATCH and header["seq"] == len(self._took) + 1:
            self._took.append(header["seq"])
        elif kind is MessageKind.SKIP and header["batch"]["seq"] == len(self._took) + 1:
            self._took.append(header["batch"]["seq"])
        yield from self._lies()
        accepted = len(self._took)
        if kind is MessageKind.HELLO:
            yield welcome(accepted).frames()
        elif kind is MessageKind.WEIGHTS_PULL:
            offset = header["offset"] if tuple(header["version"]) == NEWEST else 0
            yield part_of(self._weights, NEWEST, offset)
        version = NEWEST if not self._left else (1, 1)
        settles = settled(accepted if not self._left else 0)
        yield self._ack(accepted=accepted, credit=accepted + 3, settled=settles, weights=version).frames()

    def _ack(self, **fields: Any) -> Ack:
        return Ack(slot=SLOT, incarnation=1, **fields)

    def _lies(self) -> Iterator[Frames]:
        rng = self._mutator.random
        for _ in range(min(self._left, rng.randint(0, 100))):
            self._left -= 1
            frames = self._truth()
            kind = decode_header(frames)[0]
            if rng.random() < 0.8:
                frames = self._mutator.message(frames)
            if not self._is_knowledge(frames):
                self._said[kind.name] += 1
                yield frames
        if self._is_to_end and not self._left:
            yield rng.choice(_LAST).frames()

    def _truth(self) -> list[Buffer]:
        version = (1, self._mutator.random.choice((1, 2, 3)))
        frames = encode_weights(FLEET, version, _ARRAYS)
        accepted = len(self._took)
        messages: tuple[Message, ...] = (
            self._ack(accepted=accepted, credit=accepted + 1, dropped={"stale": [9]}, weights=version),
            self._ack(accepted=accepted, credit=accepted + 2, steps_share=1 << 40, waiting_for="learner"),
            welcome(accepted),
            Reject(code="x", detail="x", fatal=False),
            Reject(code="checksum", detail="x", fatal=False, seq=1000),
        )
        choices = (*(message.frames() for message in messages), frames, part_of(frames, version))
        return list(self._mutator.random.choice(choices))

    def _is_knowledge(self, frames: Frames) -> bool:
        """Return whether the lie is one that only the broker could tell from the truth, or ends the session."""
        kind, header, why = peek(frames)
        if kind is None:
            return why == "version_mismatch"
        if kind is MessageKind.FENCED or (kind is MessageKind.REJECT and header.get("fatal", True) is True):
            return True
        told = header.get("settled")
        seq = told.get("seq") if isinstance(told, dict) else 0
        is_weights = kind in (MessageKind.WEIGHTS, MessageKind.WEIGHTS_PART)
        version = header.get("version" if is_weights else "weights")
        far = isinstance(version, list) and version == list(NEWEST)
        return far or (type(seq) is int and len(self._took) < seq <= BATCHES)


@contextmanager
def worker() -> Iterator[Callable[[int, Counter[str]], None]]:
    """Yield a function that plays the schedule of a seed."""
    yield lambda seed, said: Schedule(seed, said).play()
