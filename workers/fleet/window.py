"""The batches that a worker keeps because the broker or the learner may still need them, oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from headrace.schemas.accounts.ledger import HeldBatch, WorkerTotals
from headrace.schemas.basics.bounds import WINDOW
from headrace.schemas.frames.wire import Buffer, decompressed


@dataclass(slots=True)
class Shipment:
    """A batch in the window. `frames` is None once the batch is skipped."""

    batch: HeldBatch
    nbytes: int
    frames: list[Buffer] | None
    totals: WorkerTotals
    reason: str = ""
    """Reason for which the batch is skipped once its bytes are gone; "" while they are there."""
    dropped: bool = False
    """True if the learner will not get the batch, which then takes no room in the window."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The limits of the window in batches and bytes, and clocks in seconds."""

    window_batches: int = 16
    window_bytes: int = 256 << 20
    retry_s: float = 1.0
    connect_retry_s: float = 0.02
    """Pause before a HELLO is tried again while there is no connection."""
    window_steps: int = 0
    """Total steps below which the window has room for more batches, whatever their number.

    When envs are down, batches are small, and a learner that waits for steps needs more of them.
    """
    window_env_steps: int | None = None
    """Env steps in a full window; None where the size of batches varies."""
    follows_learner: bool = True
    """True if the learner's wanted steps under way replace the two limits above, once it has told them."""


class Window:
    """Batches `first`, `first` + 1, ... of one incarnation: all that are cut and not known to be settled by all.

    Those up to `settled` are kept for other consumer groups alone: the learner has settled them.
    """

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._shipments: deque[Shipment] = deque()
        self._nbytes = 0
        self.first = 1
        self.settled = 0
        self.learner_steps = 0
        """This worker's share of the steps that the learner wants under way; 0 while it has told none."""

    def __len__(self) -> int:
        return len(self._shipments)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the batches that are in memory."""
        return self._nbytes

    @property
    def next_seq(self) -> int:
        """Number that the next batch must have."""
        return self.first + len(self._shipments)

    def __getitem__(self, seq: int) -> Shipment:
        return self._shipments[seq - self.first]

    def has_room(self, batches: int) -> bool:
        """Return whether the `batches` of one cut fit. They always fit an empty window.

        The batches of a later drain must still fit the recorder too. Those that only other groups lack take none of
        `window_batches` and steps: a group that writes files commits many at once.
        """
        return self._fit(self._awaited(), len(self), self._nbytes, batches)

    def waits_for_groups(self, batches: int) -> bool:
        """Return whether there is no room, and would be if other groups had settled what the learner has."""
        awaited = [*self._awaited()]
        if len(awaited) == len(self) or self.has_room(batches):
            return False
        return self._fit(awaited, len(awaited), sum(shipment.nbytes for shipment in awaited), batches)

    def _awaited(self) -> Iterable[Shipment]:
        """Iterate over the batches that the learner has not settled."""
        return islice(self._shipments, max(0, self.settled - self.first + 1), None)

    def _fit(self, awaited: Iterable[Shipment], number: int, nbytes: int, batches: int) -> bool:
        """Return whether a cut fits beside `number` batches of `nbytes`; the learner has yet to settle `awaited`."""
        limits = self._limits
        if number + 2 * batches > WINDOW or (number and nbytes >= limits.window_bytes):
            return False
        follows = limits.follows_learner and self.learner_steps
        if not follows and number + batches <= limits.window_batches:
            return True  # no look at each batch: a worker asks before every fragment
        kept = [shipment.batch.steps for shipment in awaited if not shipment.dropped]
        if not kept:
            return True
        if follows:
            return self._fits_learner(kept, batches)
        return len(kept) + batches <= limits.window_batches or sum(kept) < limits.window_steps

    def _fits_learner(self, awaited: list[int], batches: int) -> bool:
        """Return whether at least half of another cut fits the learner's steps, if it is like the cuts in the window.

        So the window holds the number of cuts nearest to the learner's wish. `awaited` are the steps of each batch.
        """
        kept = len(awaited)
        return sum(awaited) * (2 * kept + batches) <= 2 * kept * self.learner_steps

    def add(self, shipment: Shipment) -> None:
        """Keep a batch. Raises ValueError unless its number is `next_seq`."""
        if shipment.batch.seq != self.next_seq:
            raise ValueError(f"batch {shipment.batch.seq} submitted where {self.next_seq} is next")
        self._shipments.append(shipment)
        self._nbytes += shipment.nbytes

    def held(self) -> list[HeldBatch]:
        """Return the counts of every batch."""
        return [shipment.batch for shipment in self._shipments]

    def forget(self, seq: int) -> None:
        """Forget the batches up to `seq`, which all have settled."""
        while self._shipments and self.first <= seq:
            self._nbytes -= self._shipments.popleft().nbytes
            self.first += 1
        self.first = max(self.first, seq + 1)

    def decompress(self) -> None:
        """Decompress the kept batches, for a broker that takes no compressed ones."""
        for shipment in self._shipments:
            if shipment.frames is not None:
                shipment.frames = decompressed(shipment.frames)
                nbytes = sum(map(len, shipment.frames))
                self._nbytes += nbytes - shipment.nbytes
                shipment.nbytes = nbytes

    def skip(self, seq: int, reason: str, *, keep_bytes: bool = False) -> None:
        """Free the bytes of batch `seq`, which the learner does not get for `reason`, if it is in the window.

        keep_bytes: other groups may still get it.
        """
        if self.first <= seq < self.next_seq and not self[seq].dropped:
            self[seq].reason, self[seq].dropped = reason, True
            if not keep_bytes:
                self._drop_bytes(self[seq])

    def _drop_bytes(self, shipment: Shipment) -> None:
        self._nbytes -= shipment.nbytes
        shipment.frames, shipment.nbytes = None, 0
