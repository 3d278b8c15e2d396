"""Acknowledgements to workers: which batches are accepted, which are settled, and how many more a worker may send."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from headrace.broker.batches.batch_store import BatchStore
from headrace.broker.batches.limits import BrokerLimits
from headrace.broker.batches.source import Source
from headrace.broker.sessions.consumer_groups import ConsumerGroups
from headrace.broker.sessions.outbox import Outbox
from headrace.schemas.basics.bounds import MOST_COUNT, WINDOW
from headrace.schemas.messages import Ack

_MOST_CREDIT = 1024

GATHER_S = 0.002
_GATHER = 8
"""An Ack may wait this long, and for this many batches accepted or settled, to cover the next one too. Each Ack wakes
four threads, which costs more than all other work for a small batch.
"""


class Acknowledgements:
    """Gathers what changed into one Ack for each worker.

    `waits_for` names the peer that a worker without credit waits for.
    """

    def __init__(
        self,
        limits: BrokerLimits,
        store: BatchStore,
        outbox: Outbox,
        groups: ConsumerGroups,
        waits_for: Callable[[], str],
    ) -> None:
        self._limits = limits
        self._store = store
        self._outbox = outbox
        self._groups = groups
        self._waits_for = waits_for
        self.due_at = math.inf
        """Time at which the next Ack is due if nothing more changes."""

    def send(self, workers: int, now: float) -> None:
        """Send one Ack to each worker whose state changed: at once if much changed, else within `GATHER_S`.

        `workers` is the number of workers that share the credit.
        """
        changed = self._store.changed
        changed |= self._groups.take_changed() & self._store.sources.keys()
        is_due = now >= self.due_at
        for source in [self._store.sources[key] for key in changed]:
            if is_due or source.progress() - source.told >= _GATHER:
                changed.discard(source.key)
                if source.peer is not None:
                    self._outbox.send(source.peer, self.ack(source, workers))
        if is_due or not changed:
            self.due_at = math.inf
        if changed:
            self.due_at = min(self.due_at, now + GATHER_S)

    def ack(self, source: Source, workers: int) -> Ack:
        """Return the Ack with the present state of `source` for its worker."""
        source.told = source.progress()
        told = self.told(source, workers)
        return Ack(
            dropped=dict(source.dropped),
            closed=source.closed,
            waiting_for=self._awaited(source, has_credit=told["credit"] > told["accepted"]),
            **told,
        )

    def _awaited(self, source: Source, *, has_credit: bool) -> str:
        """Return which peer this worker waits for, as `Ack.waiting_for` names it."""
        rounds = self._store.rounds
        if not has_credit or source.blocked:
            for group, own in self._groups.of(source):
                if own.settled.seq < source.settled.seq:
                    return f"group {group.name}"
        if not has_credit:
            return self._waits_for()
        return rounds.waiting_for() if rounds.active else ""

    def told(self, source: Source, workers: int) -> dict[str, Any]:
        """Return the fields that an Ack and a welcome have in common. Hold the worker to its credit from now on."""
        store, limits, credit = self._store, self._limits, self.credit(source, workers)
        groups = list(self._groups.of(source))
        for its in (source, *(own for _, own in groups)):
            its.credit = max(its.credit, credit)
        left = None if store.max_env_steps is None else max(0, store.max_env_steps - store.steps)
        return {
            "slot": source.slot,
            "incarnation": source.incarnation,
            "accepted": min((source.accepted, *(own.accepted for _, own in groups))),
            "settled": source.settled,
            "groups": {group.name: own.settled for group, own in groups},
            "credit": credit,
            "window_steps": self._window_steps(source, workers),
            "synchronous": store.rounds.known,
            "round_steps": store.rounds.share(source),
            "weights": store.weights,
            "steps_elsewhere": store.rounds.steps_elsewhere(source, store.steps),
            "steps_share": None if left is None else min(-(-left // max(1, workers)), MOST_COUNT),
            "heartbeat_interval_s": limits.heartbeat_interval(workers),
        }

    def _window_steps(self, source: Source, workers: int) -> int:
        """Return how many steps one of `workers` may keep unsettled: its share of what the learner wants, or 0.

        In synchronous sampling the worker may keep its share of two rounds, since the learner may publish before it
        commits. While there are weights and no learner has told this broker a number, a worker keeps one cut: the
        weights are old once the learner comes.
        """
        if self._store.rounds.active:
            return 2 * self._store.rounds.share(source)
        if self._store.window_steps is None:
            return int(self._store.weights != (0, 0))
        return -(-self._store.window_steps // max(1, workers))

    def credit(self, source: Source, workers: int) -> int:
        """Return the highest batch that this worker, one of `workers`, may send.

        It is the worker's share of the room left. While the broker holds none of its batches, and is not full, the
        worker may send one in any case, so that a batch larger than a share gets through too. With `drop_oldest` there
        is always room once the broker may drop batches. No worker keeps more than `WINDOW` batches unsettled. Where
        groups hold batches too, the one with the least room decides.
        """
        credits = (self._credit(group.store, own, workers) for group, own in self._groups.of(source))
        return min((self._credit(self._store, source, workers), *credits))

    def _credit(self, store: BatchStore, source: Source, workers: int) -> int:
        """Return the same for what one store holds of the worker."""
        if source.ended:
            return source.accepted
        if store.makes_room:
            batches = _MOST_CREDIT
        else:
            limits, share = self._limits, max(1, workers)
            batches = max(0, store.room) // share // (source.batch_bytes or limits.max_batch_bytes)
            if limits.max_held_batches is not None:
                batches = min(batches, max(0, limits.max_held_batches - store.batches) // share)
            batches = max(min(batches, _MOST_CREDIT), 0 if source.held or not store.takes_one else 1)
        return max(source.accepted, min(source.accepted + batches, source.settled.seq + WINDOW))
