"""The queue of news for the learner: batches, and ends of sources. News of one source never overtake one another.

News go out in the order in which they came. In synchronous sampling the batches of a round go out by slot, each in its
turn. A hand-out costs about the same however long the queue is: each source has a lane of its own, and two heaps
compare only the heads of the lanes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.broker.batches.broker_observer import BrokerObserver
from headrace.broker.batches.rounds import Rounds
from headrace.broker.batches.source import Source, StoredBatch
from headrace.schemas.accounts.ledger import Settled
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.messages import Skip

_SPARE_HEADS = 64
"""Entries of the heaps that may be out of date before the heaps are built again."""


@dataclass(slots=True, eq=False)
class _Lane:
    """The news of one source."""

    source: Source
    news: deque[tuple[int, int]] = field(default_factory=deque)
    """(place in the queue, number of the batch); number 0 is the end of the source."""

    def drop_settled(self) -> bool:
        """Drop the news at the head whose batch is settled, or with the learner. Return whether there were any."""
        held, dropped = self.source.held, False
        while self.news and (seq := self.news[0][1]):
            batch = held.get(seq)
            if batch is not None and not batch.with_learner:
                break
            self.news.popleft()
            dropped = True
        return dropped


class DeliveryQueue(BrokerObserver):
    """News in order. `rounds` says which batches are of the present round, and whose turn it is."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._lanes: dict[tuple[int, int], _Lane] = {}
        """Lanes with news, by (slot, incarnation)."""
        self._next_place = 0
        self._in_order: list[tuple[int, _Lane]] = []
        """A heap of (place, lane): heads that go out in order of arrival."""
        self._of_round: list[tuple[int, int, _Lane]] = []
        """A heap of (slot, -place, lane): heads that wait for their turn. A later life of a slot goes first."""
        self._stage = rounds.stage

    def __len__(self) -> int:
        return sum(len(lane.news) for lane in self._lanes.values())

    def accepted(self, source: Source, held: StoredBatch, told: BatchHeader | Skip) -> None:
        """Add a batch, unless the learner has it."""
        if not held.with_learner:
            self.add(source, held.seq)

    def ended(self, source: Source) -> None:
        """Add the end of a source."""
        self.add(source, 0)

    def add(self, source: Source, seq: int) -> None:
        """Add a batch of a source; 0 for its end."""
        key, place = source.key, self._next_place
        self._next_place += 1
        lane = self._lanes.get(key)
        if lane is not None:
            lane.news.append((place, seq))
            return
        lane = self._lanes[key] = _Lane(source)
        lane.news.append((place, seq))
        self._add_head(lane)

    def first(self) -> tuple[Source, StoredBatch | None] | None:
        """Return the next news: a batch, or (None) that a source has ended. Return None while no news may go out."""
        if not self._lanes:
            return None
        if self._stage != self._rounds.stage:
            self._sort_heads()
        while (lane := self._first_lane()) is not None:
            if not lane.drop_settled():
                return lane.source, lane.source.held.get(lane.news[0][1])
            self._find_head(lane)
        return None

    def pop_first(self) -> None:
        """Remove what `first` returned."""
        lane = self._first_lane()
        assert lane is not None, "nothing is in its turn"
        lane.news.popleft()
        self._find_head(lane)

    def settled(self, source: Source, batches: Sequence[StoredBatch], before: Settled) -> None:
        """Remove a source's next batches that are settled, or that the learner has."""
        lane = self._lanes.get(source.key)
        if lane is not None and lane.drop_settled():
            self._find_head(lane)

    def clear(self) -> None:
        """Remove all news."""
        self._lanes.clear()
        self._sort_heads()

    def forget(self, source: Source) -> None:
        """Remove all news of a source."""
        lane = self._lanes.pop(source.key, None)
        if lane is not None:
            lane.news.clear()

    # -- the heads of the lanes ---------------------------------------------------------------------------------------

    def _find_head(self, lane: _Lane) -> None:
        """Note the new head of a lane that has lost its head."""
        lane.drop_settled()
        if lane.news:
            self._add_head(lane)
        else:
            del self._lanes[lane.source.key]

    def _add_head(self, lane: _Lane) -> None:
        """Put a new head into its heap. Entries of heads that are gone stay in the heaps until they are the first."""
        source, (place, seq) = lane.source, lane.news[0]
        batch = source.held.get(seq)
        if batch is not None and self._rounds.has(source, batch):
            heapq.heappush(self._of_round, (source.slot, -place, lane))
        else:
            heapq.heappush(self._in_order, (place, lane))
        if len(self._in_order) + len(self._of_round) > 2 * len(self._lanes) + _SPARE_HEADS:
            self._sort_heads()  # without a learner no other code removes old entries

    def _sort_heads(self) -> None:
        self._stage = self._rounds.stage
        self._in_order.clear()
        self._of_round.clear()
        for lane in self._lanes.values():
            self._add_head(lane)

    def _first_lane(self) -> _Lane | None:
        while self._in_order:
            place, lane = self._in_order[0]
            if lane.news and lane.news[0][0] == place:
                return lane
            heapq.heappop(self._in_order)
        while self._of_round:
            slot, place, lane = self._of_round[0]
            if lane.news and lane.news[0][0] == -place:
                return lane if self._rounds.is_turn(slot) else None
            heapq.heappop(self._of_round)
        return None
