"""The broker's state machine: messages and time in, messages out, no I/O of its own.

    worker ──▶ WorkerSessions ──▶ BatchStore ──▶ LearnerSessions ──▶ learner
           ◀── Ack ──           (held until settled)  ◀── Commit

Its promises:

- It accepts each batch id once.
- The learner gets the batches of an incarnation in order, each exactly once or named as a gap.
- It keeps a batch until the learner has committed it.
- It keeps the books of every incarnation, from counts taken here and at the worker.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headrace.broker.batches.batch_store import BatchStore
from headrace.broker.batches.folding import Folding
from headrace.broker.batches.limits import RECONCILE_WAIT_S, BrokerLimits, BrokerState
from headrace.broker.batches.source import Peer, Source
from headrace.broker.sessions.acknowledgements import Acknowledgements
from headrace.broker.sessions.book_checks import check_books, check_books_of_batch
from headrace.broker.sessions.consumer_groups import ConsumerGroups
from headrace.broker.sessions.hello_rights import judge_hello
from headrace.broker.sessions.learner_sessions import LearnerSessions
from headrace.broker.sessions.outbox import Outbox, Send
from headrace.broker.sessions.worker_sessions import WorkerSessions
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.runner_counters import Counters, larger
from headrace.schemas.basics.bounds import TRAIN, Version
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.credentials.key_files import PeerKey
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import Buffer
from headrace.schemas.messages import (
    Bye,
    Commit,
    GroupHello,
    Heartbeat,
    LearnerHello,
    LearnerWelcome,
    Message,
    Obituary,
    RankHello,
    Reject,
    Skip,
    SupervisorHello,
    Tasks,
    WorkerHello,
)


class BrokerCore:
    """The broker of one fleet. Call `receive`, `receive_batch` and `tick`; send what `take_outbox` returns."""

    def __init__(self, fleet_id: str, limits: BrokerLimits, state: BrokerState | None = None, now: float = 0.0) -> None:
        self.state = state or BrokerState()
        self.store = BatchStore(limits)
        self.sources, self.refusals = self.store.sources, self.store.refusals
        self.observers = self.store.observers
        self.revoked: Counter[str] = Counter()
        """Sessions that ended because their key was revoked, by the key's name."""
        self.joins_blocked = ""
        """The reason for which no peer can join; "" where peers can."""
        self.outbox = Outbox()
        self.learners = LearnerSessions(fleet_id, self.state, self.store, self.outbox)
        self.groups = ConsumerGroups(fleet_id, limits, self.state, self.store, self.outbox, now)
        self.observers.append(self.groups)
        self._acks = Acknowledgements(limits, self.store, self.outbox, self.groups, self.learners.waits_for)
        self.folding = Folding(self.store, self.groups.have_closed)
        self.workers = WorkerSessions(
            fleet_id, limits, self.state, self.store, self.outbox, self.groups, self._acks, self.folding.is_final
        )
        self._limits = limits
        self._started = now
        self._next_heartbeat = now
        self._was_exhausted = False
        self._introductions: dict[type, Callable[[Peer, Any, float, str], None]] = {
            WorkerHello: self._on_worker_hello,
            LearnerHello: self._on_learner_hello,
            GroupHello: self._on_group_hello,
            RankHello: self._on_rank_hello,
            SupervisorHello: self.workers.on_supervisor_hello,
        }
        self.handlers: dict[type, Callable[[Peer, Any, float], None]] = {
            Heartbeat: self._on_heartbeat,
            Bye: self.workers.on_bye,
            Obituary: self.workers.on_obituary,
            Skip: self.workers.on_skip,
            Commit: self._on_commit,
        }
        """By class of message; a feature adds its own."""

    # -- what comes in ------------------------------------------------------------------------------------------------

    def receive(self, peer: Peer, message: Message, now: float, key: PeerKey | None = None) -> None:
        """Handle a control message. Refuse a kind that brokers do not take, and one whose counts do not add up.

        `key`: for a HELLO, the key that its sender has shown; None where no keys are in use.
        """
        introduce, handler = self._introductions.get(type(message)), self.handlers.get(type(message))
        try:
            judge_hello(message, key, self._limits)
            check_books(message)
        except DecodeError as error:
            self._refuse(peer, message, error)
            return
        if introduce is not None:
            introduce(peer, message, now, key.group if key is not None else "")
        elif handler is not None:
            handler(peer, message, now)
        else:
            detail = f"{type(message).__name__} is not taken here"
            self.refusals.note(self.name_of(peer), "unexpected_kind", detail)
            self.outbox.reject(peer, "unexpected_kind", detail)
            return
        self._deliver()
        self._tell_exhausted()

    def _deliver(self) -> None:
        self.learners.deliver()
        self.groups.deliver()

    def expel(self, peer: Peer, code: str, detail: str) -> None:
        """End the session of a peer, and send it the reason. The batches that it has delivered stay."""
        self.outbox.reject(peer, code, detail)
        self.workers.expel(peer)
        self._sessions_of(peer).expel(peer)

    def _refuse(self, peer: Peer, message: Message, error: DecodeError) -> None:
        """Count and log a message that is wrong, and reject it if its sender waits for an answer."""
        self.refusals.note(self.name_of(peer), f"{error.reason} {type(message).__name__}", error.detail)
        if isinstance(message, WorkerHello | LearnerHello | RankHello | SupervisorHello | Tasks):
            self.outbox.reject(peer, error.reason, error.detail)
        elif isinstance(message, Obituary | Bye):
            self.outbox.send(peer, Reject(code=error.reason, detail=error.detail, fatal=False))
        elif isinstance(message, Skip):
            self.outbox.send(peer, Reject(code=error.reason, detail=error.detail, fatal=False, seq=message.batch.seq))

    def gone(self, peer: Peer) -> None:
        """Note that a peer's connection is closed. The peer sends HELLO when it reconnects."""
        self._sessions_of(peer).on_gone(peer)

    def _sessions_of(self, peer: Peer) -> LearnerSessions:
        """Return the sessions that a connection of a learner, or of a group's reader, belongs to."""
        return self.groups.sessions_of(peer) or self.learners

    def receive_batch(self, peer: Peer, header: BatchHeader, frames: list[Buffer], nbytes: int, now: float) -> bool:
        """Handle a BATCH of `nbytes` in all. Return whether it was accepted, which happens once for each batch id."""
        try:
            check_books_of_batch(header.seq, header.totals)
        except DecodeError as error:
            self.refusals.note(self.name_of(peer), f"{error.reason} batch", error.detail)
            self.outbox.send(peer, Reject(code=error.reason, detail=error.detail, fatal=False, seq=header.seq))
            return False
        accepted = self.workers.on_batch(peer, header, frames, nbytes, now)
        if accepted:
            self._deliver()
        return accepted

    def published(self, version: Version, now: float) -> None:
        """Note that the relay has taken this version."""
        self.store.publish(version)
        self.groups.publish(version)
        self._advance_round(now)

    def _advance_round(self, now: float) -> None:
        """Advance the round of synchronous sampling. There is no round for weights of an earlier learner."""
        store, learner = self.store, self.learners.lease
        if learner is None or self.weights[0] != learner.epoch:
            return
        if store.rounds.advance(self.weights, self.workers.peers.values(), store.steps, now):
            self.workers.mark_all_changed()

    def tick(self, now: float) -> None:
        """Advance time: leases, obituaries, and the cumulative state to every peer.

        Call it several times a heartbeat interval.
        """
        if now > self._started + RECONCILE_WAIT_S and not self.store.is_reconciled:
            self.store.is_reconciled = True
            self.store.drop_stale()
        self.workers.tick(now)
        self._advance_round(now)
        self._deliver()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._limits.heartbeat_interval_s
            self.workers.mark_silent_changed(now)
            self._send_status()
        for observer in self.observers:
            observer.tick(now)

    def restore(
        self,
        rows: Iterable[LedgerRow],
        incarnations: Mapping[int, int],
        epoch: int,
        counters: Mapping[int, Counters] | None = None,
        folded: Mapping[int, FoldedLives] | None = None,
    ) -> None:
        """Take over what Redis remembers of earlier brokers of this fleet. Newer knowledge stays."""
        self._forget(self.folding.adopt(folded or {}))
        for row in rows:
            self.store.restore(row)
        for slot, incarnation in incarnations.items():
            self.state.incarnations[slot] = max(self.state.incarnations.get(slot, 0), incarnation)
        for slot, known in (counters or {}).items():
            self.state.counters[slot] = larger(known, self.state.counters.get(slot, {}))
        self.learners.raise_epoch((epoch, 0), self.workers.spaces)

    # -- finished lives -----------------------------------------------------------------------------------------------

    def fold(self, counters_of: Callable[[Source], Mapping[str, int]]) -> list[Source]:
        """Fold finished lives into those of their slot, some at a time. Return their sources, forgotten here."""
        gone = self.folding.fold(counters_of)
        self._forget(gone)
        return gone

    def _forget(self, sources: Iterable[Source]) -> None:
        for source in sources:
            self.workers.forget_peer(source)
            self.learners.forget(source)
            self.groups.ended(source)

    def take_changed(self) -> list[Source]:
        """Return the sources that have changed since the last call."""
        unreported, self.store.unreported = self.store.unreported, set()
        return [self.store.sources[key] for key in unreported if key in self.store.sources]

    # -- what goes out, and what others may read ----------------------------------------------------------------------

    def take_outbox(self, now: float = math.inf) -> list[Send]:
        """Return all messages due by `now`, in order. Acknowledgements are gathered into one for each worker."""
        self._acks.send(len(self.workers.peers), now)
        return self.outbox.take()

    @property
    def next_due(self) -> float:
        """Return the time at which `take_outbox` has messages even if none comes in; infinity if it has none."""
        return self._acks.due_at

    def name_of(self, peer: Peer) -> str:
        """Return a name of this peer for people."""
        source = self.workers.peers.get(peer)
        if source is not None:
            return f"worker {source.slot} (incarnation {source.incarnation}, pid {source.pid} on {source.host!r})"
        if peer in self.workers.supervisors:
            return "a supervisor"
        return self._sessions_of(peer).name_of(peer) or f"unknown peer {peer[1:].hex():.8}"

    def knows(self, peer: Peer) -> bool:
        """Return whether this peer has introduced itself, and its HELLO was accepted."""
        if peer in self.workers.peers or peer in self.workers.supervisors:
            return True
        lease = self._sessions_of(peer).lease
        return lease is not None and peer in lease.connections()

    @property
    def has_learner(self) -> bool:
        """Return whether a learner's stream is connected, as far as is known."""
        return self.learners.lease is not None and self.learners.lease.stream is not None

    @property
    def weights_told(self) -> dict[str, Any]:
        """Return shapes and kinds of the weights that workers load; empty while no live worker has told them."""
        return self.learners.weights_told

    @property
    def weights(self) -> Version:
        """Return the newest published version."""
        return self.store.weights

    def rows(self) -> list[LedgerRow]:
        """Return the books of every incarnation known, each as of one consistent moment."""
        return self.store.rows()

    def live(self) -> list[Source]:
        """Return the sources with a connection."""
        return list(self.workers.peers.values())

    def _send_status(self) -> None:
        live = self.live()
        waiting = sum(1 for source in live if source.blocked and source.blocked != "group")
        self.learners.send_status(live, self.workers.spaces, waiting)
        self.groups.send_status(live, self.workers.spaces)

    def _tell_exhausted(self) -> None:
        """Send the learner a status immediately when no worker and no unsettled batch is left: it may be stopping."""
        exhausted = not self.workers.peers and not self.store.held_batches()
        if exhausted and not self._was_exhausted:
            self._send_status()
        self._was_exhausted = exhausted

    # -- messages that concern workers and learners ------------------------------------------------------------------

    def _on_worker_hello(self, peer: Peer, hello: WorkerHello, now: float, group: str) -> None:
        try:
            self.workers.check_spaces(hello)
        except DecodeError as error:
            self.workers.refuse_life(peer, hello)
            detail = f"{error.detail}; give this worker and its broker the same version of headrace"
            self._refuse(peer, hello, DecodeError(error.reason, detail))
            return
        if self.learners.lease is None:
            self.workers.forget_unused_spaces()
        known = self.workers.spaces
        self.workers.on_hello(peer, hello, now, group)
        self._raise_epoch(peer, hello.weights)
        if self.workers.spaces is not known:
            self._send_status()

    def _on_learner_hello(self, peer: Peer, hello: LearnerHello, now: float, _: str) -> None:
        self.learners.on_hello(peer, hello, self.workers.spaces, now)
        self.workers.close_dead(now)

    def _on_group_hello(self, peer: Peer, hello: GroupHello, now: float, _: str) -> None:
        self.groups.on_hello(peer, hello, self.workers.spaces, now)
        self.workers.mark_all_changed()

    def _on_rank_hello(self, peer: Peer, hello: RankHello, _now: float, _: str) -> None:
        group = self.groups.by_name.get(hello.group)
        sessions = group.learners if group is not None else self.learners
        ranks = sessions.ranks if group is not None or hello.group == TRAIN else None
        fleet_id, epoch = self.learners.fleet_id, max(1, self.state.epoch)
        self.outbox.send(peer, LearnerWelcome(fleet_id=fleet_id, epoch=epoch, ranks=ranks))

    def _on_commit(self, peer: Peer, commit: Commit, now: float) -> None:
        self._sessions_of(peer).on_commit(peer, commit, now)

    def _on_heartbeat(self, peer: Peer, beat: Heartbeat, now: float) -> None:
        source = self.workers.peers.get(peer)
        refused = source.refused if source is not None else None
        self.workers.on_heartbeat(peer, beat, now)
        if source is not None and source.refused is not None and source.refused != refused:
            self._send_status()
        self._raise_epoch(peer, beat.weights)
        if source is not None:
            for observer in self.observers:
                observer.reported(source)

    def _raise_epoch(self, peer: Peer, version: Version) -> None:
        """Raise the learner epoch above that of a worker's weights, which may come from an earlier broker."""
        if peer in self.workers.peers:
            self.learners.raise_epoch(version, self.workers.spaces)
