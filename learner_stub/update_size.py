"""Measures the number of steps in an update, and derives how many the fleet should have under way.

A step that waits grows old: the learner publishes newer weights meanwhile. So workers keep about as many steps as one
update takes, in addition to those that the learner trains on now.
"""

from __future__ import annotations

from collections import deque

_UPDATES = 8
"""Number of updates over which the size is averaged."""


class UpdateSize:
    """The number of steps in one update: set by the user, or else measured between the ends of updates.

    An update ends when a version of the weights is published, or, if none ever is, when the user commits. With
    `auto_commit`, batches are settled while the learner still gathers an update.
    """

    def __init__(self, told: int | None, *, auto_commit: bool) -> None:
        self.has_ended = False
        """True once an update has ended. The first published version ends one without steps."""
        self._told = told
        self._auto_commit = auto_commit
        self._gathered = 0
        self._recent: deque[int] = deque(maxlen=_UPDATES)
        self._batch = 0
        """Steps of the largest recent batch."""
        self._widened = 1

    def take(self, steps: int) -> None:
        """Note that a batch of `steps` was handed out."""
        self._gathered += steps
        self._batch = max(steps, self._batch * 15 // 16)

    def end(self) -> None:
        """Note that the learner has trained on what it was handed."""
        self.has_ended = True
        if self._gathered:
            self._recent.append(self._gathered)
        self._gathered, self._widened = 0, 1

    def widen(self) -> None:
        """Ask for twice as much until the end of this update: what was asked for was not enough."""
        self._widened = min(2 * self._widened, 1 << 10)

    @property
    def steps(self) -> int:
        """Return the size of an update; 0 if it is not known and no step was gathered yet."""
        usual = self._told or (sum(self._recent) // len(self._recent) if self._recent else 0)
        # Where nothing is settled before the end, all steps of a larger update must fit.
        return usual if usual and self._auto_commit else max(usual, self._gathered)

    def window_steps(self) -> int | None:
        """Return how many steps the fleet should have under way, or 0 for any number.

        The number is one update more than the steps in hand. In hand is an update if the learner commits after
        training, or the last batch if asking for the next one commits it. While the size is unknown the answer is
        small, so that the first update is not trained on a window full of steps of the first weights. None before the
        first batch.
        """
        if self._told is None and not self.has_ended:
            return 0 if self._gathered and self._auto_commit else None
        in_hand = self._batch if self._auto_commit else self.steps
        return max(1, (self.steps + in_hand) * self._widened)
