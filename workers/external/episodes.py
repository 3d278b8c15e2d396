"""The table of open episodes, between the drivers of episodes and the sampler that answers them.

    drivers, any thread                                          the sampler's thread
    start ── ask or log_action, log_returns, ask, ... ── end     wait ── take ── (act) ── answer
                                             or abort            release, give_up, close

A call is one observation. It stays in its episode's place until it is answered, so an episode has one call at a time.
The table cannot grow without limit: its places limit calls and episodes, and old ids are forgotten in the order in
which they ended.
"""

from __future__ import annotations

import heapq
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from typing import Any, Generic, TypeVar

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.task import Task
from headrace.schemas.errors.episodes import (
    ClientLostError,
    EpisodeAbortedError,
    EpisodeError,
    EpisodesClosedError,
    NoFreePlaceError,
)
from headrace.workers.envs.observations import NoteOutside
from headrace.workers.external.calls import Answer, Call, DriverLoop, EpisodePlace, OnAnswer

REMEMBERED = 10_000
"""Number of ended episodes whose ids are remembered, so that a call with such an id gets a precise error."""


MAX_ID_LENGTH = 256


AnyPlace = TypeVar("AnyPlace", bound=EpisodePlace)
Tell = Callable[[Any], dict[str, Any]]
"""Copies what is wanted of an info; see `LaneTable.tell`."""


