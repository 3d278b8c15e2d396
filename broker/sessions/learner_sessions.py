"""The broker's side towards learners: the lease, delivery in order within the learner's window, and its commits."""

from __future__ import annotations

import logging
from typing import Any

from headrace.broker.batches.batch_store import BatchStore
from headrace.broker.batches.limits import GroupState
from headrace.broker.batches.source import Peer, Source, StoredBatch
from headrace.broker.sessions.learner_measures import LearnerMeasures
from headrace.broker.sessions.lease import LearnerLease
from headrace.broker.sessions.outbox import Outbox
from headrace.schemas.accounts.ledger import Discard, Drop, HeldBatch
from headrace.schemas.basics.bounds import TRAIN, Version
from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.credentials.tokens import digest_of, same_token
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import Buffer, decompressed
from headrace.schemas.messages import (
    Commit,
    Fenced,
    LearnerHello,
    LearnerRows,
    LearnerWelcome,
    Ranks,
    SourceEnd,
    SourceGap,
    SourceStart,
    Status,
)

log = logging.getLogger(__name__)

RESEND_S = 5.0
"""Seconds that a batch may be under way before the broker asks the learner for a HELLO, to compare their state."""

CHECK_S = 0.25
"""Interval of the check for `RESEND_S`, which walks over all batches held."""


