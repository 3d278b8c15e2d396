"""Judges the numbers that peers send, before the broker stores them, adds them or acts on them.

The types of fields (`schemas/basics/bounds.py`) refuse numbers that no peer can send in truth. This module refuses
numbers that contradict what the broker knows of this peer: a worker that joined here began with nothing, no counter
goes back or grows faster than time allows, no batch is settled before it is cut, and incarnations and epochs rise by
small steps.

Two kinds of lives are judged differently:

- A *native* life began with this broker. The broker has seen all of it, so every claim about it is compared.
- Any other life is older than this broker, which may have lost its state. The broker believes the first numbers that
  its worker, its recorder or Redis brings, within bounds. It compares all later ones with those.

docs/internals/numbers.md lists every bound and its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sized
from functools import reduce
from operator import attrgetter, gt
from typing import Any

from headrace.broker.batches.batch_store import BatchStore
from headrace.broker.batches.limits import BrokerState
from headrace.broker.batches.source import Peer, Source
from headrace.schemas.accounts.ledger import GROWING, Count, HeldBatch, Settled, WorkerTotals, plus
from headrace.schemas.accounts.runner_counters import Counters
from headrace.schemas.basics.bounds import MOST_REASONS, WINDOW, Version
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.errors import DecodeError
from headrace.schemas.messages import Bye, Heartbeat, LastWords, LearnerHello, Message, Obituary, Skip, WorkerHello

IMPLAUSIBLE = "implausible"

STEPS_PER_S = 10_000_000
"""Steps that one worker may make in a second: ten times what the fastest vectors of envs make today."""

STEPS_AT_ONCE = 2 * STEPS_PER_S

STEPS_A_BYTE = 16
"""Steps that one byte of a batch may hold. Each has a reward and a weights seq, eight bytes each, and lz4 makes no less
than one byte of 255.
"""

MOST_BROUGHT = 1 << 45
"""The largest counter that a life older than this broker may bring: a year of a million steps a second."""

MOST_UNHEARD = 1000
"""Lives of a slot, and learners, that may have begun without this broker hearing of it."""

MOST_FORGOTTEN = 10_000
"""Takes the place of `MOST_UNHEARD` where the broker knows of no such life or learner: its state may be lost."""

LIVES_PER_S = 10

MOST_TOLD_REASONS = MOST_REASONS // 2
"""Reasons that a peer may name. The broker and the learner add others, and all must fit the messages between them."""

_GROWING = attrgetter(*GROWING)


class Claims:
    """The judge of one core. Every method raises `DecodeError` for a claim that cannot be true, and changes nothing.

    `state` is that of the broker's file until a message changes it. `peers` are the connections of workers.
    """

    def __init__(
        self,
        state: BrokerState,
        store: BatchStore,
        peers: Mapping[Peer, Source],
        supervisors: Container[Peer],
        now: float,
    ) -> None:
        self._state = state
        self._store = store
        self._peers = peers
        self._supervisors = supervisors
        self._began = now
        self._in_file = dict(state.incarnations)
        """The highest incarnation of each slot when this broker began."""
        self._known = dict(state.incarnations)
        """The highest incarnation of each slot, with those that Redis knew."""
        self._epoch = state.epoch
        """The learner epoch when this broker began, or that Redis knew."""
        self._judges: dict[type, Callable[[Peer, Any, float], None]] = {
            WorkerHello: self._worker_hello,
            LearnerHello: lambda _, hello, now: self._check_epoch((hello.epoch, 0), now),
            Heartbeat: self._heartbeat,
            Bye: self._bye,
            Obituary: self._obituary,
            Skip: self._skip,
        }

    def judge(self, peer: Peer, message: Message, now: float) -> None:
        """Judge a control message. Positions of learners are judged by the store, one by one."""
        if (judge := self._judges.get(type(message))) is not None:
            judge(peer, message, now)

    def batch(self, peer: Peer, header: BatchHeader, nbytes: int, now: float) -> None:
        """Judge the header of a batch of `nbytes`. Only the next one of its source is ever stored."""
        self._check_epoch((header.learner_epoch, header.weights_seq), now)
        if header.steps > nbytes * STEPS_A_BYTE:
            raise _lie(f"{header.steps} steps in a batch of {nbytes} bytes")
        self._check_next(peer, header, (header.seq, header.steps, header.chunks), now)

    def remember(self, incarnations: Mapping[int, int], epoch: int) -> None:
        """Take over what Redis remembers of earlier brokers."""
        for slot, incarnation in incarnations.items():
            self._known[slot] = max(self._known.get(slot, 0), incarnation)
        self._epoch = max(self._epoch, epoch)

    # -- workers ------------------------------------------------------------------------------------------------------

    def _worker_hello(self, peer: Peer, hello: WorkerHello, now: float) -> None:
        if hello.slot is None and hello.incarnation:
            raise _lie(f"incarnation {hello.incarnation} of no slot")
        self._check_epoch(hello.weights, now)
        _check_totals(hello.totals)
        _check_settled(hello.settled, hello.totals)
        if self._store.is_folded(hello.slot, hello.incarnation):
            return  # it is only fenced
        source = None
        if hello.slot is not None and hello.incarnation:
            self._check_incarnation(hello.slot, hello.incarnation, now)
            source = self._store.sources.get((hello.slot, hello.incarnation))
        if source is not None and source.met_at is not None:
            if source.token == hello.token:
                _check_growth(source, hello.totals, now)
                _check_known(source, hello.settled)
        else:
            self._check_brought(hello.slot, hello.incarnation, hello.totals, hello.settled)

    def _heartbeat(self, peer: Peer, beat: Heartbeat, now: float) -> None:
        source = self._source(peer, beat.slot, beat.incarnation)
        if source is None:
            return
        self._check_epoch(beat.weights, now)
        if beat.refused is not None:
            self._check_epoch(beat.refused.version, now)
        _check_totals(beat.totals)
        _check_growth(source, beat.totals, now)
        _check_counters(source, beat.counters, now)
        if beat.totals.seq - source.settled.seq > WINDOW:
            raise _lie(f"{beat.totals.seq} batches cut where {source.settled.seq} are settled")
        before = source.totals
        if beat.totals.seq == before.seq and _shipped(beat.totals) != _shipped(before):
            raise _lie(f"{_shipped(beat.totals)} shipped by batch {before.seq}; before it was {_shipped(before)}")

    def _skip(self, peer: Peer, skip: Skip, now: float) -> None:
        batch = skip.batch
        self._check_next(peer, skip, (batch.seq, batch.steps, batch.chunks), now)

    def _check_next(self, peer: Peer, told: BatchHeader | Skip, batch: tuple[int, int, int], now: float) -> None:
        source, (seq, *counts) = self._source(peer, told.slot, told.incarnation), batch
        if source is None or seq != source.accepted + 1:
            return
        totals, count = told.totals, (counts[0], counts[1])
        if totals.seq != seq:
            raise _lie(f"batch {seq} with the totals of batch {totals.seq}")
        _check_totals(totals)
        _check_growth(source, totals, now)
        before = source.totals
        if before.seq == seq - 1 and plus(_shipped(before), count) != _shipped(totals):
            raise _lie(f"{_shipped(totals)} shipped by a batch of {count} after {_shipped(before)}")

    def _bye(self, peer: Peer, bye: Bye, now: float) -> None:
        source = self._source(peer, bye.slot, bye.incarnation)
        if source is not None:
            _check_counters(source, bye.counters, now)
            self._last_words(bye, source, now)

    def _obituary(self, peer: Peer, obituary: Obituary, now: float) -> None:
        source = self._store.sources.get((obituary.slot, obituary.incarnation))
        if self._store.is_folded(obituary.slot, obituary.incarnation):
            return  # it is only acknowledged
        if peer in self._supervisors and (source is None or not source.closed):  # the closed is only acknowledged
            self._check_incarnation(obituary.slot, obituary.incarnation, now)
            if source is None or not source.is_unrecorded(obituary):
                self._last_words(obituary, source, now)

    def _last_words(self, words: LastWords, source: Source | None, now: float) -> None:
        totals, settled = words.totals, words.settled
        _check_totals(totals)
        _check_settled(settled, totals)
        numbers = [batch.seq for batch in words.window]
        if numbers != sorted(set(numbers)) or not set(numbers) <= set(range(settled.seq + 1, totals.seq + 1)):
            raise _lie(f"batches {numbers[:3]}... in the window, where {totals.seq} are cut and {settled.seq} settled")
        kept, shipped = plus(settled.total(), _sum(words.window)), _shipped(totals)
        is_whole = len(numbers) == totals.seq - settled.seq
        if kept[0] > shipped[0] or kept[1] > shipped[1] or (is_whole and kept != shipped):
            raise _lie(f"{kept} settled or in the window; {shipped} are shipped")
        if source is None or source.met_at is None:
            self._check_brought(words.slot, words.incarnation, totals, settled)
            return
        _check_growth(source, totals, now)
        _check_known(source, settled)
        if totals.seq < source.accepted:
            raise _lie(f"{totals.seq} batches cut; {source.accepted} are accepted")
        rest = _sum(batch for batch in words.window if batch.seq > source.accepted)
        if source.native and plus(source.accepted_count, rest) != shipped:
            raise _lie(f"{shipped} shipped, {source.accepted_count} accepted and {rest} left")

    def _source(self, peer: Peer, slot: int, incarnation: int) -> Source | None:
        """Return the source that this peer speaks for. The handlers take over no number of another source."""
        source = self._peers.get(peer)
        return source if source is not None and source.key == (slot, incarnation) else None

    # -- what the broker remembers ------------------------------------------------------------------------------------

    def _check_brought(self, slot: int | None, incarnation: int, totals: WorkerTotals, settled: Settled) -> None:
        """Judge the first totals of a life that this broker receives.

        A worker takes no step before a broker welcomes it, and a broker writes each incarnation to its file before the
        welcome. So a life above those in the file begins with this broker, and its counters are 0. If the file lacks
        the slot, the file may be new.
        """
        if not totals.largest:
            return
        remembered = None if slot is None else self._in_file.get(slot)
        if not incarnation or (remembered is not None and incarnation > remembered):
            raise _lie(f"{totals.stepped} steps of a life that begins")
        if totals.largest > MOST_BROUGHT:
            raise _lie(f"a counter of {totals.largest} in a life that began before this broker")
        if not self._store.brought.has_room(slot, totals.largest):
            raise _lie(f"a counter of {totals.largest}, where lives before it have brought too much")

    def _check_incarnation(self, slot: int, incarnation: int, now: float) -> None:
        known = self._known.get(slot)
        most = (known + MOST_UNHEARD if known is not None else MOST_FORGOTTEN) + self._since(now)
        given = self._state.incarnations.get(slot, 0)
        if incarnation > max(most, given):
            raise _lie(f"incarnation {incarnation} of slot {slot}, where {given} is the highest known")

    def _check_epoch(self, version: Version, now: float) -> None:
        most = (self._epoch + MOST_UNHEARD if self._epoch else MOST_FORGOTTEN) + self._since(now)
        if version[0] > max(most, self._state.epoch):
            raise _lie(f"learner epoch {version[0]}, where {self._state.epoch} is the highest known")

    def _since(self, now: float) -> int:
        return int(LIVES_PER_S * max(0.0, now - self._began))


def _lie(detail: str) -> DecodeError:
    return DecodeError(IMPLAUSIBLE, detail)


def _shipped(totals: WorkerTotals) -> Count:
    return (totals.shipped, totals.shipped_chunks)


def _sum(batches: Iterable[HeldBatch]) -> Count:
    return reduce(plus, ((batch.steps, batch.chunks) for batch in batches), (0, 0))


def _check_reasons(*told: Sized) -> None:
    for reasons in told:
        if len(reasons) > MOST_TOLD_REASONS:
            raise _lie(f"{len(reasons)} reasons; there are fewer than {MOST_TOLD_REASONS}")


def _check_totals(totals: WorkerTotals) -> None:
    """Check that totals add up, as the ledger's equation says."""
    _check_reasons(totals.discarded, totals.dropped)
    dropped = sum(count[0] for count in totals.dropped.values())
    parts = totals.open + sum(totals.discarded.values()) + dropped + totals.shipped
    if totals.stepped != parts:
        raise _lie(f"{totals.stepped} steps, of which {parts} are open, discarded, dropped or shipped")
    if totals.module_steps and sum(totals.module_steps.values()) != totals.shipped:
        raise _lie(f"{sum(totals.module_steps.values())} steps of modules, {totals.shipped} shipped")
    if not totals.seq and (totals.shipped or totals.shipped_chunks):
        raise _lie(f"{_shipped(totals)} shipped in no batch")


