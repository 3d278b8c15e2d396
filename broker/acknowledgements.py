"""What workers are told of their batches: which are accepted, which are settled, and how many more they may send."""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.broker.batch_store import BatchStore
from headrace.broker.limits import BrokerLimits
from headrace.broker.outbox import Outbox
from headrace.broker.source import Source
from headrace.schemas.messages import Ack

_MOST_CREDIT = 1024

GATHER_S = 0.002
_GATHER = 8
"""How long, and for how many batches accepted or settled, an Ack may wait for what the next one would say: each Ack
wakes four threads, which costs more than all else that is done for a small batch."""


class Acknowledgements:
    """Gathers what changed into one Ack for each worker. `waits_for` says whom a worker without credit waits for."""

    def __init__(self, limits: BrokerLimits, store: BatchStore, outbox: Outbox, waits_for: Callable[[], str]) -> None:
        self._limits = limits
        self._store = store
        self._outbox = outbox
        self._waits_for = waits_for
        self.due_at = math.inf
        """When the next Ack is due, if nothing more changes."""

    def send(self, workers: int, now: float) -> None:
        """One Ack to each worker for whom something changed: at once if much did, else within `GATHER_S`.

        `workers` share the credit.
        """
        changed = self._store.changed
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
        """All that its worker may want to know, by now."""
        credit = self.credit(source, workers)
        source.told = source.progress()
        return Ack(
            slot=source.slot,
            incarnation=source.incarnation,
            accepted=source.accepted,
            settled=source.settled,
            credit=credit,
            weights=self._store.weights,
            closed=source.closed,
            steps_elsewhere=self._store.steps - source.counted,
            waiting_for="" if credit > source.accepted else self._waits_for(),
        )

    def credit(self, source: Source, workers: int) -> int:
        """The highest batch that this worker, one of `workers`, may send.

        Its share of what room is left, and one batch in any case while the broker holds none of its batches, so that
        whatever is larger than a share gets through too.
        """
        if source.ended:
            return source.accepted
        if self._limits.overflow == "drop_oldest":
            return source.accepted + _MOST_CREDIT
        room = max(0, self._limits.max_held_bytes - self._store.nbytes)
        batches = room // max(1, workers) // (source.batch_bytes or self._limits.max_batch_bytes)
        return source.accepted + max(min(batches, _MOST_CREDIT), 0 if source.held else 1)