class LearnerSessions:
    """The lease of one fleet's learner and the sessions of its stream and publisher. A core has one such object.

    Each other consumer group, `group`, has one too, for its reader's stream.
    """

    def __init__(self, fleet_id: str, state: GroupState, store: BatchStore, outbox: Outbox, group: str = TRAIN) -> None:
        self.lease: LearnerLease | None = None
        self.fleet_id = fleet_id
        self._state = state
        self._store = store
        self._outbox = outbox
        self._who = "learner" if group == TRAIN else f"reader of group {group!r}"
        self._waits_for = "learner" if group == TRAIN else f"group {group}"
        self._warnings = CountedWarnings(log)
        self.weights_told: dict[str, Any] = {}
        """Shapes and kinds of the weights that workers load; empty while no live worker has told them."""
        self.measures = LearnerMeasures()
        self._newest_row: Version = (0, 0)
        """(epoch, number) of the newest row that observers have heard."""
        self.rows_stored: Version = (0, 0)
        """(epoch, number) of the newest row that Redis has. Learners are told it and forget older rows."""

    # -- the lease ----------------------------------------------------------------------------------------------------

    def on_hello(self, peer: Peer, hello: LearnerHello, spaces: dict[str, Any], now: float) -> None:
        """Handle the HELLO of a stream or publisher.

        A learner that holds the lease gets it again, a new learner gets a new one, and an old learner is fenced.
        """
        if hello.fleet_id not in ("", self.fleet_id):
            detail = f"this broker serves fleet {self.fleet_id!r}, not {hello.fleet_id!r}; check the endpoint"
            self._outbox.reject(peer, "wrong_fleet", detail)
            return
        holder, learner = self.lease, self._lease_for(hello)
        if learner is None:
            self._fence(peer)
            return
        if learner is not holder:
            self.measures.begin(is_new=learner.granted)
        learner.hello, learner.heard_at = hello, now
        if hello.channel == "publisher":
            learner.attach_publisher(peer)
        else:
            learner.attach_stream(peer, hello)
            self._store.limit_window(hello.window_steps)
            self._store.rounds.ask(hello.synchronous, hello.steps_per_update)
            self._store.reconcile(hello.position, hello.held)
        self._send_welcome(peer, learner, spaces)
        if hello.channel == "stream":
            self._end_folded(peer, hello)

    @property
    def ranks(self) -> Ranks | None:
        """Return the ranks that share the stream's batches, and where rank 0 serves; None while there is none."""
        return self.lease.ranks if self.lease is not None and self.lease.stream is not None else None

    def _end_folded(self, peer: Peer, hello: LearnerHello) -> None:
        """Tell a learner of the end of folded lives that it knows. It may have been away when they ended."""
        known = {(place.slot, place.incarnation) for place in hello.position}
        known |= {(int(slot), int(incarnation)) for slot, incarnation in (name.split("/") for name in hello.held)}
        for slot, incarnation in sorted(known):
            if self._store.is_folded(slot, incarnation):
                self._outbox.send(peer, _folded_end(slot, incarnation))

    def forget(self, source: Source) -> None:
        """Forget what the learner was told of a source whose life was folded. The learner may forget it too."""
        if self.lease is not None:
            self.lease.told.pop(source.key, None)
            self._outbox.send(self.lease.stream, _folded_end(*source.key))

    def _lease_for(self, hello: LearnerHello) -> LearnerLease | None:
        """Return the lease for a learner, or None for an old one. The newest wins.

        A learner that claims an epoch is the newest if the broker never gave out a higher one.
        """
        holder, state = self.lease, self._state
        if holder is not None and same_token(holder.hello.token, hello.token):
            holder.epoch = state.epoch = max(holder.epoch, hello.epoch)
            return holder
        own = digest_of(hello.token)
        if state.learner_token and same_token(state.learner_token, own):
            # The learner had the lease under an earlier broker, whose answer may not have reached this connection.
            granted, state.epoch = False, max(state.epoch, hello.epoch)
        elif hello.epoch and (hello.epoch < state.epoch or (hello.epoch == state.epoch and state.learner_token)):
            return None
        else:
            granted, state.epoch = not hello.epoch, hello.epoch or max(state.epoch, self._store.weights[0]) + 1
        state.learner_token = own
        if holder is not None:
            self._fence(holder.stream)
            self._fence(holder.publisher)
        self.lease = LearnerLease(hello, state.epoch, granted=granted)
        return self.lease

    def on_gone(self, peer: Peer) -> None:
        """Note that a connection is closed. The lease stays until another learner comes."""
        if self.lease is not None and peer == self.lease.stream:
            self.lease.weights_told.pop(peer, None)
            self.lease.stream = None

    def expel(self, peer: Peer) -> None:
        """Forget a connection that the broker ends."""
        self.on_gone(peer)
        if self.lease is not None and peer == self.lease.publisher:
            self.lease.weights_told.pop(peer, None)
            self.lease.publisher = None

    def _fence(self, peer: Peer | None) -> None:
        detail = f"a newer {self._who} (epoch {self._state.epoch}) has taken over; this one must stop"
        self._outbox.send(peer, Fenced(detail=detail))

    def dismiss(self, detail: str) -> None:
        """End the session of the lease holder, for the reason in `detail`."""
        for peer in self.lease.connections() if self.lease is not None else ():
            self._outbox.send(peer, Fenced(detail=detail))

    def _send_welcome(self, peer: Peer, learner: LearnerLease, spaces: dict[str, Any]) -> None:
        learner.weights_told[peer] = self.weights_told
        welcome = LearnerWelcome(
            fleet_id=self.fleet_id,
            epoch=learner.epoch,
            spaces=spaces,
            published=self._store.weights,
            maps_weights=True,
            **self.weights_told,
        )
        self._outbox.send(peer, welcome)

    def raise_epoch(self, version: Version, spaces: dict[str, Any]) -> None:
        """Raise the epoch above `version`, which a worker or Redis knows.

        A broker that lost its state may give out an epoch that was used before. Workers would ignore such a learner's
        weights as old, so its lease gets a higher epoch.
        """
        learner = self.lease
        if version[0] > self._state.epoch:
            self._state.epoch = version[0]
            if learner is None:
                self._state.learner_token = ""  # the last learner that is known is not the one with this epoch
        if learner is None or version <= self._store.weights:
            return
        if version[0] > learner.epoch or (learner.granted and version[0] == learner.epoch):
            learner.epoch = self._state.epoch = version[0] + 1
            for peer in learner.connections():
                self._send_welcome(peer, learner, spaces)

    def may_publish(self, peer: Peer, version: Version, spaces: dict[str, Any]) -> bool:
        """Return whether weights of this version, from this peer, are the lease holder's. Otherwise tell the peer."""
        learner = self.lease
        if learner is None or peer != learner.publisher:
            self._outbox.ask_hello(peer)
            return False
        if version[0] != learner.epoch:
            self._send_welcome(peer, learner, spaces)
            return False
        return True

    def on_rows(self, peer: Peer, message: LearnerRows) -> None:
        """Tell observers the rows that came for the first time, if the lease holder logged them."""
        learner = self.lease
        if learner is None or peer != learner.publisher:
            self._outbox.ask_hello(peer)
            return
        new = []
        for row in message.rows:
            if self._newest_row < (row.epoch, row.number) and row.epoch <= learner.epoch:
                self._newest_row = (row.epoch, row.number)
                new.append(row)
        for observer in self._store.observers if new else ():
            observer.logged(new)

    # -- commits ------------------------------------------------------------------------------------------------------

    def on_commit(self, peer: Peer, commit: Commit, now: float) -> None:
        """Settle the batches that the learner has settled, and give it credit for those it handed to its user."""
        learner = self.lease
        if learner is None or peer != learner.stream:
            self._outbox.ask_hello(peer)
            return
        learner.heard_at, learner.waiting = now, commit.waiting
        settles = [self._store.learn_position(position) for position in commit.position]
        if any(settles) or learner.committed_at is None:
            learner.committed_at = now
        learner.take_consumed(commit.consumed_batches)
        if commit.figures is not None:
            self.measures.take(commit.figures, now)
        self._store.limit_window(commit.window_steps, commit.consumed_batches)
        if now < learner.next_check:
            return
        learner.next_check = now + CHECK_S
        if learner.missing_for(commit.in_hand, self._store.sent_and_unsettled(), now) > RESEND_S:
            self._outbox.ask_hello(peer, "a batch sent to you has not arrived; say HELLO again")

    # -- delivery -----------------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Send the batches that the learner has room for. News of a dropped batch or a source's end takes no room."""
        learner = self.lease
        if learner is None or learner.stream is None:
            return
        while (first := self._store.queue.first()) is not None:
            source, held = first
            is_batch = held is not None and held.frames is not None and not held.dropped
            if is_batch and not learner.has_room():
                return
            self._store.queue.pop_first()
            self._announce(source, learner, source.accepted if held is None else held.seq)
            if held is None:
                self._outbox.send(learner.stream, _source_end(source))
            elif held.frames is None or held.dropped:
                held.with_learner = True
                self._outbox.send(learner.stream, _source_gap(source, held))
            else:
                held.mark_given()
                learner.sent(held.nbytes)
                self._outbox.send(learner.stream, held.frames if learner.reads_all else self._readable(held.frames))

    def _readable(self, frames: list[Buffer]) -> list[Buffer]:
        """Return a batch without compression.

        If that fails, return it unchanged: the learner then drops it as poison.
        """
        try:
            return decompressed(frames)
        except DecodeError as error:
            text = f"a batch for a learner that reads no lz4 cannot be unpacked: {error.detail}"
            self._warnings.warn(b"", error.reason, text)
            return frames

    def _announce(self, source: Source, learner: LearnerLease, seq: int) -> None:
        """Tell the learner, before `seq` of a source, what became of batches that were settled without it, if any."""
        if learner.told.get(source.key, -1) < source.settled.seq:
            start = SourceStart(slot=source.slot, incarnation=source.incarnation, settled=source.settled)
            self._outbox.send(learner.stream, start)
        learner.told[source.key] = seq

    def send_status(self, workers: list[Source], spaces: dict[str, Any], waiting: int) -> None:
        """Send the heartbeat to the learner, for which `waiting` of the `workers` wait."""
        learner = self.lease
        self.weights_told = next((source.weights_told for source in workers if source.weights_told), {})
        if learner is None:
            return
        refused = [source.refused for source in workers if source.refused]
        status = Status(
            epoch=learner.epoch,
            held_batches=self._store.held_batches(),
            workers=len(workers),
            workers_here=sum(1 for source in workers if source.host and source.host == learner.hello.host),
            workers_blocked=waiting,
            spaces=spaces,
            published=self._store.weights,
            rows_stored=self.rows_stored,
            waiting_for=self._store.rounds.waiting_for() if self._store.rounds.active else "",
            refused=max(refused, key=lambda told: told.version, default=None),
        )
        for peer in learner.connections():
            # With a thousand names the shapes are most of a heartbeat. While no worker lives no shapes are known, and
            # the connection's last ones stay valid.
            news = {} if learner.weights_told.get(peer) == self.weights_told else self.weights_told
            if news:
                learner.weights_told[peer] = news
            self._outbox.send(peer, status.model_copy(update=news) if news else status)

    def name_of(self, peer: Peer) -> str:
        """Return the name of a peer that is a connection of the learner; "" for any other."""
        lease = self.lease
        return f"the {self._who} (epoch {lease.epoch})" if lease is not None and peer in lease.connections() else ""

    def waits_for(self) -> str:
        """Return which peer a worker without credit waits for: the learner, or another group, or "broker"."""
        return self._waits_for if self.lease is None or not self.lease.has_room() else "broker"


def _source_end(source: Source) -> SourceEnd:
    return SourceEnd(slot=source.slot, incarnation=source.incarnation, seq=source.accepted, reason=source.end_reason)


def _folded_end(slot: int, incarnation: int) -> SourceEnd:
    return SourceEnd(slot=slot, incarnation=incarnation, seq=0, reason=Discard.WORKER_KILLED)


def _source_gap(source: Source, held: StoredBatch) -> SourceGap:
    batch = HeldBatch(seq=held.seq, steps=held.steps, chunks=held.chunks)
    reason = held.dropped or Drop.BROKER_LOST
    return SourceGap(slot=source.slot, incarnation=source.incarnation, batch=batch, reason=reason)
