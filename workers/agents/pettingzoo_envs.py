"""PettingZoo's two kinds of env in the dict protocol: all agents at once, and one after another."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import orjson
from pettingzoo.utils.env import AECEnv, ParallelEnv

from headrace.schemas.errors import EnvContractError
from headrace.workers.agents.env import ALL, AgentDict
from headrace.workers.envs.checks import told_info


def adapt(env: Any) -> Any:
    """Return a PettingZoo env in the dict protocol. Return any other object unchanged."""
    if isinstance(env, ParallelEnv):
        return Simultaneous(env)
    return TakingTurns(env) if isinstance(env, AECEnv) else env


class _Adapted:
    def __init__(self, env: Any) -> None:
        self.env = env
        self.possible_agents = list(env.possible_agents)
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.unwrapped = env.unwrapped
        self.render_mode = getattr(env.unwrapped, "render_mode", None)
        self.close, self.render = env.close, env.render


class Simultaneous(_Adapted):
    """A ParallelEnv. The episode is over when no agent is left."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.reset = env.reset

    def step(self, actions: AgentDict) -> tuple[AgentDict, ...]:
        """Step all agents."""
        observations, rewards, terminateds, truncateds, infos = self.env.step(actions)
        return observations, rewards, *_ends(not self.env.agents, terminateds, truncateds), infos


class TakingTurns(_Adapted):
    """An AECEnv. Only the agent whose turn it is has an observation, with all its rewards since its last turn.

    So a transition runs from one turn of an agent to its next one, and no row is padded. Agents that are done take
    their last turn inside the adapter, without the policy.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[AgentDict, AgentDict]:
        """Reset, and return the first agent's observation. The first step has the rewards of turns before it."""
        self.env.reset(seed=seed, options=options)
        observations, self._early, terminateds, truncateds, infos = self._turns()
        if any(terminateds.values()) or any(truncateds.values()):
            raise EnvContractError("turns after a reset", "an agent that is done already", "agents that may act")
        return observations, infos

    def step(self, actions: AgentDict) -> tuple[AgentDict, ...]:
        """Take one action. Return the observations of the following turns, until another action is needed."""
        (action,) = actions.values()
        self.env.step(action)
        observations, rewards, terminateds, truncateds, infos = self._turns()
        for agent, reward in self._early.items():
            rewards[agent] = rewards.get(agent, 0.0) + reward
        self._early = {}
        return observations, rewards, terminateds, truncateds, infos

    def _turns(self) -> tuple[AgentDict, ...]:
        observations: AgentDict = {}
        rewards: AgentDict = {}
        terminateds: AgentDict = {}
        truncateds: AgentDict = {}
        infos: AgentDict = {}
        env = self.env
        while env.agents:
            agent = env.agent_selection
            observation, reward, terminated, truncated, info = env.last()
            observations[agent], rewards[agent], infos[agent] = observation, reward, info
            if not (terminated or truncated):
                break
            # The next turn may change them.
            observations[agent], infos[agent] = deepcopy(observation), orjson.loads(told_info(info))
            terminateds[agent], truncateds[agent] = bool(terminated), bool(truncated)
            env.step(None)
        return observations, rewards, *_ends(not env.agents, terminateds, truncateds), infos


def _ends(over: bool, terminateds: AgentDict, truncateds: AgentDict) -> tuple[AgentDict, AgentDict]:
    """Return both with the end of the episode, which is truncated if its last agents are."""
    cut = over and any(truncateds.values()) and not any(terminateds.values())
    return {**terminateds, ALL: over and not cut}, {**truncateds, ALL: cut}
