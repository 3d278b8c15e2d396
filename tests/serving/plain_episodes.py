"""A small table of open episodes, which answers by a rule anybody can check, in place of sampler and policy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.schemas.episode_errors import (
    EpisodeAbortedError,
    EpisodeStartedError,
    NoFreePlaceError,
    UnknownEpisodeError,
)
from headrace.schemas.errors import HeadraceError
from headrace.schemas.spaces import Box, Discrete, Spaces

SPACES = Spaces(observation=Box(shape=(2,), dtype="<f4", low=-100.0, high=100.0), action=Discrete(n=1000))


@dataclass
class PlainAnswer:
    action: Any = None
    weights: tuple[int, int] = (1, 1)
    error: HeadraceError | None = None


@dataclass
class PlainEpisode:
    """What the sampler would have made of it."""

    training_enabled: bool
    seen: list[float] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    infos: list[dict[str, Any]] = field(default_factory=list)
    end: str = "open"
    pending: float = 0.0


def rule(observation: Any) -> int:
    """The policy: what is done for an observation."""
    return int(observation[0] * 7 + observation[1]) % 1000


class PlainEpisodes:
    """Real, in memory, for any thread. What is asked waits in `waiting` until `answer_all`, unless it is `prompt`."""

    def __init__(self, capacity: int = 10_000, *, prompt: bool = False) -> None:
        self.episodes: dict[str, PlainEpisode] = {}
        self.waiting: list[Callable[[], None]] = []
        self._capacity, self._prompt = capacity, prompt
        self._lock = threading.Lock()

    def start(self, episode_id: str | None = None, *, training_enabled: bool = True) -> str:
        assert episode_id is not None
        with self._lock:
            if episode_id in self.episodes:
                raise EpisodeStartedError(episode_id)
            if len(self.open()) >= self._capacity:
                raise NoFreePlaceError(episode_id, self._capacity)
            self.episodes[episode_id] = PlainEpisode(training_enabled)
        return episode_id

    def open(self) -> list[str]:
        return [id for id, episode in self.episodes.items() if episode.end == "open"]

    def ask(self, episode_id: str, observation: Any, on_answer: Any) -> None:
        self._take(episode_id, observation, rule(observation), on_answer, True)

    def log_action(self, episode_id: str, observation: Any, action: Any, on_answer: Any) -> None:
        self._take(episode_id, observation, int(action), on_answer, False)

    def _take(self, id: str, observation: Any, action: int, on_answer: Any, told: bool) -> None:
        episode = self._find(id)
        self._settle(episode, observation)
        episode.actions.append(action)
        self._later(lambda: on_answer(PlainAnswer(np.int64(action) if told else None)))

    def log_returns(self, episode_id: str, reward: float, info: dict[str, Any] | None = None) -> None:
        episode = self._find(episode_id)
        episode.pending += reward
        episode.infos += [info] if info else []

    def retract(self, episode_id: str) -> None:
        """Nothing is refused here after `log_returns`."""

    def end(self, episode_id: str, observation: Any, on_answer: Any, *, truncated: bool = False) -> None:
        episode = self._find(episode_id)
        self._settle(episode, observation)
        episode.end = "truncated" if truncated else "terminated"
        self._later(lambda: on_answer(PlainAnswer(weights=(0, 0))))

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
            raise UnknownEpisodeError(id)
        if self.episodes[id].end != "open":
            raise EpisodeAbortedError(id, self.episodes[id].end)
        return self.episodes[id]

    def _settle(self, episode: PlainEpisode, observation: Any) -> None:
        episode.seen.append(float(observation[0]))
        episode.rewards.append(episode.pending)
        episode.pending = 0.0
