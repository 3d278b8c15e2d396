"""External envs to try: games that step themselves, each in a thread of its own."""

from __future__ import annotations

import gymnasium as gym

from headrace.workers.agents.examples import TwoCarts
from headrace.workers.envs.context import EnvContext
from headrace.workers.external.env import ExternalEnv, ExternalMultiAgentEnv


class CartPoles(ExternalEnv):
    """CartPole games that drive themselves, as many at once as the runner has places."""

    def __init__(self, context: EnvContext) -> None:
        like = gym.make("CartPole-v1")
        super().__init__(like.action_space, like.observation_space)
        self._games = context.num_envs
        self._seed = context.seed

    def run(self) -> None:
        """Play until the env is closed. If one thread ends, all threads end."""
        self.run_in_threads(self._play, self._games)

    def _play(self, number: int) -> None:
        env = gym.make("CartPole-v1")
        seed = None if self._seed is None else (self._seed + number) % 2**32
        while True:
            observation, _ = env.reset(seed=seed)
            seed = None
            episode, terminated, truncated = self.start_episode(), False, False
            while not (terminated or truncated):
                observation, reward, terminated, truncated, _ = env.step(self.get_action(episode, observation))
                self.log_returns(episode, float(reward))
            self.end_episode(episode, observation, truncated=truncated and not terminated)


class PairsOfCarts(ExternalMultiAgentEnv):
    """Games of `TwoCarts` that drive themselves, as many at once as the runner has places."""

    def __init__(self, context: EnvContext) -> None:
        like = TwoCarts()
        super().__init__(like.action_spaces, like.observation_spaces)
        self._pairs = context.num_envs
        self._seed = context.seed

    def run(self) -> None:
        """Play until the env is closed. If one thread ends, all threads end."""
        self.run_in_threads(self._play, self._pairs)

    def _play(self, number: int) -> None:
        env = TwoCarts()
        seed = None if self._seed is None else (self._seed + number) % 2**31
        while True:
            observations, _ = env.reset(seed=seed)
            seed = None
            episode, over = self.start_episode(), False
            while not over:
                actions = self.get_action(episode, observations)
                observations, rewards, terminateds, truncateds, _ = env.step(actions)
                over = terminateds.pop("__all__")
                self.log_returns(episode, rewards, None, terminateds, truncateds)
            self.end_episode(episode, observations)
