"""The base classes for a user's env that drives itself, with one agent or several: `run()` asks for actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym

from headrace.schemas.errors import EnvContractError
from headrace.workers.external.agent_episodes import ExternalAgentEpisodes
from headrace.workers.external.self_driven import SelfDrivenEnv
from headrace.workers.external.solo_episodes import ExternalEpisodes

AgentDict = Mapping[Any, Any]


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


class ExternalMultiAgentEnv(SelfDrivenEnv[ExternalAgentEpisodes]):
    """Base class. Give the spaces of all possible agents, by agent, and override `run`, which has its own thread.

        def run(self):
            while True:
                episode = self.start_episode()
                observations = simulator.reset()
                while not simulator.over:
                    actions = self.get_action(episode, observations)
                    observations, rewards, dones = simulator.step(actions)
                    self.log_returns(episode, rewards, multiagent_done_dict=dones)
                self.end_episode(episode, observations)

    An agent that is observed acts, the others wait: agents may appear late, pause and return. Policies and their
    mapping work as for envs that are stepped. For episodes and errors see `ExternalEnv`. Unknown agents, and agents
    that are done, raise `EnvContractError` too.
    """

    headrace_agents_driver = "headrace.workers.external.agents:ExternalAgentLanes"

    def __init__(
        self, action_space: Mapping[Any, gym.Space[Any]], observation_space: Mapping[Any, gym.Space[Any]]
    ) -> None:
        for name, spaces in (("action_space", action_space), ("observation_space", observation_space)):
            if not isinstance(spaces, Mapping | gym.spaces.Dict) or not spaces:
                raise EnvContractError(name, f"{spaces!r:.120}", "a dict by agent id, of at least one agent")
        if set(action_space) != set(observation_space):
            seen = f"{list(action_space)!r:.120}"
            raise EnvContractError("agents of action_space", seen, f"{list(observation_space)!r:.120}")
        self.possible_agents = list(observation_space)
        self.observation_spaces = dict(observation_space.items())
        self.action_spaces = dict(action_space.items())

    def log_returns(
        self,
        episode_id: str,
        reward_dict: AgentDict,
        info_dict: AgentDict | None = None,
        multiagent_done_dict: AgentDict | None = None,
        multiagent_truncated_dict: AgentDict | None = None,
    ) -> None:
        """Add to each agent's reward since its last action, also if it was not observed since, or not yet.

        Infos belong to the agents' next observations, if the next call has them. The next call may observe an agent
        that is done or truncated for the last time. "__all__" cannot be done here: call `end_episode`.
        """
        self.episodes.log_returns(episode_id, reward_dict, info_dict, multiagent_done_dict, multiagent_truncated_dict)
