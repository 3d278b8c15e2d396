"""Ends of workers, kept until the first learner connects: it may hold batches that this broker never saw."""

from __future__ import annotations

from collections import Counter

from headrace.broker.batches.source import Peer
from headrace.schemas.messages import LastWords

Life = tuple[int, int]
"""(slot, incarnation)."""

MOST_BYTES = 64 << 20
"""About the memory that the ends told by one group's supervisors may take. A thousand workers that die with 16 batches
and 100 open episodes each leave a third of it. A supervisor repeats an end that did not fit, so nothing is lost.
"""

_BYTES_OF_LIFE, _BYTES_OF_BATCH = 4096, 512


class WaitingEnds:
    """Last words by life, each with the peer that gets the Ack; None for an end that the broker noted itself."""

    def __init__(self) -> None:
        self._ends: dict[Life, tuple[Peer | None, LastWords, str | None]] = {}
        self._bytes: Counter[str | None] = Counter()

    def __contains__(self, life: Life) -> bool:
        return life in self._ends

    def __bool__(self) -> bool:
        return bool(self._ends)

    def add(self, peer: Peer, words: LastWords, group: str | None) -> bool:
        """Keep the last words that a supervisor of a group sent, in place of earlier ones about the same life.

        Return False, and change nothing, if the ends of this group take too much memory.
        """
        before = self._ends.get((words.slot, words.incarnation))
        grown = _size(words) - (_size(before[1]) if before is not None and before[2] == group else 0)
        if grown > 0 and self._bytes[group] + grown > MOST_BYTES:
            return False
        self._bytes[group] += grown
        self._ends[words.slot, words.incarnation] = (peer, words, group)
        return True

    def note(self, words: LastWords) -> None:
        """Keep an end that the broker noted itself, of a life that it knows."""
        self._ends[words.slot, words.incarnation] = (None, words, None)

    def take_all(self) -> list[tuple[Peer | None, LastWords]]:
        """Return and forget all ends, in the order in which they came."""
        ends = [(peer, words) for peer, words, _ in self._ends.values()]
        self._ends.clear()
        self._bytes.clear()
        return ends


def _size(words: LastWords) -> int:
    told = words.open_episodes
    rows = len(told.rows) if told is not None else 0
    return _BYTES_OF_LIFE + _BYTES_OF_BATCH * len(words.window) + rows
