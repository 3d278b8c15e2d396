"""The consumer groups of one fleet besides the learner's.

    worker ──▶ core's BatchStore ──accepted──▶ ConsumerGroup "record" ──▶ its reader
           ◀── Ack: settled by the learner, and by each group that holds

A group exists because the config names it, or because a reader has asked for it; then workers never wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from headrace.broker.batches.batch_store import BatchStore
from headrace.broker.batches.broker_observer import BrokerObserver
from headrace.broker.batches.limits import BrokerLimits, BrokerState, GroupState
from headrace.broker.batches.source import Peer, Source, StoredBatch
from headrace.broker.sessions.consumer_group import ConsumerGroup, skip_of
from headrace.broker.sessions.learner_sessions import LearnerSessions
from headrace.broker.sessions.outbox import Outbox
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import LedgerRow, Settled, WorkerTotals
from headrace.schemas.basics.bounds import MOST_GROUPS, Version
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.messages import GroupHello, LearnerWelcome, Skip

_LOOK_S = 1.0


class ConsumerGroups(BrokerObserver):
    """The groups by name, and the way of batches and messages to them. A core has one such object."""

    def __init__(
        self, fleet_id: str, limits: BrokerLimits, state: BrokerState, store: BatchStore, outbox: Outbox, now: float
    ) -> None:
        self.by_name: dict[str, ConsumerGroup] = {}
        self.declared: Mapping[str, Literal["wait", "drop"]] = limits.consumer_groups
        """The groups that the config names."""
        self._fleet_id = fleet_id
        self._limits = limits
        self._state = state
        self._store = store
        self._outbox = outbox
        self._next_look = now
        for name in {**self.declared, **state.groups}:
            self._open(name, now)
        self._note_holding()

    def _open(self, name: str, now: float) -> ConsumerGroup:
        state = self._state.groups.setdefault(name, GroupState())
        on_slow = self.declared.get(name, "drop")
        group = ConsumerGroup(name, self._fleet_id, on_slow, self._limits, state, self._outbox, now)
        self.by_name[name] = group
        group.store.publish(self._store.weights)
        for source in self._store.sources.values():
            group.meet(source, None, source.totals)
            for held in source.held.values():
                group.take(source, held, skip_of(source, held), source.settled.total())
            if source.ended:
                group.ended(source)
        return group

    def _note_holding(self) -> None:
        self.holding = [group for group in self.by_name.values() if group.is_holding]
        """The groups for which workers wait."""

    # -- what readers say ---------------------------------------------------------------------------------------------

    def on_hello(self, peer: Peer, hello: GroupHello, spaces: dict[str, Any], now: float) -> None:
        """Handle the HELLO of a group's reader, which makes the group if there is none, or of one who removes it."""
        group = self.by_name.get(hello.group)
        if hello.channel == "remove":
            self._remove(peer, hello.group)
        elif group is None and len(self.by_name) >= MOST_GROUPS:
            known = ", ".join(sorted(self.by_name))
            self._outbox.reject(peer, "too_many_groups", f"a fleet has {MOST_GROUPS} consumer groups at most: {known}")
        else:
            group = group or self._open(hello.group, now)
            group.learners.on_hello(peer, hello, spaces, now)
            group.go_on()

    def _remove(self, peer: Peer, name: str) -> None:
        group = self.by_name.get(name)
        if group is None:
            known = ", ".join(sorted(self.by_name)) or "none"
            self._outbox.reject(peer, "unknown_group", f"there is no consumer group {name!r}; the groups are: {known}")
        elif name in self.declared:
            detail = f"broker.consumer_groups names {name!r}; take it out of the config, and start the broker again"
            self._outbox.reject(peer, "group_declared", detail)
        else:
            group.learners.dismiss(f"consumer group {name!r} was removed")
            del self.by_name[name], self._state.groups[name]
            self._note_holding()
            self._outbox.send(peer, LearnerWelcome(fleet_id=self._fleet_id, epoch=1))

    def sessions_of(self, peer: Peer) -> LearnerSessions | None:
        """Return the sessions of the group whose reader has this connection; None for any other peer."""
        for group in self.by_name.values():
            if group.learners.lease is not None and peer in group.learners.lease.connections():
                return group.learners
        return None

    # -- what the core hears ------------------------------------------------------------------------------------------

    def meet(self, source: Source, known: Mapping[str, Settled], totals: WorkerTotals) -> None:
        """Hear that a worker has joined, with what it knows of the groups."""
        for name, group in self.by_name.items():
            group.meet(source, known.get(name), totals)

    def accepted(self, source: Source, held: StoredBatch, told: BatchHeader | Skip) -> None:
        """Give each group a new batch."""
        if self.by_name:
            before = source.accepted_count[0] - held.steps, source.accepted_count[1] - held.chunks
            for group in self.by_name.values():
                group.take(source, held, told, before)

    def resent(self, source: Source, held: StoredBatch, told: BatchHeader | Skip) -> bool:
        """Give the groups that lack it a batch which the learner needs no more. Return whether one took it.

        A worker sends such a batch again to a broker that has just started.
        """
        lacking = [group for group, own in self.of(source) if held.seq == own.accepted + 1]
        for group in lacking:
            group.take(source, held, told, (0, 0))
        return bool(lacking)

    def excess(self, source: Source, held: StoredBatch) -> tuple[str, str] | None:
        """Return why a holding group has no room for the next batch of a worker, as `BatchStore.excess`; else None."""
        told = (group.store.excess(own, held) for group, own in self.of(source) if held.seq == own.accepted + 1)
        return next((why for why in told if why), None)

    def ended(self, source: Source) -> None:
        """Tell each group that a life has ended."""
        for group in self.by_name.values():
            group.ended(source)

    def have_closed(self, source: Source) -> bool:
        """Return whether Redis has closed books of a life for each group."""
        return all(group.folding.has_closed(source.key) for group in self.by_name.values())

    def publish(self, version: Version) -> None:
        """Note the newest version of the weights, from which readers measure their lag."""
        for group in self.by_name.values():
            group.store.publish(version)

    def restore(self, name: str, rows: Iterable[LedgerRow], folded: Mapping[int, FoldedLives]) -> None:
        """Take over the books of a group that an earlier broker left. Those of a group that was removed are ignored."""
        if name in self.by_name:
            self.by_name[name].restore(rows, folded)

    def tick(self, now: float) -> None:
        """Let time pass for each group. Now and then show it all lives: an earlier broker may have known more."""
        is_look = now >= self._next_look
        if is_look:
            self._next_look = now + _LOOK_S
        for group in self.by_name.values():
            for source in self._store.sources.values() if is_look else ():
                group.look_at(source)
            group.tick(now)

    # -- what workers are told ----------------------------------------------------------------------------------------

    def of(self, source: Source) -> Iterator[tuple[ConsumerGroup, Source]]:
        """Yield each holding group with its own source of this life."""
        for group in self.holding:
            yield group, group.store.source(*source.key)

    def take_changed(self) -> set[tuple[int, int]]:
        """Return the lives of which a holding group has accepted or settled batches since the last call."""
        changed: set[tuple[int, int]] = set()
        for group in self.by_name.values():
            if group.is_holding:
                changed |= group.store.changed
            group.store.changed.clear()
        return changed

    # -- what goes out ------------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Send each group's reader the batches that it has room for."""
        for group in self.by_name.values():
            group.learners.deliver()

    def send_status(self, workers: list[Source], spaces: dict[str, Any]) -> None:
        """Send each group's reader the heartbeat."""
        for group in self.by_name.values():
            waiting = sum(1 for source in workers if group.holds_up(source))
            group.learners.send_status(workers, spaces, waiting)