class EpisodeTable(ABC, Generic[AnyPlace]):
    """At most `capacity` open episodes.

    The first group of methods is for drivers, on any thread. They never block, and a refusal is a typed error and
    changes nothing. `on_answer` is called exactly once for each accepted call, on the sampler's thread, and must not
    block. The second group is for the sampler.
    """

    def __init__(self, capacity: int, tell: Tell, *, takes_logged: bool, note_outside: NoteOutside | None) -> None:
        self.capacity = capacity
        self._tell = tell
        self.note_outside = note_outside
        """Called for observations outside their Box; None: they are refused. Callers of `take_step` do so too."""
        self._takes_logged = takes_logged
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._freed = threading.Condition(self._lock)
        self._open: dict[str, AnyPlace] = {}
        self._free = list(range(capacity))
        self._calls: list[Call] = []
        """Calls that were accepted and not taken by the sampler."""
        self._lost: list[tuple[AnyPlace, ClientLostError]] = []
        """Episodes that were aborted and not taken by the sampler."""
        self._waiting = 0
        """Number of calls that are not answered."""
        self._over: OrderedDict[str, str | None] = OrderedDict()
        """Ids of the newest episodes that are over -> None, or why they were aborted."""
        self._closed: str | None = None
        self._full: str | None = None
        """Reason for which no episode may begin any more, while open ones go on."""
        self.draw_task: Callable[[int], Task | None] = lambda lane: None
        """Returns the task of the episode that begins in a lane. Called by drivers, one at a time."""
        self.driver_loop: DriverLoop | None = None
        """Serves drivers in the sampler's thread instead of its sleep, if it is set."""

    # -- for drivers --------------------------------------------------------------------------------------------------

    def start(self, episode_id: str | None = None, *, training_enabled: bool = True) -> str:
        """Open an episode and return its id, or a new id if none is given.

        Raises `NoFreePlaceError`, `EpisodesClosedError`, and `EpisodeError`, also for an id that is no text, or longer
        than `MAX_ID_LENGTH`.
        """
        episode_id = uuid.uuid4().hex if episode_id is None else episode_id
        if not isinstance(episode_id, str):
            raise EpisodeError(episode_id, "episode_error", f"has an id of {type(episode_id)}; ids are text")
        if len(episode_id) > MAX_ID_LENGTH:
            raise EpisodeError(
                episode_id, "episode_error", f"has an id of {len(episode_id)} characters; {MAX_ID_LENGTH} are allowed"
            )
        with self._lock:
            if (reason := self._closed or self._full) is not None:
                raise EpisodesClosedError(episode_id, reason)
            if episode_id in self._open:
                raise EpisodeError(episode_id, "already_started")
            self._check_not_over(episode_id)
            if not self._free:
                raise NoFreePlaceError(episode_id, self.capacity)
            place = self._new_place(heapq.heappop(self._free), episode_id, training_enabled)
            place.task = self.draw_task(place.lane)
            self._open[episode_id] = place
        return episode_id

    def task_of(self, episode_id: str) -> dict[str, Any] | None:
        """Return the values of an open episode's task; None without one. Raises `EpisodeError`."""
        with self._lock:
            task = self._find(episode_id, idle=False).task
        return None if task is None else deepcopy(dict(task.values))

    def ask(self, episode_id: str, observation: Any, on_answer: OnAnswer) -> None:
        """Have the current policy choose an action.

        Raises `EnvContractError` for an observation outside its space, and an `EpisodeError` if the episode cannot take
        the call.
        """
        self._accept(episode_id, observation, on_answer)

    def log_action(self, episode_id: str, observation: Any, action: Any, on_answer: OnAnswer) -> None:
        """Log an action that the driver chose. The sampler answers when it has recorded it. Raises as `ask` does."""
        if not self._takes_logged:
            raise EpisodeError(episode_id, "cannot_log")
        self._accept(episode_id, observation, on_answer, action=(action,))

    def end(self, episode_id: str, observation: Any, on_answer: OnAnswer, *, truncated: bool = False) -> None:
        """End the episode with this observation. The sampler answers when it has recorded it. Raises as `ask` does."""
        end = ChunkEnd.TRUNCATED if truncated else ChunkEnd.TERMINATED
        self._accept(episode_id, observation, on_answer, end=end)

    def take_step(
        self,
        episode_id: str,
        news: tuple[Any, ...],
        observation: Any,
        on_answer: OnAnswer,
        *,
        action: Any = None,
        end: ChunkEnd = ChunkEnd.ONGOING,
    ) -> None:
        """Call `log_returns` with `news`, then `ask`, `log_action` or `end`, as one call. Raises the same errors.

        The caller has checked that rows are in their spaces, and does not change them afterwards. `news` names agents
        by the texts of their ids. After an error nothing of a call with several agents counts.
        """
        if action is not None and not self._takes_logged:
            raise EpisodeError(episode_id, "cannot_log")
        with self._lock:
            place = self._find(episode_id)
            self._take_news(place, news, observation, action, end)
            self._admit(self._call(place, observation, on_answer, action, end))

    def abort(self, episode_id: str, reason: str) -> None:
        """Abort the episode, because its driver is gone. A pending call gets the error as its answer."""
        with self._lock:
            place = self._find(episode_id, idle=False)
            error = ClientLostError(episode_id, reason)
            self._calls = [call for call in self._calls if call.place is not place]
            self._forget(place, reason)
            self._lost.append((place, error))
            self._news.notify()

    def abort_all(self, reason: str) -> None:
        """Abort every open episode."""
        for episode_id in list(self._open):
            with suppress(EpisodeError):  # over by now
                self.abort(episode_id, reason)

    def wait_for_place(self, timeout_s: float) -> bool:
        """Block until a place is free or the table is closed, at most `timeout_s`. Return whether either happened."""
        with self._freed:
            return self._freed.wait_for(lambda: bool(self._free or self._closed or self._full), timeout_s)

    def counts(self) -> dict[str, int]:
        """Return the numbers of open episodes, calls without an answer, free places, and remembered ids."""
        with self._lock:
            sizes = len(self._open), self._waiting, len(self._free), len(self._over)
        return dict(zip(("open", "waiting", "free", "remembered"), sizes, strict=True))

    def _accept(
        self,
        episode_id: str,
        observation: Any,
        on_answer: OnAnswer,
        *,
        action: tuple[Any] | None = None,
        end: ChunkEnd = ChunkEnd.ONGOING,
    ) -> None:
        with self._lock:
            place = self._find(episode_id)
            self._admit(self._new_call(place, observation, on_answer, action, end))

    def _admit(self, call: Call) -> None:
        call.place.call = call
        self._calls.append(call)
        self._waiting += 1
        self._news.notify()

    def _find(self, episode_id: str, *, idle: bool = True) -> AnyPlace:
        place = self._open.get(episode_id)
        if place is None:
            self._check_not_over(episode_id)
            if self._closed is not None:
                raise EpisodesClosedError(episode_id, self._closed)
            raise EpisodeError(episode_id, "unknown_episode")
        if self._closed is not None:
            raise EpisodesClosedError(episode_id, self._closed)
        if idle and place.call is not None:
            raise EpisodeError(episode_id, "busy")
        return place

    @abstractmethod
    def _new_place(self, lane: int, episode_id: str, training_enabled: bool) -> AnyPlace:
        """Return the place of an episode that begins."""

    @abstractmethod
    def _new_call(
        self, place: AnyPlace, observation: Any, on_answer: OnAnswer, action: tuple[Any] | None, end: ChunkEnd
    ) -> Call:
        """Return the call, with everything logged since the last. Changes nothing if it raises `EnvContractError`.

        `action` is in a tuple, because None may be an action.
        """

    @abstractmethod
    def _take_news(self, place: AnyPlace, news: tuple[Any, ...], seen: Any, action: Any, end: ChunkEnd) -> None:
        """Note `news` as `log_returns` does, and check the rows of a step that go with them."""

    @abstractmethod
    def _call(self, place: AnyPlace, seen: Any, on_answer: OnAnswer, logged: Any, end: ChunkEnd) -> Call:
        """Return the call with these checked rows, and with everything logged since the last."""

    def _check_not_over(self, episode_id: str) -> None:
        if episode_id in self._over:
            reason = self._over[episode_id]
            ended = EpisodeError(episode_id, "already_completed")
            raise ended if reason is None else EpisodeAbortedError(episode_id, reason)

    def _forget(self, place: EpisodePlace, reason: str | None) -> None:
        """Note that the episode is over. Its place is not free yet."""
        if self._open.pop(place.episode_id, None) is not None:
            self._over[place.episode_id] = reason
            if len(self._over) > REMEMBERED:
                self._over.popitem(last=False)

    # -- for the sampler ----------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float, batch_wait_s: float = 0.0) -> None:
        """Block until `take` has something to return, at most `timeout_s`; then up to `batch_wait_s` for more calls.

        Returns earlier when every open episode waits for its answer.
        """
        self._wait_for(self._has_news, timeout_s)
        if batch_wait_s:
            self._wait_for(lambda: not self._calls or self._waiting >= len(self._open), batch_wait_s)

    def _wait_for(self, come: Callable[[], bool], timeout_s: float) -> None:
        if (driver_loop := self.driver_loop) is None:
            with self._news:
                self._news.wait_for(come, timeout_s)
            return
        until = time.monotonic() + timeout_s
        while not come() and (left := until - time.monotonic()) > 0:
            driver_loop.run_once(left)

    def _has_news(self) -> bool:
        return bool(self._calls or self._lost) or self._closed is not None

    def take(self) -> tuple[list[Call], list[tuple[AnyPlace, ClientLostError]]]:
        """Return the calls in order of arrival, and the places of episodes aborted since the last `take`."""
        with self._lock:
            calls, self._calls = self._calls, []
            lost, self._lost = self._lost, []
        return calls, lost

    def answer(self, answers: Iterable[tuple[EpisodePlace, Answer]]) -> None:
        """Answer the calls of these places, if they have any."""
        told = []
        with self._lock:
            for place, answer in answers:
                call, place.call = place.call, None
                if call is not None:
                    self._waiting -= 1
                    place.has_acted = True
                    told.append((call.on_answer, answer))
        for on_answer, answer in told:
            on_answer(answer)

    def deliver(self) -> None:
        """Send answers now that the loop would send when the sampler next waits."""
        if self.driver_loop is not None:
            self.driver_loop.flush()

    def release(self, place: EpisodePlace, aborted: str | None = None) -> None:
        """Free the place of an episode that has ended, or was `aborted` for a reason.

        Answers its pending call, with an error if it was aborted. An earlier reason wins over `aborted`.
        """
        self._vacate(place, aborted)
        error = None
        if aborted is not None:
            error = EpisodeAbortedError(place.episode_id, self._over.get(place.episode_id) or aborted)
        self.answer([(place, Answer(error=error))])

    def _vacate(self, place: EpisodePlace, aborted: str | None) -> None:
        with self._lock:
            if place.released:  # both sides may abort an episode
                return
            place.released = True
            self._forget(place, aborted)
            if place.call is not None:
                self._calls = [call for call in self._calls if call.place is not place]
            self._lost = [(other, error) for other, error in self._lost if other is not place]
            heapq.heappush(self._free, place.lane)
            self._freed.notify()

    def admit_no_more(self, reason: str) -> None:
        """Refuse new episodes from now on. Open episodes continue."""
        with self._lock:
            self._full = reason
            self._freed.notify_all()

    def close(self, reason: str) -> None:
        """Refuse all calls from now on. The sampler may still take accepted calls; `release` answers the others."""
        with self._lock:
            if self._closed is None:
                self._closed = reason
            self._news.notify_all()
            self._freed.notify_all()

    def release_all(self) -> None:
        """Answer all calls with an error, because the sampler has stopped. Call it after `close`."""
        with self._lock:
            places = [*self._open.values(), *(place for place, _ in self._lost)]
            reason = self._closed or "nobody samples any more"
            self._calls, self._lost = [], []
        for place in places:
            self._vacate(place, reason)
            self.answer([(place, Answer(error=EpisodesClosedError(place.episode_id, reason)))])
