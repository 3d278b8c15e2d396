"""The hooks by which features of the broker hear what happens. The core knows no feature."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.broker.batches.source import Source, StoredBatch
from headrace.schemas.accounts.ledger import Settled
from headrace.schemas.basics.bounds import Version
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.frames.wire import Buffer
from headrace.schemas.messages import LearnerRow, Skip


class BrokerObserver:
    """Hooks that do nothing. A feature overrides those that it needs.

    The broker's thread calls a hook once the books have changed, and before an answer leaves. So a hook may not block.
    """

    def accepted(self, source: Source, held: StoredBatch, told: BatchHeader | Skip) -> None:
        """Hear that a batch was accepted, or in its place a SKIP. Each is heard once."""

    def settled(self, source: Source, batches: Sequence[StoredBatch], before: Settled) -> None:
        """Hear which held batches of a source are settled now, each once. `before`: what was settled until then."""

    def ended(self, source: Source) -> None:
        """Hear that a source has ended: no batch of it comes any more."""

    def reported(self, source: Source) -> None:
        """Hear that a worker has sent a heartbeat, which is `source.figures.beat` now."""

    def published(self, version: Version, frames: list[Buffer]) -> None:
        """Hear that the learner has published newer weights. `frames`: the whole message."""

    def logged(self, rows: Sequence[LearnerRow]) -> None:
        """Hear the rows that the learner has logged. Each is heard once."""

    def tick(self, now: float) -> None:
        """Hear that time has passed, several times a heartbeat interval."""

    def close(self, *, in_order: bool) -> None:
        """Hear that the broker ends, `in_order` or by an error."""
