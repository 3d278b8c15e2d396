"""The seats that one module plays in all envs: the row of each seat, and the observation of each agent.

Rows are ordered by agent, then by env: row = place of the agent in this module * envs + env. Rows are added when an
agent is first mapped to the module, so a seat's row never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Spaces
from headrace.workers.connectors.vector_connectors import VectorConnectors
from headrace.workers.envs.observations import Observations
from headrace.workers.policy.acting_module import ActingModule
from headrace.workers.policy.noise import ActionNoise
from headrace.workers.policy.policies import Policy
from headrace.workers.randomness.seeds import NoiseUse, SeedTree


class ModuleSeats:
    """The seats of module number `index`, whose agents have `env_spaces`. `policy` acts for them."""

    def __init__(
        self,
        module_id: str,
        index: int,
        policy: Policy,
        env_spaces: Spaces,
        num_envs: int,
        seeds: SeedTree,
        *,
        check_bounds: bool,
    ) -> None:
        self.module_id = module_id
        self.env_spaces = env_spaces
        self.index = index
        self.on_widen: Callable[[], None] | None = None
        """Called when there are more rows than before."""
        self._num_envs, self._seeds, self._check_bounds = num_envs, seeds, check_bounds
        self._places: dict[int, int] = {}
        self.observations = Observations(env_spaces.observation, 0, check_bounds=check_bounds)
        """Observations of the seats' agents, as their envs gave them. The module sees `policy.connectors.columns`."""
        connectors = VectorConnectors(
            policy.env_to_module,
            policy.module_to_env,
            env_spaces,
            self.observations.columns,
            owner=f" of policy {module_id!r}",
        )
        noise = ActionNoise(lambda use: self._streams(use, self._places), in_step=False)
        self.policy = ActingModule(module_id, env_spaces, connectors, noise)

    def _streams(self, use: NoiseUse, agents: Sequence[int] | dict[int, int]) -> Iterator[np.random.Generator]:
        for agent in agents:
            for env_index in range(self._num_envs):
                yield self._seeds.seats.of(use, env_index, self.index, agent)

    @property
    def width(self) -> int:
        """Number of seats."""
        return len(self._places) * self._num_envs

    @property
    def agents(self) -> list[int]:
        """Agents that have seats, in the order of their rows."""
        return list(self._places)

    def row_of(self, env_index: int, agent: int) -> int:
        """Return the row of an agent of an env. At an agent's first call, add rows for it in all envs.

        Raises `ConnectorError` when a connector cannot make room.
        """
        place = self._places.get(agent)
        if place is None:
            place = len(self._places)
            self._widen((*self._places, agent))
            self._places[agent] = place
            self.policy.noise.add(lambda use: self._streams(use, (agent,)))
            if self.on_widen is not None:
                self.on_widen()
        return place * self._num_envs + env_index

    def _widen(self, agents: Sequence[int]) -> None:
        by_row = np.repeat(np.array(agents, np.intp), self._num_envs)
        observations = Observations(self.env_spaces.observation, len(by_row), check_bounds=self._check_bounds)
        for name, column in self.observations.columns.items():
            observations.columns[name][: len(column)] = column
        self.policy.connectors.widen(observations.columns, by_row)
        self.observations = observations
        self.policy.widen()

    def rows_of(self, agents: Sequence[int]) -> NDArray[np.intp]:
        """Return all rows of `agents`, agent by agent. Add rows for new agents."""
        first = [self.row_of(0, agent) for agent in agents]
        return np.add.outer(np.array(first, np.intp), np.arange(self._num_envs)).reshape(-1)

    def blank(self, env_index: int) -> None:
        """Clear the observations of the seats of an env that is gone."""
        self.observations.blank(slice(env_index, None, self._num_envs))
