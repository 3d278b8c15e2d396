"""Aborted episodes beside a figure that leaves them out: when they are told, and when the figure decides nothing.

An env that fails only in its bad episodes makes the mean of the others look good.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_TOLD_ABOVE, _DOUBTED_ABOVE = 0.01, 0.05
"""Shares of aborted episodes: above the first they stand beside each figure, above the second it decides nothing."""


def _share(finished: int, aborted: int) -> float:
    return aborted / (finished + aborted) if aborted else 0.0


def aborted_in_words(finished: int, aborted: int) -> str:
    """Return how many episodes a figure of the `finished` ones leaves out; "" for at most 1 % of all."""
    share = _share(finished, aborted)
    return f"{aborted:,} of {finished + aborted:,} aborted, {100 * share:.2g} %" if share > _TOLD_ABOVE else ""


def doubt(finished: int, aborted: int) -> str:
    """Return why a figure of the `finished` episodes decides nothing; "" if at most 5 % of all were aborted."""
    share = _share(finished, aborted)
    if share <= _DOUBTED_ABOVE:
        return ""
    of_all = f"{aborted:,} of {finished + aborted:,} episodes were aborted ({100 * share:.2g} %)"
    return f"{of_all}, more than {100 * _DOUBTED_ABOVE:g} %, and are in no mean"


class AbortedWindow:
    """Counts the episodes that were aborted while the newest `window` episodes finished."""

    def __init__(self, window: int) -> None:
        self._after: deque[int] = deque([0], maxlen=window + 1)
        """Those aborted after each finished episode and before the next one; the first is of the one before these."""

    def add(self, finished: int, aborted: int) -> None:
        """Count episodes that ended since the last call."""
        self._after.extend([0] * min(finished, self._after.maxlen or 0))
        self._after[-1] += aborted

    @property
    def counts(self) -> tuple[int, int]:
        """Return (finished, aborted) of the window."""
        return len(self._after) - 1, sum(self._after)

    def get_state(self) -> list[int]:
        """Return plain JSON values for a checkpoint."""
        return list(self._after)

    def set_state(self, state: Sequence[int]) -> None:
        """Go on from the result of `get_state`."""
        self._after = deque(state or [0], maxlen=self._after.maxlen)
