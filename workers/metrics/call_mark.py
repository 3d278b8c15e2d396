"""Marks the call of a user's code that is in progress, and gives a sign of life between two calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from typing import Any

from headrace.schemas.accounts.user_calls import UserCall

SIGN_INTERVAL_S = 0.02
"""The shortest time between two signs of life, in seconds."""
CallWords = MutableSequence[int] | memoryview
"""[kind, lane], perhaps in memory that others read."""
_OTHER = int(UserCall.OTHER)


class CallMark:
    """Names the env call that is in progress, for those who judge whether this process hangs.

    `words` are [kind, lane], which a worker shows in its recorder. A long poll gives its signs of life by itself:
    after a slow poll, `between` is called after each env's step. Fast polls need no look at the clock for each env.
    `sides`, a `UserSide` or None, is told when env code begins and ends.
    """

    def __init__(self, words: CallWords | None = None, sides: Any = None) -> None:
        self.words: CallWords = [_OTHER, 0] if words is None else words
        self.sides = sides
        self.on_wait: Callable[[], None] | None = None
        """Called between two calls. If it raises, `raise_kept` raises that error once the poll is over."""
        self.elsewhere: Callable[[], str] = str
        """Says which call has been in progress longest in other processes or on env hosts; "" while none is."""
        self.is_slow = True
        """True if the last poll was slow: `between` is then called after each step of this one."""
        self._error: Exception | None = None
        self._spoken_at = self._polled_at = 0.0

    def begin(self, kind: UserCall, lane: int) -> None:
        """Mark a call of the env in `lane`, see `CallInProgress`."""
        self.words[1] = lane
        self.words[0] = kind
        if self.sides is not None:
            self.sides.enter()

    def end(self) -> None:
        """Mark the end of a call."""
        if self.sides is not None:
            self.sides.leave(time.monotonic(), built=self.words[0] == UserCall.CONSTRUCTION)
        self.words[0] = _OTHER

    def end_steps(self) -> None:
        """Mark the end of a poll's steps."""
        self.words[0] = _OTHER
        now = time.monotonic()
        if self.sides is not None:
            self.sides.leave(now)
        self.is_slow, self._polled_at = now - self._polled_at > SIGN_INTERVAL_S, now

    @contextmanager
    def of(self, kind: UserCall, lane: int) -> Iterator[None]:
        """Mark the block as a call of the env in `lane`."""
        self.begin(kind, lane)
        try:
            yield
        finally:
            self.end()

    def between(self) -> None:
        """Call `on_wait` unless it was called a moment ago."""
        now = time.monotonic()
        if self.on_wait is None or self._error is not None or now - self._spoken_at < SIGN_INTERVAL_S:
            return
        self._spoken_at = now
        if self.sides is not None:
            self.sides.leave(now)
        try:
            self.on_wait()
        except Exception as error:  # noqa: BLE001 - the steps of this poll come first
            self._error = error
        if self.sides is not None:
            self.sides.enter()

    def raise_kept(self) -> None:
        """Raise the error that `on_wait` raised in the midst of calls."""
        error, self._error = self._error, None
        if error is not None:
            raise error
