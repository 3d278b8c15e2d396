"""Rank 0's side towards the other ranks of its group as a state machine: messages and time in, messages out, no I/O.

    broker ──▶ stream of rank 0 ──▶ RankSessions ──▶ streams of ranks 1, 2, ...
                                    ◀── Commit ──

The other ranks read from rank 0 as from a broker, by the same messages. Rank 0 alone has a lease and a position at the
broker. A *round* gives each rank the same number of batches. It begins when rank 0 asks for it.

A batch is settled once the rank that got it has committed it. A lost rank's batches go to the others, or, with fixed
ranks, to the next process of that rank.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.learner_stub.streaming.source_progress import SourceKey
from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch, encode_batch
from headrace.schemas.credentials.tokens import same_token
from headrace.schemas.frames.wire import Buffer
from headrace.schemas.messages import (
    Commit,
    Fenced,
    LearnerHello,
    LearnerWelcome,
    Message,
    Ranks,
    Reject,
    SourcePosition,
    Status,
)

log = logging.getLogger("headrace.learner")

LOST_S = 5.0
"""Seconds without a connection after which a rank is lost. Its connection may have been cut for a moment."""

MOST_AHEAD = 2
"""Rounds that a rank may be behind rank 0 before rank 0 waits for it."""

ENDED = "rank_0_ended"
"""Code of the refusal by which rank 0 tells the others that it has closed its stream."""

_STATUS_S = 0.5

Peer = bytes
"""A connection of another rank."""


@dataclass(slots=True)
class _Given:
    """A batch that a rank got and has not committed."""

    batch: ChunkBatch
    of_round: int
    """The round that is not settled before this batch is."""
    given_in: int
    """The round in which its present rank got it."""
    seq: int = 0
    """Its number among the batches of its source at its present rank."""

    @property
    def key(self) -> SourceKey:
        return self.batch.slot, self.batch.incarnation


@dataclass(slots=True)
class _Rank:
    """Another rank, as rank 0 knows it."""

    number: int
    is_missing: bool = True
    """True if no round can begin without it: until it has come, and with fixed ranks while it is lost."""
    token: str = ""
    """The word of its process; "" before the first one has come, and while it is lost."""
    peer: Peer | None = None
    gone_at: float = 0.0
    needs_more: bool = False
    """True while its user waits, although all that it was given has come: for a larger round, or with later commits."""
    steps: int = 0
    """Steps that it got, from which its share is balanced."""
    uncommitted: deque[_Given] = field(default_factory=deque)
    newest: dict[SourceKey, int] = field(default_factory=dict)
    """Number of its newest batch of each source."""
    committed: dict[SourceKey, int] = field(default_factory=dict)
    """Number of the newest batch of each source that its process has committed."""
    trained: int = 0
    """How many of `uncommitted` its process has committed. They stay there until rank 0's user commits by hand."""

    def give(self, given: _Given) -> None:
        """Give a batch its number at this rank, and keep it until it is committed."""
        given.seq = self.newest[given.key] = self.newest.get(given.key, 0) + 1
        self.uncommitted.append(given)
        self.needs_more = False

    def commit(self, position: Sequence[SourcePosition], *, settles: bool) -> None:
        """Note the batches that its process has committed, and forget them if that settles them."""
        for place in position:
            key = place.slot, place.incarnation
            self.committed[key] = max(self.committed.get(key, 0), place.settled.seq)
        while (given := self.oldest()) is not None and given.seq <= self.committed.get(given.key, 0):
            self.trained += 1
        if settles:
            self.take_back(self.trained)

    def oldest(self) -> _Given | None:
        """Return the oldest batch that its process has not committed."""
        return self.uncommitted[self.trained] if self.trained < len(self.uncommitted) else None

    def take_back(self, count: int) -> list[_Given]:
        """Forget and return its `count` oldest batches."""
        self.trained = max(0, self.trained - count)
        return [self.uncommitted.popleft() for _ in range(count)]

    def begin_again(self) -> None:
        """Give the uncommitted batches numbers from 1, for another process that has received none."""
        self.newest.clear()
        self.committed.clear()
        for given in self.take_back(len(self.uncommitted)):
            self.give(given)


