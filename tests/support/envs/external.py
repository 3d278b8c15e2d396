"""External envs that count, and some that fail; and what tests of them have in common."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import gymnasium as gym
import numpy as np

from headrace.schemas.chunks.chunk import EpisodeChunk, to_episode
from headrace.workers import SingleAgentEnvRunner
from headrace.workers.external import ExternalEnv, ExternalEpisodes
from support.envs.toy import runner


class Serving(ExternalEnv):
    """Plays one episode of `length` steps after another. Observation: (step, number of the episode); reward: step.

    `config`: "length", "logged": an action that is logged in place of the first and the last one, "threads".
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(gym.spaces.Discrete(100), gym.spaces.Box(0.0, 1e6, (2,), np.float32))
        self.config = config
        self.length = config.get("length", 25)
        self.closed = threading.Event()

    def run(self) -> None:
        self.run_in_threads(self.play_on, self.config.get("threads", 1))

    def play_on(self, thread: int) -> None:
        number = thread
        while True:
            self.play(number)
            number += self.config.get("threads", 1)

    def play(self, number: int, **settings: Any) -> list[int]:
        """One episode; gives its actions."""
        episode = self.start_episode(**settings)
        actions = []
        for t in range(self.length):
            actions.append(self.act(episode, t, number))
            self.log_returns(episode, float(t + 1))
        self.end_episode(episode, self.seen(self.length, number))
        return actions

    def act(self, episode: str, t: int, number: int) -> int:
        logged = self.config.get("logged")
        if logged is not None and t in (0, self.length - 1):
            self.log_action(episode, self.seen(t, number), logged)
            return int(logged)
        return int(self.get_action(episode, self.seen(t, number)))

    def seen(self, t: int, number: int) -> Any:
        return np.array([t, number], np.float32)

    def close(self) -> None:
        self.closed.set()


class Idle(Serving):
    """Does nothing: a test makes the calls."""

    def run(self) -> None:
        self.closed.wait()


class Failing(Serving):
    """Ends `run()` by "returning", "raising" or "exiting" after `config["after"]` steps of its only episode."""

    def run(self) -> None:
        episode = self.start_episode()
        for t in range(self.config["after"]):
            self.get_action(episode, self.seen(t, 0))
            self.log_returns(episode, 1.0)
        if self.config["how"] == "raising":
            raise RuntimeError("the simulator is gone")
        if self.config["how"] == "exiting":
            raise SystemExit("the simulator is gone")


def table(sampler: SingleAgentEnvRunner) -> ExternalEpisodes:
    """What stands between the runner and who drives its episodes."""
    vector: Any = sampler._sampler
    episodes: ExternalEpisodes = vector.envs.episodes
    return episodes


def see(t: float, number: int = 0) -> Any:
    """An observation."""
    return np.array([t, number], np.float32)


def idle(**settings: Any) -> SingleAgentEnvRunner:
    """A runner whose episodes the test drives; a fragment is cut soon."""
    return runner(Idle, **{"external_fragment_max_age_s": 0.05, "num_envs": 2, **settings})


def pieced(chunks: Iterable[EpisodeChunk]) -> dict[str, list[EpisodeChunk]]:
    """Chunks by episode, in order, without a gap."""
    parts: dict[str, list[EpisodeChunk]] = defaultdict(list)
    for chunk in chunks:
        parts[chunk.episode_id].append(chunk)
    for episode in parts.values():
        to_episode(episode)
    return parts
