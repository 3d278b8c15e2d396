"""Choice of batches to drop: those sampled with weights too old, and with `drop_oldest` the oldest past a bound.

The policy chooses the batches; `BatchStore` drops them. The policy never chooses a batch that a learner was given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from headrace.broker.batches.limits import BrokerLimits
from headrace.broker.batches.source import Source, StoredBatch
from headrace.schemas.accounts.ledger import Drop
from headrace.schemas.basics.bounds import Version


class DropPolicy:
    """The bounds of one broker, and the batches that they concern, oldest first."""

    def __init__(self, limits: BrokerLimits) -> None:
        self._limits = limits
        self.candidates: deque[tuple[Source, int]] = deque()
        """Batches that may be dropped. Those that were handed out or settled meanwhile are skipped."""
        self._drops_oldest = limits.overflow == "drop_oldest"
        self.is_passive = limits.max_staleness is None and not self._drops_oldest
        """True if no batch is ever dropped."""

    def add(self, source: Source, seq: int) -> None:
        """Note a batch that no learner has been given."""
        self.candidates.append((source, seq))
        self._oldest()  # forgets those in front that are gone

    # -- staleness ----------------------------------------------------------------------------------------------------

    def is_stale(self, held: StoredBatch, newest: Version) -> bool:
        """Return whether all steps of a batch were sampled more than `max_staleness` versions before `newest`.

        A batch without steps tells of ends of episodes only. (0, 0) means random actions, which are never stale. The
        weights of an earlier learner are behind all versions of the present one, as `ChunkBatch.lag` counts.
        """
        most = self._limits.max_staleness
        if most is None or not held.steps or held.weights == (0, 0) or held.weights >= newest:
            return False
        return newest[1] - (held.weights[1] if held.weights[0] == newest[0] else 0) > most

    def stale(self, newest: Version) -> Iterator[tuple[Source, StoredBatch]]:
        """Return the batches that are stale now."""
        if self._limits.max_staleness is None:
            return
        for source, seq in list(self.candidates):
            held = source.held.get(seq)
            if held is not None and may_be_dropped(held) and self.is_stale(held, newest):
                yield source, held

    def explain(self, reason: Drop, version: Version, newest: Version) -> str:
        """Return in words why a batch sampled with `version` is dropped for `reason`."""
        limits = self._limits
        if reason is Drop.STALE:
            return f"weights {version} are more than max_staleness = {limits.max_staleness} behind the newest, {newest}"
        bounds = {name: getattr(limits, name) for name in ("max_held_bytes", "max_held_batches")}
        said = ", ".join(f"{name} = {bound}" for name, bound in bounds.items() if bound is not None)
        return f"the learner is slower than the workers, and overflow = 'drop_oldest' keeps no more than {said}"

    # -- bounds of what is held ---------------------------------------------------------------------------------------

    def oldest_beyond(self, nbytes: int, batches: int, newest: StoredBatch) -> tuple[Source, StoredBatch] | None:
        """Return the oldest batch if the broker holds more than its bounds. Never return `newest`, just accepted."""
        most = self._limits.max_held_batches
        if not self._drops_oldest or (nbytes <= self._limits.max_held_bytes and (most is None or batches <= most)):
            return None
        oldest = self._oldest()
        return oldest if oldest is not None and oldest[1] is not newest else None

    def _oldest(self) -> tuple[Source, StoredBatch] | None:
        while self.candidates:
            source, seq = self.candidates[0]
            held = source.held.get(seq)
            if held is not None and may_be_dropped(held):
                return source, held
            self.candidates.popleft()
        return None


def may_be_dropped(held: StoredBatch) -> bool:
    """Return True if the batch was never given to a learner, which might have trained on it."""
    return not held.handed and not held.dropped
