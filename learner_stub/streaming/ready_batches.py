"""Batches that are ready for the learner: decoded, and with no hole in any episode."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from headrace.learner_stub.streaming.continuity import SourceEpisodes
from headrace.learner_stub.streaming.session import LearnerSession
from headrace.learner_stub.streaming.source_progress import Arrival, ArrivalKind, CheckpointPosition
from headrace.schemas.accounts.ledger import Count, Drop
from headrace.schemas.basics.bounds import Version
from headrace.schemas.chunks.batch import ChunkBatch, read_batch_header
from headrace.schemas.chunks.batch_reader import BatchReader
from headrace.schemas.chunks.module_spaces import module_spaces_from_json
from headrace.schemas.chunks.open_episodes import OpenEpisodes
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import DecodeError, which_module_error
from headrace.schemas.frames.wire import Buffer
from headrace.schemas.messages import SourceEnd

log = logging.getLogger("headrace.learner")


@dataclass(frozen=True, slots=True)
class _Ready:
    """A batch to hand out, or None, and the counts that settle with it, in the order of the arrivals."""

    batch: ChunkBatch | None
    arrival: Arrival
    committed: Count = (0, 0)
    dropped: dict[str, Count] = field(default_factory=dict)
    settles: bool = True


class Turns:
    """Batches handed out and not settled, by the round in which they were. Users keep those of `lag` rounds."""

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self.round = 0
        """Number of the newest round."""
        self.later: deque[Callable[[], None]] = deque()
        """Calls that settle the batches, in order."""
        self.open: deque[int] = deque()
        """The number of calls in `later` of each round that is not settled."""

    def begin(self) -> None:
        """Note that what was put into `later` since the last call is of a new round."""
        self.round += 1
        self.open.append(len(self.later) - sum(self.open))

    def settle(self, newest: int) -> None:
        """Settle the rounds up to `newest`."""
        while self.open and self.round - len(self.open) < newest:
            for _ in range(self.open.popleft()):
                self.later.popleft()()
        while self.later and not self.open:  # no batch comes after it: an end, or one that cannot be read
            self.later.popleft()()


class ReadyBatches:
    """Batches that wait to be handed out, in order. `session` is told what becomes of each.

    `turns` keep the calls that tell it until the batches settle; None: they are made as batches are handed out.
    `position` is of an earlier life of this learner; its open episodes get their end here.

    dropped: steps by reason that will never be handed out, of the sources that arrived.
    """

    def __init__(
        self, session: LearnerSession, position: Iterable[CheckpointPosition] = (), turns: Turns | None = None
    ) -> None:
        self.modules = ModuleReaders()
        self.dropped: Counter[str] = Counter()
        self._session = session
        self._turns = turns
        self._episodes = {
            (place.slot, place.incarnation): SourceEpisodes(before=place.open_episodes, gap_reason=place.gap_reason)
            for place in position
            if not place.ended
        }
        self._ready: deque[_Ready] = deque()
        self._ends: list[Arrival] = []
        """Ends that wait for the spaces, from which markers are made. A new broker may not know the spaces yet."""

    def __len__(self) -> int:
        return sum(ready.batch is not None for ready in self._ready)

    def __bool__(self) -> bool:
        return bool(self._ready)  # the first one has a batch

    def steps(self) -> list[int]:
        """Return the steps of each batch."""
        return [ready.batch.steps for ready in self._ready if ready.batch is not None]

    def open_episodes(self, slot: int, incarnation: int) -> OpenEpisodes | None:
        """Return the episodes of a source that are open here, for the learner's own checkpoint; None if there is none.

        Between the markers of an end they are still open: the end comes again to the next learner.
        """
        episodes = self._episodes.get((slot, incarnation))
        return episodes.still_open() if episodes is not None else None

    def gap_reason(self, slot: int, incarnation: int) -> str:
        """Return the reason for which batches of a source are missing here; "" if none are."""
        episodes = self._episodes.get((slot, incarnation))
        return episodes.gap_reason if episodes is not None else ""

    def hand_out(self, newest: Version = (0, 0)) -> ChunkBatch:
        """Return the next batch; there must be one.

        `newest` is the present newest version, which may be above that of `open`.
        """
        ready = self._ready.popleft()
        if ready.arrival.kind is ArrivalKind.BATCH and ready.arrival.key in self._episodes:
            self._episodes[ready.arrival.key].note_handed_out()
        self._settle(ready)
        while self._ready and self._ready[0].batch is None:
            self._settle(self._ready.popleft())
        batch = ready.batch
        assert batch is not None, "the first one has a batch"
        return replace(batch, newest=newest) if batch.steps and newest > batch.newest else batch

    def _settle(self, ready: _Ready) -> None:
        if ready.settles and self._turns is not None:
            self._turns.later.append(partial(self._settle_now, ready))
        elif ready.settles:
            self._settle_now(ready)

    def _settle_in_turn(self, ready: _Ready) -> None:
        """Settle an arrival of which nothing is handed out, after those before it."""
        if self._ready:
            self._ready.append(ready)
        else:
            self._settle(ready)

    def _settle_now(self, ready: _Ready) -> None:
        self._session.settle(ready.arrival, ready.committed, ready.dropped)
        if ready.arrival.kind is ArrivalKind.END:
            self._episodes.pop(ready.arrival.key, None)

    def open(self, arrival: Arrival, newest: Version = (0, 0)) -> None:
        """Turn an arrival into batches to hand out: possibly none, or markers only.

        `newest` is the newest version of the weights, from which their lag counts.
        """
        if arrival.kind is ArrivalKind.END:
            self._end(arrival)
            return
        while self._ends and self._session.spaces:
            self._end(self._ends.pop(0))
        episodes = self._episodes.get(arrival.key)
        if episodes is None:
            episodes = self._episodes[arrival.key] = SourceEpisodes()
        if arrival.kind is ArrivalKind.BATCH:
            self._open_batch(arrival, episodes, newest)
        else:
            self._leave_out(arrival, episodes, arrival.reason, arrival.lost)

    def _end(self, arrival: Arrival) -> None:
        """Hand out a marker for each episode that is open at the end of a source. The end settles with the last one."""
        assert isinstance(arrival.content, SourceEnd)
        if not self._session.spaces:
            self._ends.append(arrival)
            return
        self.modules.learn(self._session.spaces)
        episodes = self._episodes.pop(arrival.key, None) or SourceEpisodes()
        before = episodes.still_open()
        try:
            episodes.learn(arrival.content, self.modules.spaces)
        except DecodeError as error:
            log.warning("worker %d (incarnation %d): open episodes cannot be read: %s", *arrival.key, error)
        markers = episodes.end(arrival.reason)
        if len(markers) > 1:
            self._episodes[arrival.key] = SourceEpisodes(before=before, gap_reason=episodes.gap_reason)
        self._ready.extend(_Ready(batch, arrival, settles=batch is markers[-1]) for batch in markers)
        if not markers:
            self._settle_in_turn(_Ready(None, arrival))

    def _open_batch(self, arrival: Arrival, episodes: SourceEpisodes, newest: Version) -> None:
        assert isinstance(arrival.content, tuple)
        raw_header, frames = arrival.content
        assert arrival.batch is not None
        try:
            self.modules.learn(self._session.spaces)
            batch = self.modules.read(raw_header, frames, newest)
            sifted = episodes.take(batch)
        except DecodeError:
            lost = {Drop.POISON.value: (arrival.batch.steps, arrival.batch.chunks)}
            self._leave_out(arrival, episodes, Drop.POISON.value, lost)
            return
        committed, dropped = (sifted.batch.steps, len(sifted.batch)), {}
        if sifted.left_out != (0, 0):
            dropped = {Drop.GAP.value: sifted.left_out}
            self.dropped[Drop.GAP] += sifted.left_out[0]
        given = sifted.parts
        for part in given:
            self._ready.append(_Ready(part, arrival, committed, dropped, settles=part is given[-1]))
        if not given:
            self._settle_in_turn(_Ready(None, arrival, committed, dropped))

    def _leave_out(self, arrival: Arrival, episodes: SourceEpisodes, reason: str, lost: dict[str, Count]) -> None:
        """Note a hole in this source. A hole without a batch is settled already: only count its steps."""
        episodes.gap_reason = reason
        self.dropped.update({name: steps for name, (steps, _) in lost.items()})
        if arrival.batch is not None:
            self._settle_in_turn(_Ready(None, arrival, (0, 0), lost))


class ModuleReaders:
    """Readers by module. Empty until `learn` gets the modules, which are the same for a fleet's whole life."""

    def __init__(self) -> None:
        self.spaces: dict[str, Spaces] = {}
        """Spaces of each module, by module id."""
        self._readers: dict[str, BatchReader] = {}

    def learn(self, told: dict[str, Any]) -> None:
        """Take the spaces that the broker passed on from the first worker. Raises `DecodeError`."""
        if not self.spaces:
            self.spaces = module_spaces_from_json(told)

    def spaces_of(self, module_id: str | None) -> Spaces:
        """Return the spaces of a module, or, for None, of the only one there is. Raises `ModuleError`."""
        if module_id is None and len(self.spaces) == 1:
            return next(iter(self.spaces.values()))
        if module_id is None or module_id not in self.spaces:
            raise which_module_error(module_id, self.spaces)
        return self.spaces[module_id]

    def read(self, raw_header: dict[str, Any], frames: Sequence[Buffer], newest: Version = (0, 0)) -> ChunkBatch:
        """Read a batch of one module. `newest` is the version from which its lag counts.

        Raises `DecodeError` for an unknown module, or a batch that contradicts itself.
        """
        header = read_batch_header(raw_header)
        modules = header.modules
        module_id = modules[0] if len(modules) == 1 else ""
        if module_id not in self.spaces:
            known = sorted(self.spaces)
            raise DecodeError("bad_batch_header", f"a batch of {modules!r:.200}; the modules are {known!r:.200}")
        if module_id not in self._readers:
            own = self.spaces[module_id]
            self._readers[module_id] = BatchReader(own.observation, own.action)
        return self._readers[module_id].read(header, raw_header, frames, newest)
