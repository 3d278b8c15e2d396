"""Measures the number of steps in an update, and derives how many the fleet should have under way.

A step that waits grows old: the learner publishes newer weights meanwhile. So workers keep about as many steps as one
update takes, in addition to those that the learner trains on now.
"""

from __future__ import annotations

from collections import deque

_UPDATES = 8
"""Number of updates over which the size is averaged."""

_COMMITS = 64
"""An unfinished update counts with the steps of at most this many commits.

A recorder or an evaluation publishes weights once, so its update never ends.
"""


class UpdateSize:
    """The number of steps in one update: set by the user, or else measured between the ends of updates.

    An update ends when a version of the weights is published, or, if none ever is, when the user commits. With
    `auto_commit`, batches are settled while the learner still gathers an update: each is committed by a later one, with
    `rounds_in_hand` in hand at a time.
    """

    def __init__(self, told: int | None, *, auto_commit: bool, rounds_in_hand: int = 1) -> None:
        self.has_ended = False
        """True once an update has ended. The first published version ends one without steps."""
        self._told = told
        self._auto_commit = auto_commit
        self._rounds_in_hand = rounds_in_hand
        self._gathered = 0
        self._commits: deque[int] = deque([0], maxlen=_COMMITS)
        """Steps in each of the last commits of the update that is being gathered; the last one is still to come."""
        self._recent: deque[int] = deque(maxlen=_UPDATES)
        self._batch = 0
        """Steps of the largest recent batch."""
        self._widened = 1
        self._round = 0
        """Steps of a round for which the learner waits; 0 while it does not."""

    def take(self, steps: int) -> None:
        """Note that a batch of `steps` was handed out, or a round of several."""
        if self._auto_commit:
            self.commit()
        self._gathered += steps
        self._commits[-1] += steps
        self._batch = max(steps, self._batch * 15 // 16)

    def commit(self) -> None:
        """Note that all batches handed out are settled."""
        if self._commits[-1]:
            self._commits.append(0)

    def end(self) -> None:
        """Note that the learner has trained on all batches handed out."""
        self.has_ended = True
        if not self._gathered:
            return
        self._recent.append(self._gathered)
        self._gathered, self._widened, self._round = 0, 1, 0
        self._commits.clear()
        self._commits.append(0)

    def widen(self, round_steps: int = 0) -> None:
        """Ask for twice as many steps until the end of this update, since the number asked for was too small.

        round_steps: about as many steps as the round has for which the learner waits.
        """
        self._widened, self._round = min(2 * self._widened, 1 << 10), round_steps

    @property
    def steps(self) -> int:
        """Return the size of an update; 0 if it is not known and no step was handed out yet."""
        usual = self._told or (sum(self._recent) // len(self._recent) if self._recent else 0)
        # Where nothing is settled before the end, all steps of a larger update must fit.
        return usual if usual and self._auto_commit else max(usual, sum(self._commits))

    def window_steps(self) -> int | None:
        """Return how many steps the fleet should have under way, or 0 for as many as the workers' own limits allow.

        The number is one update more than the steps in hand. In hand is an update if the learner commits after
        training, or the last batch if asking for the next one commits it. While the size is unknown the answer is
        small, so that the first update is not trained on a window full of steps of the first weights. A learner that
        reads on without an update gets 0. None before the first batch.
        """
        is_first = self._told is None and self._widened == 1
        if is_first and not self.has_ended:
            return 0 if self._gathered and self._auto_commit else None
        if is_first and not self._recent and self._auto_commit and len(self._commits) == _COMMITS:
            return 0
        in_hand = self._batch * self._rounds_in_hand if self._auto_commit else self.steps
        return max(1, (self.steps + in_hand) * self._widened, self._round * self._widened // 2)
