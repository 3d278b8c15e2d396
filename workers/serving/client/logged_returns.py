"""The reward, info and ends that a client logs for an episode's last action. They go out with the next step.

Every call is checked at once, so that no later call is refused because of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from headrace.schemas.basics.printable import brief
from headrace.schemas.chunks.info_json import info_json
from headrace.schemas.chunks.info_json import read_info as written_info
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import EnvContractError
from headrace.schemas.frames.wire import DEFAULT_LIMITS
from headrace.workers.envs.bounds import LARGEST_REWARD
from headrace.workers.envs.checks import told_info
from headrace.workers.serving.serving_messages import ALL

_MAX_INFO_BYTES = DEFAULT_LIMITS.header_bytes // 2
"""The other half of a message's header is for its other fields."""

Dones = Mapping[Any, bool]


@dataclass(slots=True)
class LoggedReturns:
    """The reward and info of one agent since the last step."""

    reward: float = 0.0
    info: dict[str, Any] | None = None

    def add(self, reward: Any, info: Any = None, done: Dones | None = None, truncated: Dones | None = None) -> None:
        """Add to the reward, and replace the info. Raises `EnvContractError` and then changes nothing."""
        if done is not None or truncated is not None:
            raise EnvContractError("who is done", f"{done or truncated!r:.80}", "None: the episode has one agent")
        checked = self.info if info is None else read_info(info)
        self.reward, self.info = check_reward(self.reward + check_reward(reward)), checked

    def fields(self) -> dict[str, Any]:
        """Return the fields of the next step's message."""
        return {"reward": self.reward, "info": self.info}

    def settle(self) -> None:
        """Start from zero: the server has the step."""
        self.reward, self.info = 0.0, None


@dataclass(slots=True)
class LoggedReturnsByAgent:
    """The rewards, infos and ends of several `agents` since the last step, by the text of their ids."""

    agents: Collection[str]
    reward: dict[str, float] = field(default_factory=dict)
    info: dict[str, dict[str, Any]] = field(default_factory=dict)
    terminated: dict[str, bool] = field(default_factory=dict)
    truncated: dict[str, bool] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    """Agents that were done before the last action."""

    def add(self, reward: Any, info: Any = None, done: Dones | None = None, truncated: Dones | None = None) -> None:
        """Add dicts by agent. Raises `EnvContractError`, which names the agent, and then changes nothing."""
        rewards = {agent: self._sum(agent, own) for agent, own in self._by_text("rewards", reward).items()}
        by_text = self._by_text("infos", {} if info is None else info)
        infos = {agent: read_info(own, f"info of agent {agent!r}") for agent, own in by_text.items()}
        terminateds, truncateds = self._done("terminated", done), self._done("truncated", truncated)
        self.reward |= {agent: total for agent, total in rewards.items() if agent not in self.gone}
        self.info |= infos
        self.terminated |= terminateds
        self.truncated |= truncateds

    def _by_text(self, what: str, by_agent: Any) -> dict[str, Any]:
        if not isinstance(by_agent, Mapping):
            raise EnvContractError(what, f"{by_agent!r:.80}", "a dict by agent")
        by_text = {str(agent): own for agent, own in by_agent.items()}
        if len(by_text) < len(by_agent):
            raise EnvContractError(what, f"{by_agent!r:.80}", "a dict without two agents of the same text")
        for agent in by_text:
            if agent not in self.agents:
                raise EnvContractError("agent", f"{agent!r:.80} in {what}", f"one of {list(self.agents)!r:.200}")
        return by_text

    def _sum(self, agent: str, reward: Any) -> float:
        try:
            total = check_reward(self.reward.get(agent, 0.0) + check_reward(reward))
        except EnvContractError as error:
            raise EnvContractError(f"{error.what} of agent {agent!r}", error.seen, error.expected) from error
        if total and agent in self.gone:  # zeros are allowed: some envs go on filling their dicts
            raise EnvContractError(
                "rewards", f"{reward!r:.40} of agent {agent!r}, which is done", "of live agents only"
            )
        return total

    def _done(self, what: str, dones: Any) -> dict[str, bool]:
        by_agent = {} if dones is None else dones
        if isinstance(by_agent, Mapping) and ALL in by_agent:
            if by_agent[ALL]:
                raise EnvContractError(
                    what, f"{ALL!r}: {by_agent[ALL]!r:.40}", "agents' own; end_episode() ends the episode"
                )
            by_agent = {agent: done for agent, done in by_agent.items() if agent != ALL}
        by_text = self._by_text(what, by_agent)
        for agent, done in by_text.items():
            if not isinstance(done, bool | np.bool_):
                raise EnvContractError(f"{what} of agent {agent!r}", f"{done!r:.80}", "a bool")
        return {agent: True for agent, done in by_text.items() if done and agent not in self.gone}

    def fields(self) -> dict[str, Any]:
        """Return the fields of the next step's message."""
        dones = {"terminated": self.terminated, "truncated": self.truncated}
        return {"reward": self.reward, "info": self.info, **dones}

    def settle(self) -> None:
        """Start from zero: the server has the step. Agents that it ended stay done."""
        self.gone = {*self.gone, *self.terminated, *self.truncated}  # a copy of this record keeps its own
        self.reward, self.info, self.terminated, self.truncated = {}, {}, {}, {}


def no_returns(spaces: Spaces | Mapping[str, Spaces]) -> LoggedReturns | LoggedReturnsByAgent:
    """Return empty records for a new episode of one agent, or of several."""
    return LoggedReturns() if isinstance(spaces, Spaces) else LoggedReturnsByAgent(spaces)


def check_reward(reward: Any) -> float:
    """Return the reward as a float. Raises `EnvContractError` unless it is finite and within the largest reward."""
    try:
        checked = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError, OverflowError) as error:
        raise EnvContractError("reward", f"{brief(reward)} ({type(reward)})", "a finite number") from error
    if not abs(checked) <= LARGEST_REWARD:
        raise EnvContractError("reward", brief(reward), f"a finite number within {LARGEST_REWARD:.3g}")
    return checked


def read_info(info: Any, what: str = "info") -> dict[str, Any]:
    """Return a copy of an info as `told_info` writes it. One that does not fit into the header of a step is left out.

    Raises `EnvContractError` for anything but a dict.
    """
    try:
        written = told_info(written_info(info))  # it may have been written before
    except EnvContractError as error:
        raise EnvContractError(what, error.seen, error.expected) from error
    if len(written) > _MAX_INFO_BYTES:
        written = info_json({}, [f"{what} ({len(written):,} bytes of JSON; at most {_MAX_INFO_BYTES:,} fit)"])
    read: dict[str, Any] = orjson.loads(written)
    return read
