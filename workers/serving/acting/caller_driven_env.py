"""The external env of a client that acts by itself. The client's callers drive its episodes, not its `run`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from headrace.schemas.chunks.gymnasium_spaces import to_gym
from headrace.schemas.chunks.spaces import Spaces
from headrace.workers.external.agents_env import ExternalMultiAgentEnv
from headrace.workers.external.env import ExternalEnv


class CallerDrivenEnv(ExternalEnv):
    """Episodes of one agent."""

    def __init__(self, action_space: Any, observation_space: Any) -> None:
        super().__init__(action_space, observation_space)
        self._closed = threading.Event()

    def run(self) -> None:
        """Wait until the env is closed."""
        self._closed.wait()

    def close(self) -> None:
        """Make `run` return."""
        self._closed.set()


class CallerDrivenMultiAgentEnv(ExternalMultiAgentEnv):
    """Episodes of several agents."""

    def __init__(self, action_space: Any, observation_space: Any) -> None:
        super().__init__(action_space, observation_space)
        self._closed = threading.Event()

    def run(self) -> None:
        """Wait until the env is closed."""
        self._closed.wait()

    def close(self) -> None:
        """Make `run` return."""
        self._closed.set()


def caller_driven_env(spaces: Spaces | Mapping[str, Spaces]) -> CallerDrivenEnv | CallerDrivenMultiAgentEnv:
    """Return an env with a server's `spaces`: those of one agent, or of several by the texts of their ids."""
    if isinstance(spaces, Spaces):
        return CallerDrivenEnv(to_gym(spaces.action), to_gym(spaces.observation))
    actions = {agent: to_gym(own.action) for agent, own in spaces.items()}
    return CallerDrivenMultiAgentEnv(actions, {agent: to_gym(own.observation) for agent, own in spaces.items()})
