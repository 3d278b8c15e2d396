"""Detector of a stall: a learner waits for workers, and all workers wait for the learner."""

from __future__ import annotations

import logging

from headrace.learner_stub.session import LearnerSession, LearnerSessionState
from headrace.schemas.errors import WindowStalledError

STARVED_S = 3.0
"""Two heartbeats, after which the broker's word on the workers is newer than all that they were told."""

STALLED_S = 30.0

_HINT_S = 1.0
_SAY_WAITING_S = 10.0

log = logging.getLogger("headrace.learner")


class StallDetector:
    """Measures how long a stream has waited for a batch, and whether one can come at all."""

    def __init__(self, session: LearnerSession) -> None:
        self._session = session
        self._waited_s = self._hinted_s = 0.0

    def reset(self) -> None:
        """Note that something came."""
        self._waited_s = self._hinted_s = 0.0

    def add_wait(self, seconds: float) -> None:
        """Note that nothing came for `seconds` more. Raises `WindowStalledError` when all would wait for ever."""
        before, self._waited_s = self._waited_s, self._waited_s + seconds
        if self._waited_s // _SAY_WAITING_S > before // _SAY_WAITING_S:
            log.info("no batch for %.0f s: %s", self._waited_s, self._whom())
        if self._waited_s > STALLED_S and self._all_wait:
            raise WindowStalledError(self._session.uncommitted(), self._waited_s)

    def take_hint(self) -> bool:
        """Return whether a larger window may end this wait: some worker waits for a commit. True once a second."""
        status = self._session.status
        if self._waited_s < self._hinted_s + _HINT_S or status is None or not status.workers_blocked:
            return False
        self._hinted_s = self._waited_s
        return self._session.uncommitted() > 0

    @property
    def starved(self) -> bool:
        """Return whether only a commit can end this wait."""
        return self._waited_s >= STARVED_S and self._all_wait

    def _whom(self) -> str:
        """Return what the broker last said of the workers, in words."""
        status = self._session.status
        if self._session.state is not LearnerSessionState.ACTIVE or status is None:
            return "waiting for the broker"
        if not status.workers:
            return "waiting for a first worker"
        round_ = f"; the round of synchronous sampling waits for {status.waiting_for}" if status.waiting_for else ""
        return f"of {status.workers} workers {status.workers_blocked} wait for this learner{round_}"

    @property
    def _all_wait(self) -> bool:
        """Return whether, by the broker's last status, every worker's window is full and a commit would make room."""
        status = self._session.status
        blocked = status is not None and 0 < status.workers == status.workers_blocked
        return blocked and self._session.state is LearnerSessionState.ACTIVE and self._session.uncommitted() > 0
