"""What has come of an episode's last action, gathered until it goes out with the next step.

All of it is checked when it is said, so that no later call is refused for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.schemas.errors import EnvContractError
from headrace.schemas.serving_agents import ALL
from headrace.schemas.spaces import Spaces
from headrace.workers.serving.space_codec import check_reward, read_info

Dones = Mapping[Any, bool]


@dataclass(slots=True)
class LoggedReturns:
    """One agent's."""

    reward: float = 0.0
    info: dict[str, Any] | None = None

    def add(self, reward: Any, info: Any = None, done: Dones | None = None, truncated: Dones | None = None) -> None:
        """Raises `EnvContractError`, and then nothing of it counts."""
        if done is not None or truncated is not None:
            raise EnvContractError("who is done", f"{done or truncated!r:.80}", "None: the episode has one agent")
        told = self.info if info is None else read_info(info)
        self.reward, self.info = check_reward(self.reward + check_reward(reward)), told

    def fields(self) -> dict[str, Any]:
        """Of the message."""
        return {"reward": self.reward, "info": self.info}

    def settle(self) -> None:
        """The server has it."""
        self.reward, self.info = 0.0, None


@dataclass(slots=True)
class LoggedReturnsByAgent:
    """That of several `agents`, by the text of their ids."""

    agents: Collection[str]
    reward: dict[str, float] = field(default_factory=dict)
    info: dict[str, dict[str, Any]] = field(default_factory=dict)
    terminated: dict[str, bool] = field(default_factory=dict)
    truncated: dict[str, bool] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    """Who was done before the last action."""

    def add(self, reward: Any, info: Any = None, done: Dones | None = None, truncated: Dones | None = None) -> None:
        """Dicts by agent. Raises `EnvContractError`, which names the agent, and then nothing of it counts."""
        earned = {agent: self._sum(agent, own) for agent, own in self._told("rewards", reward).items()}
        told = self._told("infos", {} if info is None else info)
        infos = {agent: read_info(own, f"info of agent {agent!r}") for agent, own in told.items()}
        terminateds, truncateds = self._done("terminated", done), self._done("truncated", truncated)
        self.reward |= {agent: total for agent, total in earned.items() if agent not in self.gone}
        self.info |= infos
        self.terminated |= terminateds
        self.truncated |= truncateds

    def _told(self, what: str, by_agent: Any) -> dict[str, Any]:
        if not isinstance(by_agent, Mapping):
            raise EnvContractError(what, f"{by_agent!r:.80}", "a dict by agent")
        told = {str(agent): own for agent, own in by_agent.items()}
        for agent in told:
            if agent not in self.agents:
                raise EnvContractError("agent", f"{agent!r:.80} in {what}", f"one of {list(self.agents)!r:.200}")
        return told

    def _sum(self, agent: str, reward: Any) -> float:
        try:
            total = check_reward(self.reward.get(agent, 0.0) + check_reward(reward))
        except EnvContractError as error:
            raise EnvContractError(f"{error.what} of agent {agent!r}", error.seen, error.expected) from error
        if total and agent in self.gone:  # envs that fill their dicts give zeros for ever
            raise EnvContractError("rewards", f"{reward!r:.40} of agent {agent!r}, which is done", "of others")
        return total

    def _done(self, what: str, dones: Any) -> dict[str, bool]:
        told = {} if dones is None else dones
        if isinstance(told, Mapping) and ALL in told:
            if told[ALL]:
                raise EnvContractError(
                    what, f"{ALL!r}: {told[ALL]!r:.40}", "agents' own; end_episode() ends the episode"
                )
            told = {agent: done for agent, done in told.items() if agent != ALL}
        told = self._told(what, told)
        for agent, done in told.items():
            if not isinstance(done, bool | np.bool_):
                raise EnvContractError(f"{what} of agent {agent!r}", f"{done!r:.80}", "a bool")
        return {agent: True for agent, done in told.items() if done and agent not in self.gone}

    def fields(self) -> dict[str, Any]:
        """Of the message."""
        dones = {"terminated": self.terminated, "truncated": self.truncated}
        return {"reward": self.reward, "info": self.info, **dones}

    def settle(self) -> None:
        """The server has it; who is done by it stays so."""
        self.gone |= {*self.terminated, *self.truncated}
        self.reward, self.info, self.terminated, self.truncated = {}, {}, {}, {}


def no_returns(spaces: Spaces | Mapping[str, Spaces]) -> LoggedReturns | LoggedReturnsByAgent:
    """As an episode begins, of one agent or of several."""
    return LoggedReturns() if isinstance(spaces, Spaces) else LoggedReturnsByAgent(spaces)
