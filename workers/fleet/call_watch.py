"""The watch over calls of the user's code: a thread that gives signs of life for them, up to the limit of each call."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from headrace.schemas.accounts.recorder import Recorder
from headrace.schemas.accounts.user_calls import SETTINGS, UserCall
from headrace.schemas.basics.bounds import MOST_SILENCE_S

log = logging.getLogger(__name__)

LOOK_S = 0.25
_LIMITS_S = {UserCall.OTHER: 300.0, UserCall.PROCESSES: MOST_SILENCE_S}
"""Seconds that a policy, a connector or a callback may take: its first pass may compile it. Others have settings."""
_MARGIN_S = 2.0
"""Seconds beyond its limit after which a call hangs. At the limit, a vector of processes ends a call by itself."""
_SAY_AFTER_S = 10.0
_WAITS_FOR_ENVS_S = 1.0
"""Seconds within which a thread that waits for envs updates the recorder, and notes for how long they are silent."""


class CallWatch:
    """Looks at the call in progress. `keep_alive` gets the seconds for which an env has not answered, and its call.

    It gets None while the sampling thread may wait for envs elsewhere, since that thread notes these seconds itself.
    A call beyond its limit gets no more signs of life, so the supervisor and the broker count the worker as lost. A
    call that keeps the interpreter's lock stops this thread too: readers of the recorder know that the call may.
    """

    def __init__(
        self,
        limits_s: Mapping[UserCall, float],
        recorder: Recorder,
        keep_alive: Callable[[float | None, str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        starts: bool = True,
    ) -> None:
        self._recorder, self._keep_alive, self._clock = recorder, keep_alive, clock
        self._seen: object = None
        self._since = 0.0
        self._say_after_s = _SAY_AFTER_S
        self._was_overdue = False
        for kind, limit_s in {**_LIMITS_S, **limits_s}.items():
            recorder.limit(kind, limit_s)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="call-watch", daemon=True)
        if starts:
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Give a sign of life for the call in progress, or say that it takes too long."""
        recorder, now = self._recorder, self._clock()
        call, commits = recorder.watched().call, recorder.commits
        if call is None:
            self._seen = None
            return
        if (call.kind, call.lane, commits) != self._seen:
            self._seen, self._since = (call.kind, call.lane, commits), now
            self._say_after_s, self._was_overdue = _SAY_AFTER_S, False
        lasted_s = now - self._since
        is_overdue = lasted_s > call.limit_s + _MARGIN_S
        recorder.beat(int(self._since * 1e9), is_overdue=is_overdue)
        if is_overdue and not self._was_overdue:
            log.error("%s: it hangs, and this worker counts as lost", call.in_words(lasted_s))
        elif not is_overdue:
            if lasted_s >= self._say_after_s:
                self._say_after_s *= 2
                log.warning("%s", call.in_words(lasted_s))
            if call.kind in SETTINGS:
                self._keep_alive(lasted_s, call.in_words(lasted_s))
            else:
                self._keep_alive(None if lasted_s < _WAITS_FOR_ENVS_S else 0.0, "")
        self._was_overdue = is_overdue