class RankSessions:
    """The other ranks of rank 0. `own` says how many there are, and has the secret that they must show.

    - is_fixed: a lost rank's batches wait for its next process.
    - commit_lag: rounds that each rank keeps before it commits them. None: only `settle_all` settles what they got.
    """

    def __init__(self, own: Ranks, *, is_fixed: bool, commit_lag: int | None) -> None:
        self.own = own
        self.round = 0
        """Number of the newest round."""
        self.pool: deque[_Given] = deque()
        """Batches of lost ranks, which are given again before any other."""
        self.facts = LearnerWelcome(fleet_id="", epoch=1)
        """The fleet as rank 0 knows it, for the other ranks."""
        self.exhausted = False
        """True while no batch comes soon."""
        self._is_fixed = is_fixed
        self._takes_commits = commit_lag is not None
        self._most_behind = MOST_AHEAD + (commit_lag or 0)
        self._ranks = {number: _Rank(number) for number in range(1, own.world_size)}
        self._zero = _Rank(0)
        """Rank 0 itself. It keeps only batches of lost ranks, which are of earlier rounds."""
        self._replaced: set[str] = set()
        """Words of processes whose rank a newer process has taken over."""
        self._by_peer: dict[Peer, _Rank] = {}
        """The ranks with a connection, which take part in a round."""
        self._outbox: list[tuple[Peer, Message | list[Buffer]]] = []
        self._next_status = 0.0

    # -- what comes in ------------------------------------------------------------------------------------------------

    def receive(self, peer: Peer, message: Message, now: float) -> None:
        """Take a HELLO or COMMIT of another rank."""
        if isinstance(message, LearnerHello):
            self._on_hello(peer, message)
        elif isinstance(message, Commit):
            self._on_commit(peer, message)

    def _on_hello(self, peer: Peer, hello: LearnerHello) -> None:
        told = hello.ranks
        if told is None or not same_token(told.secret, self.own.secret):
            detail = "rank 0 is a new process; start this rank again too, from the same checkpoint"
            self._outbox.append((peer, Fenced(detail=detail)))
        elif told.world_size != self.own.world_size or not 0 < told.rank < told.world_size:
            detail = f"rank {told.rank} has world_size {told.world_size}, and rank 0 has {self.own.world_size}"
            self._outbox.append((peer, Reject(code="world_size", detail=f"{detail}; give all ranks the same")))
        else:
            self._join(peer, self._ranks[told.rank], hello)

    def _join(self, peer: Peer, rank: _Rank, hello: LearnerHello) -> None:
        replaced = f"a newer process has taken over rank {rank.number}; this one must stop"
        is_new = rank.token != hello.token
        if is_new and (hello.epoch or hello.token in self._replaced):
            lost = f"rank {rank.number} was lost, and its batches went to others; start it again"
            self._outbox.append((peer, Fenced(detail=replaced if rank.token else lost)))
            return
        if rank.peer is not None and rank.peer != peer:
            self._by_peer.pop(rank.peer, None)
            if is_new:
                self._outbox.append((rank.peer, Fenced(detail=replaced)))
        if is_new:
            if not rank.token:
                rank.steps = max((other.steps for other in self._by_peer.values()), default=self._zero.steps)
            self._replaced.add(rank.token)
            rank.token = hello.token
            rank.begin_again()
        rank.peer = peer
        self._by_peer[peer] = rank
        rank.is_missing = False
        self._outbox.append((peer, self.facts))
        rank.commit(hello.position, settles=self._takes_commits)
        known = {(place.slot, place.incarnation): place.settled.seq for place in hello.position}
        for name, held in hello.held.items():
            slot, _, incarnation = name.partition("/")
            known[(int(slot), int(incarnation))] = held[-1].seq
        for given in rank.uncommitted:
            if given.seq > known.get(given.key, 0):
                self._send(peer, given)

    def _on_commit(self, peer: Peer, commit: Commit) -> None:
        rank = self._by_peer.get(peer)
        if rank is None:
            self._outbox.append((peer, Reject(code="unknown_peer", detail="say HELLO first", fatal=False)))
        else:
            rank.commit(commit.position, settles=self._takes_commits)
            rank.needs_more = commit.waiting and commit.in_hand >= len(rank.uncommitted) - rank.trained

    def gone(self, peer: Peer, now: float) -> None:
        """Note that a connection has ended."""
        rank = self._by_peer.pop(peer, None)
        if rank is not None:
            rank.peer, rank.gone_at = None, now

    def tick(self, now: float) -> None:
        """Let time pass: tell the ranks that rank 0 lives, and count as lost those without a connection."""
        for rank in self._ranks.values():
            if rank.token and rank.peer is None and now - rank.gone_at > LOST_S and not rank.is_missing:
                self._lose(rank)
        if now >= self._next_status:
            self._next_status = now + _STATUS_S
            self.tell_status()

    def _lose(self, rank: _Rank) -> None:
        if self._is_fixed:
            rank.is_missing = True
            what = f"its {len(rank.uncommitted)} batches wait for its next process"
        else:
            what = f"its {len(rank.uncommitted)} batches go to the other ranks"
            self.pool.extend(rank.take_back(len(rank.uncommitted)))
            rank.token = ""
        log.warning("rank %d is lost: %s", rank.number, what)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def waits_for(self) -> list[int]:
        """Return the ranks without which no round can begin."""
        return [rank.number for rank in self._ranks.values() if rank.is_missing or self._is_behind(rank)]

    def _is_behind(self, rank: _Rank) -> bool:
        if rank.token and rank.peer is None:
            return True
        oldest = rank.oldest()
        return oldest is not None and not rank.needs_more and self.round - oldest.given_in >= self._most_behind

    def new_batches(self, count: int) -> int:
        """Return how many batches a round of `count` for each rank needs, besides those of lost ranks."""
        return max(0, count * (1 + len(self._by_peer)) - len(self.pool))

    def share(self, batches: Sequence[ChunkBatch], count: int) -> list[ChunkBatch]:
        """Begin a round of `count` batches for each rank. Send the others theirs, and return those of rank 0.

        Each batch goes to the rank with the fewest steps so far, the largest ones first.
        """
        self.round += 1
        ranks = [self._zero, *self._by_peer.values()]
        taken = [self.pool.popleft() for _ in range(min(len(self.pool), count * len(ranks)))]
        for given in taken:
            given.given_in = self.round
        taken += [_Given(batch, self.round, self.round) for batch in batches]
        shares: dict[int, list[int]] = {rank.number: [] for rank in ranks}
        for i in sorted(range(len(taken)), key=lambda i: -taken[i].batch.steps):
            to = min((rank for rank in ranks if len(shares[rank.number]) < count), key=lambda rank: rank.steps)
            shares[to.number].append(i)
            to.steps += taken[i].batch.steps
        self.tell_status()
        for peer, rank in self._by_peer.items():
            for i in sorted(shares[rank.number]):
                rank.give(taken[i])
                self._send(peer, taken[i])
        own = [taken[i] for i in sorted(shares[0])]
        self._zero.uncommitted += [given for given in own if given.of_round < self.round]
        return [given.batch for given in own]

    def settled_round(self, own: int) -> int:
        """Return the newest round of which every batch is committed, where rank 0 has committed round `own`."""
        while self._zero.uncommitted and self._zero.uncommitted[0].given_in <= own:
            self._zero.uncommitted.popleft()
        uncommitted = (given for rank in (self._zero, *self._ranks.values()) for given in rank.uncommitted)
        open_rounds = [given.of_round for given in (*self.pool, *uncommitted)]
        return min(own, min(open_rounds, default=own + 1) - 1)

    @property
    def to_give_again(self) -> int:
        """Return the number of batches that lost ranks had not committed, and that wait for another process."""
        return len(self.pool) + sum(len(rank.uncommitted) for rank in self._ranks.values() if rank.is_missing)

    def settle_all(self) -> None:
        """Note that all batches that the ranks got are committed."""
        for rank in (self._zero, *self._ranks.values()):
            rank.take_back(len(rank.uncommitted))

    # -- what goes out ------------------------------------------------------------------------------------------------

    def take_outbox(self) -> list[tuple[Peer, Message | list[Buffer]]]:
        """Return and forget the messages that are due."""
        out, self._outbox = self._outbox, []
        return out

    def end(self, why: str) -> None:
        """Tell the ranks that no batch comes any more, and `why`; "": rank 0 just closed its stream."""
        over = Reject(code=ENDED, detail=why or "rank 0 has closed its stream")
        self._outbox += [(peer, over) for peer in self._by_peer]

    def tell_status(self) -> None:
        """Tell each rank what rank 0 knows of its fleet."""
        status = Status(
            epoch=self.facts.epoch,
            workers=0 if self.exhausted else 1,
            spaces=self.facts.spaces,
            published=self.facts.published,
        )
        self._outbox += [(peer, status) for peer in self._by_peer]

    def _send(self, peer: Peer, given: _Given) -> None:
        batch = given.batch
        header = BatchHeader(
            fleet_id=self.facts.fleet_id,
            slot=batch.slot,
            incarnation=batch.incarnation,
            seq=given.seq,
            steps=batch.steps,
            chunks=len(batch),
            learner_epoch=batch.learner_epoch,
            weights_digest=batch.weights_digest,
            agents=list(batch.agents),
            modules=list(batch.modules),
            reasons=list(batch.reasons),
            totals=WorkerTotals(),
        )
        self._outbox.append((peer, encode_batch(batch, header)))
