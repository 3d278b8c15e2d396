"""The count of messages that the broker refused, with few lines in the log."""

from __future__ import annotations

import logging
from collections import Counter

from headrace.schemas.basics.counted_warnings import CountedWarnings

log = logging.getLogger(__name__)

_MOST_NAMED = 1000
_MOST_TOLD = 3
_LONGEST_NAME = 200


class Refusals:
    """Counts refusals by peer and kind. Lines of one kind are at least ten seconds apart: some peers try for ever."""

    def __init__(self) -> None:
        self.total = 0
        self._warnings = CountedWarnings(log)
        self.counts: Counter[tuple[str, str]] = Counter()
        """By (peer, kind). Peers beyond the first 1,000 pairs are counted together."""

    def most(self) -> list[tuple[str, str, int]]:
        """Return (peer, kind, count) of the three pairs that were refused most. A peer may have chosen its name."""
        return [(peer[:_LONGEST_NAME], kind, count) for (peer, kind), count in self.counts.most_common(_MOST_TOLD)]

    def note(self, peer: str, kind: str, detail: str) -> None:
        """Count one refusal, and log it where that is due. `detail` may hold text of the peer."""
        self.total += 1
        key = (peer, kind)
        if key not in self.counts and len(self.counts) >= _MOST_NAMED:
            key = ("other peers", kind)
        self.counts[key] += 1
        shown = detail.encode("unicode_escape").decode()
        text = f"refused a message of {key[0]}: {kind}: {shown}, {self.counts[key]} so far"
        self._warnings.warn(key[0].encode(), kind, text)
