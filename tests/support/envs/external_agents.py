"""External envs of several agents, and what tests of them have in common."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import gymnasium as gym
import numpy as np

from headrace.schemas.chunks.chunk import EpisodeChunk, to_episode
from headrace.workers import MultiAgentEnvRunner
from headrace.workers.external import ExternalAgentEpisodes, ExternalMultiAgentEnv
from support.envs.toy_agents import multi_runner

AGENTS = ("a", "b", "c")


class Crowd(ExternalMultiAgentEnv):
    """Plays one episode after another. Observation: (step, number of the episode); reward: the next step's number.

    In step t agent "a" always acts, "b" in even ones, and "c" from step 2 on until it is done after step 4. `config`:
    "length", "logged": an action that all log in place of the first and the last one.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        seen = gym.spaces.Box(0.0, 1e6, (2,), np.float32)
        super().__init__(dict.fromkeys(AGENTS, gym.spaces.Discrete(100)), dict.fromkeys(AGENTS, seen))
        self.config = config
        self.length = config.get("length", 25)
        self.closed = threading.Event()

    def run(self) -> None:
        number = 0
        while True:
            self.play(number)
            number += 1

    def play(self, number: int, **settings: Any) -> None:
        """One episode."""
        episode, logged = self.start_episode(**settings), self.config.get("logged")
        for t in range(self.length):
            observations = {agent: see(t, number) for agent in self.at(t)}
            if t == 5:
                observations["c"] = see(t, number)
            acting = self.at(t)
            if logged is not None and t in (0, self.length - 1):
                self.log_action(episode, observations, dict.fromkeys(acting, logged))
            else:
                assert list(self.get_action(episode, observations)) == acting
            self.log_returns(episode, dict.fromkeys(acting, t + 1.0), None, {"c": t == 4, "__all__": False})
        self.end_episode(episode, {agent: see(self.length, number) for agent in "ab"})

    def at(self, t: int) -> list[str]:
        """Who acts in step `t`."""
        return ["a"] + ["b"] * (t % 2 == 0) + ["c"] * (2 <= t <= 4)

    def close(self) -> None:
        self.closed.set()


class Idle(Crowd):
    """Does nothing: a test makes the calls."""

    def run(self) -> None:
        self.closed.wait()


def table(sampler: MultiAgentEnvRunner) -> ExternalAgentEpisodes:
    """What stands between the runner and who drives its episodes."""
    vector: Any = sampler._sampler
    episodes: ExternalAgentEpisodes = vector.envs.episodes
    return episodes


def see(t: float, number: int = 0) -> Any:
    """An observation."""
    return np.array([t, number], np.float32)


def idle(**settings: Any) -> MultiAgentEnvRunner:
    """A runner whose episodes the test drives; a fragment is cut soon."""
    return multi_runner(Idle, **{"external_fragment_max_age_s": 0.05, "num_envs": 2, **settings})


def pieced(chunks: Iterable[EpisodeChunk]) -> dict[tuple[str, str], list[EpisodeChunk]]:
    """Chunks by episode and agent, in order, without a gap."""
    parts: dict[tuple[str, str], list[EpisodeChunk]] = defaultdict(list)
    for chunk in chunks:
        parts[chunk.episode_id, chunk.agent_id].append(chunk)
    for own in parts.values():
        to_episode(own)
    return parts
