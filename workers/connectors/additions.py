"""Connectors that add the previous action and reward, the time, or the agent to an observation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Box, Dict, Space, Spaces, leaves
from headrace.schemas.errors import ConfigError, ConnectorError
from headrace.workers.connectors.connector import Columns, Connector, Rows
from headrace.workers.connectors.pieces import as_vectors, one_hot_size


class _Addition(Connector):
    """Base of connectors that add leaves to an observation.

    The leaves go into the observation's Dict. Any other observation moves under "obs" in a new Dict.
    """

    def _beside(self, space: Space, added: dict[str, Box]) -> Space:
        self._wraps = not isinstance(space, Dict)
        present: dict[str, Space] = dict(space.spaces) if isinstance(space, Dict) else {"obs": space}
        if taken := sorted(present.keys() & added.keys()):
            raise ConfigError(f"{type(self).__name__}: the observation already has {taken}", key="env_to_module")
        return Dict(spaces={**present, **added})

    def _with(self, columns: Columns, added: Columns) -> Columns:
        old = {f"obs/{name}": column for name, column in columns.items()} if self._wraps else columns
        return {**old, **{f"obs/{name}": column for name, column in added.items()}}


class PreviousActionReward(_Addition):
    """Adds "prev_action", float32 (size,) with choices one-hot, and "prev_reward", float32 (1,).

    Both belong to the step that led to the observation, and are 0 at an episode's start. The action is the policy's
    own, not the one that the env got in its place.
    """

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        """Return the spaces with both leaves added.

        The action space must be known by now, so module_to_env is connected first.
        """
        self._actions = list(leaves(spaces.action, "actions"))
        self._size = sum(one_hot_size(leaf) for _, leaf in self._actions)
        added = {"prev_action": Box(shape=(self._size,), dtype="<f4"), "prev_reward": Box(shape=(1,), dtype="<f4")}
        return Spaces(observation=self._beside(spaces.observation, added), action=spaces.action)

    def process(self, rows: Rows) -> Columns:
        n = len(rows.lanes)
        action = np.zeros((n, self._size), np.float32)
        if not rows.first:
            np.concatenate([as_vectors(leaf, rows.actions[name]) for name, leaf in self._actions], axis=1, out=action)
        reward = rows.rewards.astype(np.float32).reshape(n, 1)
        return self._with(rows.columns, {"prev_action": action, "prev_reward": reward})


class TimeOneHot(_Addition):
    """Adds "time", float32 (length,): the one-hot number of steps that the agent has taken in its episode.

    From step `length` - 1 on, the last place is set.
    """

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ConfigError(f"TimeOneHot(length={length}): give 1 or more", key="env_to_module")
        self._length = length

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        """Return the spaces with "time" added."""
        self._t = np.zeros(width, np.int64)
        added = {"time": Box(shape=(self._length,), dtype="<f4", low=0.0, high=1.0)}
        return Spaces(observation=self._beside(spaces.observation, added), action=spaces.action)

    def process(self, rows: Rows) -> Columns:
        if not rows.first:
            self._t[rows.lanes] += 1
        time = np.zeros((len(rows.lanes), self._length), np.float32)
        time[np.arange(len(time)), np.minimum(self._t[rows.lanes], self._length - 1)] = 1.0
        return self._with(rows.columns, {"time": time})

    def reset(self, lanes: NDArray[np.intp]) -> None:
        self._t[lanes] = 0

    def widen(self, width: int) -> None:
        self._t = np.concatenate((self._t, np.zeros(width - len(self._t), np.int64)))


class AgentOneHot(_Addition):
    """Adds "agent", float32 (num_agents,): the one-hot place of the agent among the env's possible_agents.

    One policy can thus play several agents differently. With one agent, the place is 0.
    """

    def __init__(self, num_agents: int) -> None:
        if num_agents < 1:
            raise ConfigError(f"AgentOneHot(num_agents={num_agents}): give 1 or more", key="env_to_module")
        self._num_agents = num_agents

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        """Return the spaces with "agent" added."""
        added = {"agent": Box(shape=(self._num_agents,), dtype="<f4", low=0.0, high=1.0)}
        return Spaces(observation=self._beside(spaces.observation, added), action=spaces.action)

    def process(self, rows: Rows) -> Columns:
        """Return the columns with "agent" added. Raises `ConnectorError` for an agent beyond `num_agents`."""
        last = int(rows.agents.max(initial=0))
        if last >= self._num_agents:
            raise ConnectorError(
                f"AgentOneHot(num_agents={self._num_agents})",
                f"an agent has place {last} among the env's possible_agents; give num_agents = {last + 1} or more",
            )
        agent = np.zeros((len(rows.lanes), self._num_agents), np.float32)
        agent[np.arange(len(agent)), rows.agents] = 1.0
        return self._with(rows.columns, {"agent": agent})
