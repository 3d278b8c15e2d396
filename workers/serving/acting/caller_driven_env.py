"""The env of a client that acts by itself, of one agent or of several: whoever calls the client drives its episodes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from headrace.schemas.spaces import Spaces
from headrace.workers.envs.spaces import to_gym
from headrace.workers.external.agents_env import ExternalMultiAgentEnv
from headrace.workers.external.env import ExternalEnv


class _Idle:
    """Nothing is driven from `run`."""

    def __init__(self, action_space: Any, observation_space: Any) -> None:
        super().__init__(action_space, observation_space)  # type: ignore[call-arg]
        self._over = threading.Event()

    def run(self) -> None:
        """Until the env is closed."""
        self._over.wait()

    def close(self) -> None:
        """See `ExternalEnv`."""
        self._over.set()


class CallerDrivenEnv(_Idle, ExternalEnv):
    """Episodes of one agent."""


class CallerDrivenMultiAgentEnv(_Idle, ExternalMultiAgentEnv):
    """Episodes of several."""


def caller_driven_env(spaces: Spaces | Mapping[str, Spaces]) -> CallerDrivenEnv | CallerDrivenMultiAgentEnv:
    """With the `spaces` that a server tells: one agent's, or those of several by the texts of their ids."""
    if isinstance(spaces, Spaces):
        return CallerDrivenEnv(to_gym(spaces.action), to_gym(spaces.observation))
    actions = {agent: to_gym(own.action) for agent, own in spaces.items()}
    return CallerDrivenMultiAgentEnv(actions, {agent: to_gym(own.observation) for agent, own in spaces.items()})
