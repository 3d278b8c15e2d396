"""How episodes begin in the lanes of a vector: failed envs come back, and callbacks may refuse what has begun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Lane
from headrace.workers.sampling.episode_events import EpisodeEvents


class _Envs(Protocol):
    """Of a driver of envs what this needs; see `EnvDriver`."""

    @property
    def lanes(self) -> Sequence[Lane]: ...
    def take_started(self) -> list[int]: ...
    def try_restart(self) -> None: ...


class EpisodeStarts:
    """Called with what brings failed envs back, and may begin episodes by it.

    `open_chunks` is given the lanes that have begun one, also where bringing back raises; `abort` the failure of a lane
    whose episode a callback has refused, which is brought back in turn.
    """

    def __init__(
        self,
        envs: _Envs,
        events: EpisodeEvents,
        open_chunks: Callable[[Sequence[Lane]], None],
        abort: Callable[[Failure], Any],
    ) -> None:
        self._envs = envs
        self._events = events
        self._open_chunks = open_chunks
        self._abort = abort

    def __call__(self, bring_back: Callable[[], None]) -> None:
        """Until nothing is left to be brought back now. Raises what bringing back raises."""
        refused = True
        while refused:
            try:
                bring_back()
            finally:
                # A lane may have begun twice, when it failed in between; what it sees is of its last beginning.
                begun = [self._envs.lanes[index] for index in dict.fromkeys(self._envs.take_started())]
                started = [lane for lane in begun if lane.episode is not None]
                if started:
                    self._open_chunks(started)
                refused = self._events.watches_starts and self._tell(started)
            bring_back = self._envs.try_restart

    def _tell(self, started: Sequence[Lane]) -> bool:
        """Whether a callback's error has ended an episode at its start."""
        refused = False
        for lane in started:
            error = self._events.started(lane, lane.episode) if lane.episode is not None else None
            if error is not None:
                self._abort(Failure(lane.index, error, stepped=True))
                refused = True
        return refused
