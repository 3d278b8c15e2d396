"""Everything of one module: the seats it plays in all envs, what they see, and one forward pass for all of them.

Seats stand agent by agent, and env by env within: row = place of the agent here * envs + env. Rows are added when an
agent is first mapped to the module, so a seat's row never changes. Every pass has the full width, whoever acts, since
a matrix product may round differently for another number of rows.
"""

from __future__ import annotations

from typing import Any

import torch

from headrace.schemas.spaces import Spaces
from headrace.workers.cutting import Marker
from headrace.workers.envs.observations import Observations
from headrace.workers.modules.acting import Actor, Columns
from headrace.workers.multi_agent.fragment import Rows, SeatFragment
from headrace.workers.multi_agent.masks import LegalRandomActions
from headrace.workers.multi_agent.noise import SeatNoise
from headrace.workers.randomness import SeedTree


class ModuleSeats:
    """The seats of module number `index`. `module` None: random actions only."""

    def __init__(
        self, module_id: str, index: int, spaces: Spaces, num_envs: int, seeds: SeedTree, *, check_bounds: bool
    ) -> None:
        self.module_id = module_id
        self.spaces = spaces
        self.module: torch.nn.Module | None = None
        self.fragment: SeatFragment | None = None
        self.markers: list[Marker] = []
        self.index = index
        self._num_envs, self._seeds, self._check_bounds = num_envs, seeds, check_bounds
        self._places: dict[int, int] = {}
        self._actor: Actor | None = None
        self._capacity = 1
        self.observations = Observations(spaces.observation, 0, check_bounds=check_bounds)
        self.random = LegalRandomActions(spaces, self.observations.columns)
        self._random_noise = SeatNoise(self.random.noise_size, "uniform")
        self._policy_noise = SeatNoise(0, "uniform")

    @property
    def width(self) -> int:
        """Number of seats."""
        return len(self._places) * self._num_envs

    def row_of(self, env_index: int, agent: int) -> int:
        """The row of an agent of an env; makes room for the agent in all envs if it is its first time here."""
        place = self._places.get(agent)
        if place is None:
            place = self._places[agent] = len(self._places)
            self._widen()
            envs = range(self._num_envs)
            self._random_noise.add(self._seeds.of_seat("random_actions", i, self.index, agent) for i in envs)
            self._policy_noise.add(self._seeds.of_seat("policy", i, self.index, agent) for i in envs)
        return place * self._num_envs + env_index

    def _widen(self) -> None:
        before = self.observations.columns
        self.observations = Observations(self.spaces.observation, self.width, check_bounds=self._check_bounds)
        columns = self.observations.columns
        for name, column in before.items():
            columns[name][: len(column)] = column
        self.random.follow(columns)
        if self.fragment is not None:
            self.fragment.widen(columns)
        self.open_fragment(self._capacity)
        if self.module is not None:
            self._actor = Actor(self.module, self.spaces, columns)

    def use(self, module: Any) -> None:
        """Act with `module` from now on; None leaves random actions."""
        self.module, self._actor = module, None
        if module is None:
            return
        self._policy_noise = SeatNoise(module.noise_size, module.noise_kind)
        for agent in self._places:
            envs = range(self._num_envs)
            self._policy_noise.add(self._seeds.of_seat("policy", i, self.index, agent) for i in envs)
        if self._places:
            self._actor = Actor(module, self.spaces, self.observations.columns)

    def open_fragment(self, capacity: int) -> None:
        """Have a fragment if there are seats; those who come later get one of this capacity too."""
        self._capacity = capacity
        if self.fragment is None and self.width:
            self.fragment = SeatFragment(self.width, capacity, self.observations.columns)

    def act(self, acting: Rows, *, explore: bool, random_actions: bool) -> Columns:
        """Columns with a row for every seat; those of `acting` are meant."""
        if random_actions:
            return self.random(self._random_noise.next(acting), acting)
        assert self._actor is not None
        return self._actor(self._policy_noise.next(acting) if explore else None)

    def blank(self, env_index: int) -> None:
        """The env is gone; its seats see nothing."""
        for column in self.observations.columns.values():
            column[env_index :: self._num_envs] = 0
