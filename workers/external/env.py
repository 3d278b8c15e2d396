"""The base class for a user's env that drives itself: `run()` drives episodes, and asks for actions."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from headrace.workers.external.self_driven import SelfDrivenEnv
from headrace.workers.external.solo_episodes import ExternalEpisodes


class ExternalEnv(SelfDrivenEnv[ExternalEpisodes]):
    """Base class. Give both spaces to the constructor and override `run`, which has its own thread.

        def run(self):
            while True:
                episode = self.start_episode()
                observation = simulator.reset()
                while not simulator.over:
                    observation, reward = simulator.step(self.get_action(episode, observation))
                    self.log_returns(episode, reward)
                self.end_episode(episode, observation)

    At most `num_envs` episodes may be open at once. Any number of threads may drive them, but one thread at a time for
    each episode. All methods raise an `EpisodeError` for an id that is unknown, over or busy, and an `EnvContractError`
    for a value outside its space. They raise `EpisodesClosedError` once the env is closed: let it end `run` and its
    threads.
    """

    headrace_driver = "headrace.workers.external.vector:ExternalVector"

    def __init__(self, action_space: gym.Space[Any], observation_space: gym.Space[Any]) -> None:
        self.action_space = action_space
        self.observation_space = observation_space

    def log_returns(self, episode_id: str, reward: float, info: dict[str, Any] | None = None) -> None:
        """Add to the reward since the last action. `info` goes with the next observation only."""
        self.episodes.log_returns(episode_id, reward, info)
