"""Detector of a stall: a learner waits for workers, and all workers wait for the learner."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from headrace.learner_stub.streaming.ready_batches import Turns
from headrace.learner_stub.streaming.session import LearnerSession, LearnerSessionState
from headrace.schemas.errors import WindowStalledError
from headrace.schemas.messages import Status
from headrace.schemas.peers.fleet_address import SAY_WAITING_S

STARVED_S = 3.0
"""Two heartbeats. After them the broker's status of the workers is newer than its last messages to them."""

STALLED_S = 30.0

_HINT_S = 1.0

log = logging.getLogger("headrace.learner")


class StallDetector:
    """Measures how long a stream has waited for a batch, and whether one can come at all.

    `turns` have the batches that were handed out and wait to be settled. `rank` is that of the stream.
    """

    def __init__(self, sessions: Sequence[LearnerSession], turns: Turns | None = None, rank: int = 0) -> None:
        self._rank = rank
        self._sessions = sessions
        self._turns = turns
        self._waited_s = self._hinted_s = 0.0
        self._here = 0
        """Batches that have come for a round that is not complete."""

    def reset(self) -> None:
        """Note that something came."""
        self._waited_s = self._hinted_s = 0.0
        self._here = 0

    def add_wait(self, seconds: float, *, of_others: bool = False, here: int = 0) -> None:
        """Note that no round came for `seconds` more.

        - of_others: other ranks may commit and end the wait.
        - here: batches that have come for the round, which is not complete.

        Raises `WindowStalledError` when learner and workers would wait for ever.
        """
        if here > self._here:
            self._waited_s = self._hinted_s = 0.0
        self._here = here
        before, self._waited_s = self._waited_s, self._waited_s + seconds
        if self._waited_s // SAY_WAITING_S > before // SAY_WAITING_S:
            log.warning("no batch for %.0f s: %s", self._waited_s, self.whom())
        if self._waited_s > STALLED_S and self._all_wait and not of_others:
            raise WindowStalledError(self._uncommitted(), self._waited_s)

    def take_hint(self) -> bool:
        """Return whether a larger window may end this wait: some worker waits for a commit. True once a second."""
        blocked = any(session.status is not None and session.status.workers_blocked for session in self._sessions)
        if self._waited_s < self._hinted_s + _HINT_S or not blocked:
            return False
        self._hinted_s = self._waited_s
        return self._uncommitted() > 0

    @property
    def starved(self) -> bool:
        """Return whether only a commit can end this wait."""
        return self._waited_s >= STARVED_S and self._all_wait

    def whom(self) -> str:
        """Return, in words, what the answering brokers last reported of the workers."""
        if self._rank:
            return "waiting for the next round of rank 0"
        told, (workers, blocked) = self._told(), self._workers()
        if not told:
            return "waiting for the broker"
        if not workers:
            return "waiting for a first worker"
        if not any(session.spaces for session in self._sessions):
            return f"the envs of {workers} workers are not ready"
        if self._no_weights:
            return f"{workers} workers wait for first weights; call weights.publish(...) before you ask for a batch"
        waiting_for = told[0].waiting_for
        round_ = f"; the round of synchronous sampling waits for {waiting_for}" if waiting_for else ""
        return f"of {workers} workers {blocked} wait for this learner{round_}"

    @property
    def _no_weights(self) -> bool:
        """Return whether there are workers, and no weights for them, by the brokers' last status."""
        return self._workers()[0] > 0 and not any(status.published[1] for status in self._told())

    @property
    def _all_wait(self) -> bool:
        """Return whether, by the brokers' last status, every worker's window is full and a commit would make room."""
        workers, blocked = self._workers()
        return 0 < workers == blocked and self._uncommitted() > 0

    def _workers(self) -> tuple[int, int]:
        """Return the numbers of all workers, and of those that wait for this learner."""
        told = self._told()
        return sum(status.workers for status in told), sum(status.workers_blocked for status in told)

    def _told(self) -> list[Status]:
        """Return the last status of each broker that answers."""
        active = [session for session in self._sessions if session.state is LearnerSessionState.ACTIVE]
        return [session.status for session in active if session.status is not None]

    def _uncommitted(self) -> int:
        waiting = self._here + (len(self._turns.later) if self._turns is not None else 0)
        return waiting + sum(session.uncommitted() for session in self._sessions)
