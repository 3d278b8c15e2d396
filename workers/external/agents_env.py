"""The base class for a user's multi-agent env that drives itself: like `env.py`, with dicts by agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym

from headrace.schemas.errors import EnvContractError
from headrace.workers.external.agent_episodes import ExternalAgentEpisodes
from headrace.workers.external.self_driven import SelfDrivenEnv

AgentDict = Mapping[Any, Any]


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
