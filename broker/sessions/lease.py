"""The learner's lease: one learner at a time, the newest wins, and its credit."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from headrace.broker.batches.source import Peer
from headrace.schemas.frames.compression import readable_encodings
from headrace.schemas.messages import LearnerHello, Ranks

_WAITS_S = 1.5
"""A stream in which its user waits says so twice a second. One that is silent for longer computes."""


@dataclass(slots=True)
class LearnerLease:
    """The lease and the learner that holds it. The learner's stream and publisher connections share its token."""

    hello: LearnerHello
    epoch: int
    stream: Peer | None = None
    publisher: Peer | None = None
    ranks: Ranks | None = None
    """The ranks that share the stream's batches, and where rank 0 serves; None for a stream of one process."""
    window_batches: int = 1
    window_bytes: int = 1
    outstanding: deque[int] = field(default_factory=deque)
    """Bytes of each batch sent on this connection that the learner has not yet handed to its user."""
    outstanding_bytes: int = 0
    consumed: int = 0
    behind_since: float | None = None
    next_check: float = 0.0
    committed_at: float | None = None
    """Time of the last commit that settled a batch; of the learner's first word before that."""
    told: dict[tuple[int, int], int] = field(default_factory=dict)
    """The last batch of each source that the learner was told of on this connection."""
    weights_told: dict[Peer, dict[str, Any]] = field(default_factory=dict)
    """The newest facts about the workers' weights that each connection was told."""
    reads_all: bool = False
    """True if it reads every encoding of arrays that this broker takes from workers."""
    heard_at: float = 0.0
    """Time of its newest HELLO or commit."""
    waiting: bool = False
    """True if the learner's newest commit says that its user waits for a batch."""
    granted: bool = False
    """True when this broker gave out the epoch; False when the learner claimed it."""

    def attach_stream(self, peer: Peer, hello: LearnerHello) -> None:
        """Note that a stream connected or reconnected.

        Batches under way on its last connection are lost, received ones are not.
        """
        self.weights_told.pop(self.stream or b"", None)
        self.stream, self.ranks = peer, hello.ranks
        self.window_batches, self.window_bytes = hello.window_batches, hello.window_bytes
        self.reads_all = set(readable_encodings()) <= set(hello.encodings)
        self.outstanding.clear()
        self.outstanding_bytes = 0
        self.consumed = hello.received_batches
        self.behind_since, self.waiting = None, False
        self.told.clear()

    def attach_publisher(self, peer: Peer) -> None:
        """Note that a publisher connected or reconnected."""
        self.weights_told.pop(self.publisher or b"", None)
        self.publisher = peer

    def connections(self) -> list[Peer]:
        """Return the connections of the stream and the publisher, as far as there are any."""
        return [peer for peer in (self.stream, self.publisher) if peer is not None]

    def has_room(self) -> bool:
        """Return whether another batch may be sent. A learner without outstanding batches may get one of any size."""
        if self.stream is None:
            return False
        if not self.outstanding:
            return True
        return len(self.outstanding) < self.window_batches and self.outstanding_bytes < self.window_bytes

    def sent(self, nbytes: int) -> None:
        """Note that a batch of `nbytes` was sent to the learner."""
        self.outstanding.append(nbytes)
        self.outstanding_bytes += nbytes

    def waits(self, now: float) -> bool:
        """Return whether its user waits for a batch, and none is on its way. Else it may compute on its last ones."""
        return self.waiting and not self.outstanding and now - self.heard_at < _WAITS_S

    def missing_for(self, in_hand: int, sent: int, now: float) -> float:
        """Return for how many seconds the learner has held fewer batches than were sent to it and not committed."""
        if in_hand >= sent:
            self.behind_since = None
            return 0.0
        self.behind_since = now if self.behind_since is None else self.behind_since
        return now - self.behind_since

    def take_consumed(self, consumed: int) -> None:
        """Note how many of all batches that it ever received the learner has handed out."""
        while self.consumed < consumed and self.outstanding:
            self.outstanding_bytes -= self.outstanding.popleft()
            self.consumed += 1
        self.consumed = max(self.consumed, consumed)