def _check_settled(settled: Settled, totals: WorkerTotals) -> None:
    """Check what a worker or its recorder says of its own batches: no more are settled than were cut."""
    _check_reasons(settled.dropped)
    if settled.seq > totals.seq or totals.seq - settled.seq > WINDOW:
        raise _lie(f"{settled.seq} batches settled of {totals.seq}; at most {WINDOW} may be under way")
    total, shipped = settled.total(), _shipped(totals)
    if total[0] > shipped[0] or total[1] > shipped[1] or (settled.seq == totals.seq and total != shipped):
        raise _lie(f"{total} settled in {settled.seq} batches; {shipped} are shipped in {totals.seq}")


def _check_known(source: Source, settled: Settled) -> None:
    """Check what a connected worker reports as settled: it got those numbers from this broker."""
    if settled.seq > source.settled.seq:
        raise _lie(f"{settled.seq} batches settled; this broker knows of {source.settled.seq}")


def _check_growth(source: Source, totals: WorkerTotals, now: float) -> None:
    """Check that no counter goes back, and that none grows faster than time allows."""
    before = source.totals
    if any(map(gt, _GROWING(before), _GROWING(totals))) or before.discarded or before.dropped:
        for name, was, value in _counted(before, totals):
            if value < was:
                raise _lie(f"{name} is {value}; before it was {was}")
    elapsed = source.seconds_since_met(now)
    most = source.brought + STEPS_AT_ONCE + int(STEPS_PER_S * elapsed)
    if totals.largest > most:
        raise _lie(f"a counter is {totals.largest}; {elapsed:.0f} s allow {most}")


