"""Begins episodes in the lanes of a vector: failed envs restart, and a callback's error aborts a new episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.workers.envs.driver import LaneDriver
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Lane
from headrace.workers.sampling.episode_events import EpisodeEvents


class EpisodeStarts:
    """Starts episodes: called with the function that restarts failed envs and may begin episodes.

    It calls `open_chunks` with the lanes that have begun an episode, even when the restart raises. If a callback fails
    a new episode, it calls `abort` with that failure, and the lane restarts.
    """

    def __init__(
        self,
        envs: LaneDriver,
        events: EpisodeEvents,
        open_chunks: Callable[[Sequence[Lane]], None],
        abort: Callable[[Failure], Any],
    ) -> None:
        self._envs = envs
        self._events = events
        self._open_chunks = open_chunks
        self._abort = abort

    def __call__(self, bring_back: Callable[[], None]) -> None:
        """Repeat until no lane is left to restart now. Raises what `bring_back` raises."""
        refused = True
        while refused:
            try:
                bring_back()
            finally:
                # A lane that failed in between may have begun twice; its observation is from the second reset.
                begun = [self._envs.lanes[index] for index in dict.fromkeys(self._envs.take_started())]
                started = [lane for lane in begun if lane.episode is not None]
                if started:
                    self._open_chunks(started)
                refused = self._events.watches_starts and self._tell(started)
            bring_back = self._envs.try_restart

    def _tell(self, started: Sequence[Lane]) -> bool:
        """Return whether a callback's error has ended an episode at its start."""
        refused = False
        for lane in started:
            error = self._events.started(lane, lane.episode) if lane.episode is not None else None
            if error is not None:
                self._abort(Failure(lane.index, error, stepped=True))
                refused = True
        return refused
