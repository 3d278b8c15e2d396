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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headrace.broker.acknowledgements import Acknowledgements
from headrace.broker.batch_store import BatchStore
from headrace.broker.learner_sessions import LearnerSessions
from headrace.broker.limits import BrokerLimits, BrokerState
from headrace.broker.outbox import Outbox, Send
from headrace.broker.source import Peer, Source
from headrace.broker.worker_sessions import WorkerSessions
from headrace.schemas.batch import BatchHeader
from headrace.schemas.ledger import Discard, LedgerRow
from headrace.schemas.messages import (
    Bye,
    Commit,
    Heartbeat,
    LearnerHello,
    LearnerRow,
    LearnerRows,
    Message,
    Obituary,
    Skip,
    SupervisorHello,
    Version,
    WorkerHello,
)
from headrace.schemas.runner_counters import Counters, larger
from headrace.schemas.wire import Buffer

RECONCILE_WAIT_S = 30.0
"""Seconds that a new broker waits to hear which batches the learner has. Until then it counts none as lost and drops
none.
"""


class BrokerCore:
    """The broker of one fleet. Call `receive`, `receive_batch` and `tick`; send what `take_outbox` returns."""

    def __init__(self, fleet_id: str, limits: BrokerLimits, state: BrokerState | None = None, now: float = 0.0) -> None:
        self.state = state or BrokerState()
        self.store = BatchStore(limits)
        self._outbox = Outbox()
        self._learners = LearnerSessions(fleet_id, self.state, self.store, self._outbox)
        self._acks = Acknowledgements(limits, self.store, self._outbox, self._learners.waits_for)
        self._workers = WorkerSessions(fleet_id, limits, self.state, self.store, self._outbox, self._acks)
        self._heartbeat_interval_s = limits.heartbeat_interval_s
        self._started = now
        self._next_heartbeat = now
        self._handlers: dict[type, Callable[[Peer, Any, float], None]] = {
            WorkerHello: self._on_worker_hello,
            LearnerHello: self._on_learner_hello,
            SupervisorHello: self._workers.on_supervisor_hello,
            Heartbeat: self._on_heartbeat,
            Bye: self._workers.on_bye,
            Obituary: self._workers.on_obituary,
            Skip: self._workers.on_skip,
            Commit: self._learners.on_commit,
        }

    # -- what comes in ------------------------------------------------------------------------------------------------

    def receive(self, peer: Peer, message: Message, now: float) -> None:
        """Handle a control message. Refuse a message of a kind that brokers do not take."""
        handler = self._handlers.get(type(message))
        if handler is None:
            self._outbox.reject(peer, "unexpected_kind", f"{type(message).__name__} is not for a broker")
            return
        handler(peer, message, now)
        self._learners.deliver()

    def receive_batch(self, peer: Peer, header: BatchHeader, frames: list[Buffer], nbytes: int, now: float) -> bool:
        """Handle a BATCH of `nbytes` in all. Return whether it was accepted, which happens once for each batch id."""
        accepted = self._workers.on_batch(peer, header, frames, nbytes, now)
        if accepted:
            self._learners.deliver()
        return accepted

    def may_publish(self, peer: Peer, version: Version) -> bool:
        """Return whether weights of this version, from this peer, are the lease holder's. Otherwise tell the peer."""
        return self._learners.may_publish(peer, version, self._workers.spaces)

    def published(self, version: Version, now: float) -> None:
        """Note that the relay has taken this version."""
        self.store.weights = max(self.weights, version)
        self.store.drop_stale()
        self._advance_round(now)

    def _advance_round(self, now: float) -> None:
        """Go on with the round of synchronous sampling. Weights of an earlier learner have none."""
        store, learner = self.store, self._learners.lease
        if learner is None or self.weights[0] != learner.epoch:
            return
        if store.rounds.advance(self.weights, self._workers.peers.values(), store.steps, now):
            self._workers.mark_all_changed()

    def new_rows(self, peer: Peer, message: LearnerRows) -> list[LearnerRow]:
        """Return the rows that the learner logged and that came for the first time."""
        return self._learners.new_rows(peer, message)

    def rows_stored(self, newest: Version) -> None:
        """Note that learners' rows up to (epoch, number) are in Redis, for learners to forget them."""
        self._learners.rows_stored = newest

    def tick(self, now: float) -> None:
        """Advance time: leases, obituaries, and the cumulative state to every peer.

        Call it several times a heartbeat interval.
        """
        if now > self._started + RECONCILE_WAIT_S:
            self.store.is_reconciled = True
        self._workers.tick(now)
        self._advance_round(now)
        self._learners.deliver()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_interval_s
            self._workers.mark_all_changed()
            self._learners.send_status(self.live(), self._workers.spaces)

    def restore(
        self,
        rows: Iterable[LedgerRow],
        incarnations: Mapping[int, int],
        epoch: int,
        counters: Mapping[int, Counters] | None = None,
    ) -> None:
        """Take over what Redis remembers of earlier brokers of this fleet. Newer knowledge stays."""
        for row in rows:
            source = self.store.source(row.slot, row.incarnation)
            source.made_before = max(source.made_before, row.totals.steps_of_envs)
            self.store.merge_settled(source, row.settled)
            if row.closed and row.held == (0, 0) and not source.closed and not source.held:
                source.totals, source.closed, source.restored = row.totals, True, row
                source.end_reason = source.end_reason or Discard.WORKER_KILLED
        for slot, incarnation in incarnations.items():
            self.state.incarnations[slot] = max(self.state.incarnations.get(slot, 0), incarnation)
        for slot, known in (counters or {}).items():
            self.state.counters[slot] = larger(known, self.state.counters.get(slot, {}))
        self._learners.raise_epoch((epoch, 0), self._workers.spaces)

    # -- what goes out, and what others may read ----------------------------------------------------------------------

    def take_outbox(self, now: float = math.inf) -> list[Send]:
        """Return all messages due by `now`, in order. Acknowledgements are gathered into one for each worker."""
        self._acks.send(len(self._workers.peers), now)
        return self._outbox.take()

    @property
    def next_due(self) -> float:
        """Return the time at which `take_outbox` has messages even if none comes in; infinity if it has none."""
        return self._acks.due_at

    @property
    def weights(self) -> Version:
        """Return the newest published version."""
        return self.store.weights

    @property
    def sources(self) -> dict[tuple[int, int], Source]:
        """Return all sources by (slot, incarnation)."""
        return self.store.sources

    def rows(self) -> list[LedgerRow]:
        """Return the books of every incarnation known, each as of one consistent moment."""
        return self.store.rows()

    def live(self) -> list[Source]:
        """Return the sources with a connection."""
        return list(self._workers.peers.values())

    def next_seq(self, peer: Peer) -> int:
        """Return the sequence number of the batch expected next from this worker; 0 for a peer that is not a worker."""
        source = self._workers.peers.get(peer)
        return source.accepted + 1 if source is not None else 0

    # -- messages that concern workers and learners ------------------------------------------------------------------

    def _on_worker_hello(self, peer: Peer, hello: WorkerHello, now: float) -> None:
        knew_spaces = bool(self._workers.spaces)
        self._workers.on_hello(peer, hello, now)
        self._learners.raise_epoch(hello.weights, self._workers.spaces)
        if self._workers.spaces and not knew_spaces:
            self._learners.send_status(self.live(), self._workers.spaces)

    def _on_learner_hello(self, peer: Peer, hello: LearnerHello, now: float) -> None:
        self._learners.on_hello(peer, hello, self._workers.spaces)
        self._workers.close_dead(now)

    def _on_heartbeat(self, peer: Peer, beat: Heartbeat, now: float) -> None:
        source = self._workers.peers.get(peer)
        refused = source.refused if source is not None else None
        self._workers.on_heartbeat(peer, beat, now)
        if source is not None and source.refused is not None and source.refused != refused:
            self._learners.send_status(self.live(), self._workers.spaces)
        self._learners.raise_epoch(beat.weights, self._workers.spaces)