def _counted(before: WorkerTotals, now: WorkerTotals) -> Iterator[tuple[str, int, int]]:
    yield from zip(GROWING, _GROWING(before), _GROWING(now), strict=True)
    for reason, steps in before.discarded.items():
        yield f"discarded {reason}", steps, now.discarded.get(reason, 0)
    for reason, count in before.dropped.items():
        yield f"dropped {reason}", count[0], now.dropped.get(reason, (0, 0))[0]


def _check_counters(source: Source, counters: Counters, now: float) -> None:
    """Check the lifetime counters of a slot's runner, from which its next life goes on."""
    elapsed = source.seconds_since_met(now)
    grown = STEPS_AT_ONCE + int(STEPS_PER_S * elapsed)
    for name, value in _flat(counters):
        most = (source.counters_met.get(name, 0) if source.native else MOST_BROUGHT) + grown
        if value > most:
            raise _lie(f"{name} is {value}; {elapsed:.0f} s allow {most}")


def _flat(counters: Counters) -> Iterator[tuple[str, int]]:
    for name, value in counters.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{part}", count) for part, count in value.items())
        else:
            yield name, value


def flat_counters(counters: Counters) -> dict[str, int]:
    """Return counters by one name each: those of agents and modules as "name/part"."""
    return dict(_flat(counters))
