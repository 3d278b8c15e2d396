"""What a user writes whose env cannot be stepped: `run()` drives episodes, and asks for actions as it needs them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from headrace.workers.external.self_driven import SelfDrivenEnv
from headrace.workers.external.solo_episodes import ExternalEpisodes


class ExternalEnv(SelfDrivenEnv[ExternalEpisodes]):
    """Base class: give both spaces to the constructor and override `run`, which gets a thread of its own.

        def run(self):
            while True:
                episode = self.start_episode()
                observation = simulator.reset()
                while not simulator.over:
                    observation, reward = simulator.step(self.get_action(episode, observation))
                    self.log_returns(episode, reward)
                self.end_episode(episode, observation)

    As many as `num_envs` episodes may be open at once, driven by as many threads as one likes, each episode by one at a
    time. All methods raise an `EpisodeError` for an id that is unknown, over or busy, an `EnvContractError` for what is
    not in its space, and `EpisodesClosedError` once the env is over: let that end `run` and the threads it began.
    """

    def __init__(self, action_space: gym.Space[Any], observation_space: gym.Space[Any]) -> None:
        self.action_space = action_space
        self.observation_space = observation_space

    def get_action(self, episode_id: str, observation: Any) -> Any:
        """The current policy's action. Blocks until it is there, at most `external_action_timeout_s`."""
        return self._ask(episode_id, observation)

    def log_action(self, episode_id: str, observation: Any, action: Any) -> None:
        """Tell an action that was not asked for. Blocks until it is taken in, at most `external_log_timeout_s`."""
        self._log(episode_id, observation, action)

    def log_returns(self, episode_id: str, reward: float, info: dict[str, Any] | None = None) -> None:
        """Add to the reward since the last action. `info` goes with the next observation, and with that one only."""
        self.episodes.log_returns(episode_id, reward, info)

    def end_episode(self, episode_id: str, observation: Any, truncated: bool = False) -> None:
        """The episode has ended with this observation. Does not block; its place is free once that was taken in."""
        self._end(episode_id, observation, truncated)
