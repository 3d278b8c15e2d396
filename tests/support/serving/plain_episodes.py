"""A small table of open episodes, which answers by a rule anybody can check, in place of sampler and policy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.errors import HeadraceError
from headrace.schemas.errors.episodes import (
    EpisodeAbortedError,
    EpisodeError,
    NoFreePlaceError,
)
from headrace.workers.external.calls import DriverLoop

SPACES = Spaces(observation=Box(shape=(2,), dtype="<f4", low=-100.0, high=100.0), action=Discrete(n=1000))


@dataclass
class PlainAnswer:
    action: Any = None
    weights: tuple[int, int] = (1, 1)
    error: HeadraceError | None = None


@dataclass
class PlainEpisode:
    """An episode as the sampler would have recorded it."""

    training_enabled: bool
    rows: list[Any] = field(default_factory=list)
    """The observations, by column."""
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    infos: list[dict[str, Any]] = field(default_factory=list)
    end: str = "open"

    @property
    def seen(self) -> list[float]:
        return [float(row["obs"][0]) for row in self.rows]


def rule(observation: Any) -> int:
    """The policy: what is done for an observation."""
    return int(observation[0] * 7 + observation[1]) % 1000


class PlainEpisodes:
    """Real, in memory, for any thread. What is asked waits in `waiting` until `answer_all`, unless it is `prompt`."""

    def __init__(self, capacity: int = 10_000, *, prompt: bool = False) -> None:
        self.episodes: dict[str, PlainEpisode] = {}
        self.waiting: list[Callable[[], None]] = []
        self.driver_loop: DriverLoop | None = None
        self.policy: Callable[[Any], int] = lambda row: rule(row["obs"])
        self._capacity, self._prompt = capacity, prompt
        self._lock = threading.Lock()

    def start(self, episode_id: str | None = None, *, training_enabled: bool = True) -> str:
        assert episode_id is not None
        with self._lock:
            if episode_id in self.episodes:
                raise EpisodeError(episode_id, "already_started")
            if len(self.open()) >= self._capacity:
                raise NoFreePlaceError(episode_id, self._capacity)
            self.episodes[episode_id] = PlainEpisode(training_enabled)
        return episode_id

    def task_of(self, episode_id: str) -> None:
        """No task: nothing publishes any."""

    def open(self) -> list[str]:
        return [id for id, episode in self.episodes.items() if episode.end == "open"]

    def take_step(
        self,
        episode_id: str,
        news: tuple[Any, ...],
        observation: Any,
        on_answer: Any,
        *,
        action: Any = None,
        end: ChunkEnd = ChunkEnd.ONGOING,
    ) -> None:
        episode, (reward, info) = self._find(episode_id), news or (0.0, None)
        episode.infos += [info] if info else []
        episode.rows.append(observation)
        episode.rewards.append(reward)
        if end is not ChunkEnd.ONGOING:
            episode.end = end.name.lower()
            self._later(lambda: on_answer(PlainAnswer(weights=(0, 0))))
            return
        taken = self.policy(observation) if action is None else int(action["actions"])
        episode.actions.append(taken)
        self._later(lambda: on_answer(PlainAnswer(np.int64(taken) if action is None else None)))

    def abort(self, episode_id: str, reason: str) -> None:
        self._find(episode_id).end = reason

    def answer_all(self) -> None:
        """As the sampler does at its next poll."""
        with self._lock:
            waiting, self.waiting = self.waiting, []
        for answer in waiting:
            answer()

    def _later(self, answer: Callable[[], None]) -> None:
        if self._prompt:
            answer()
        else:
            with self._lock:
                self.waiting.append(answer)

    def _find(self, id: str) -> PlainEpisode:
        if id not in self.episodes:
            raise EpisodeError(id, "unknown_episode")
        if self.episodes[id].end != "open":
            raise EpisodeAbortedError(id, self.episodes[id].end)
        return self.episodes[id]
