"""Everything of one module: the seats it plays in all envs, what they see, and one forward pass for all of them.

Seats stand agent by agent, and env by env within: row = place of the agent here * envs + env. Rows are added when an
agent is first mapped to the module, so a seat's row never changes. Every pass has the full width, whoever acts, since
a matrix product may round differently for another number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.spaces import Spaces
from headrace.workers.connectors.vector_connectors import VectorConnectors
from headrace.workers.envs.observations import Observations
from headrace.workers.modules.recurrent import Memory
from headrace.workers.policy.acting import Actor, Columns
from headrace.workers.policy.masks import LegalRandomActions
from headrace.workers.policy.policies import Policy
from headrace.workers.policy.seat_noise import SeatNoise
from headrace.workers.randomness.seeds import SeatUse, SeedTree
from headrace.workers.sampling.cutting import Marker
from headrace.workers.sampling.pending import Rows
from headrace.workers.sampling.seat_fragment import SeatFragment


class ModuleSeats:
    """The seats of module number `index`, whose agents have `env_spaces`. `module` None: random actions only."""

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
        self.module: torch.nn.Module | None = None
        self.fragment: SeatFragment | None = None
        self.markers: list[Marker] = []
        self.index = index
        self._num_envs, self._seeds, self._check_bounds = num_envs, seeds, check_bounds
        self._places: dict[int, int] = {}
        self._actor: Actor | None = None
        self._capacity = 1
        self.observations = Observations(env_spaces.observation, 0, check_bounds=check_bounds)
        """What the seats' agents see, as their envs have it; the module sees `connectors.columns`."""
        self.connectors = VectorConnectors(
            policy.env_to_module,
            policy.module_to_env,
            env_spaces,
            self.observations.columns,
            owner=f" of policy {module_id!r}",
        )
        self.random = LegalRandomActions(env_spaces, self.spaces.action, self.observations.columns)
        self.noise: dict[SeatUse, SeatNoise] = {}
        """What actions are made from, by use."""
        self._begin_noise("random_actions", self.random.noise_size, "uniform")

    @property
    def spaces(self) -> Spaces:
        """As the module and its chunks have them: its agents' own after all connectors."""
        return self.connectors.spaces

    @property
    def memory(self) -> Memory | None:
        """What a recurrent module remembers, by row; None of any other."""
        return self._actor.memory if self._actor is not None else None

    @property
    def width(self) -> int:
        """Number of seats."""
        return len(self._places) * self._num_envs

    def row_of(self, env_index: int, agent: int) -> int:
        """The row of an agent of an env; makes room for the agent in all envs if it is its first time here.

        Raises `ConnectorError` when a connector cannot make room.
        """
        place = self._places.get(agent)
        if place is None:
            place = len(self._places)
            self._widen((*self._places, agent))
            self._places[agent] = place
            for use, noise in self.noise.items():
                self._draw_for(agent, use, noise)
            self.open_fragment(self._capacity)
        return place * self._num_envs + env_index

    def _widen(self, agents: Sequence[int]) -> None:
        by_row = np.repeat(np.array(agents, np.intp), self._num_envs)
        observations = Observations(self.env_spaces.observation, len(by_row), check_bounds=self._check_bounds)
        for name, column in self.observations.columns.items():
            observations.columns[name][: len(column)] = column
        self.connectors.widen(observations.columns, by_row)
        self.observations = observations
        self.random.follow(observations.columns)
        if self.fragment is not None:
            self.fragment.widen(self.connectors.columns)
        before = self.memory
        self._make_actor()
        if before is not None and self.memory is not None:
            self.memory.follow(before)

    def _make_actor(self) -> None:
        self._actor = None
        if self.module is not None:
            self._actor = Actor(self.module, self.spaces, self.connectors.columns, self._count_steps)

    def use(self, module: Any, count_steps: Callable[[], int]) -> None:
        """Act with `module` from now on; None leaves random actions. For `count_steps` see `Actor`.

        Raises `ModuleError` for a bad initial state.
        """
        self.module, self._count_steps = module, count_steps
        self._make_actor()
        self.noise.pop("policy", None)
        if module is not None:
            self._begin_noise("policy", module.noise_size, module.noise_kind)

    def _begin_noise(self, use: SeatUse, size: int, kind: Literal["uniform", "normal"]) -> None:
        self.noise[use] = SeatNoise(size, kind)
        for agent in self._places:
            self._draw_for(agent, use, self.noise[use])

    def _draw_for(self, agent: int, use: SeatUse, noise: SeatNoise) -> None:
        noise.add(self._seeds.seats.of(use, i, self.index, agent) for i in range(self._num_envs))

    def draw_anew(self) -> None:
        """Draw all noise once more from the seats' streams, which are others now."""
        for use, noise in self.noise.items():
            self._begin_noise(use, noise.size, noise.kind)

    @property
    def agents(self) -> list[int]:
        """Agents that have seats, in the order of their rows."""
        return list(self._places)

    def rows_of(self, agents: Sequence[int]) -> Rows:
        """All rows of `agents`, agent by agent; makes room for those that are new."""
        first = [self.row_of(0, agent) for agent in agents]
        return np.add.outer(np.array(first, np.intp), np.arange(self._num_envs)).reshape(-1)

    def open_fragment(self, capacity: int) -> None:
        """Have a fragment if there are seats; those who come later get one of this capacity too."""
        self._capacity = capacity
        if self.fragment is None and self.width:
            self.fragment = SeatFragment(self.width, capacity, self.connectors.columns)

    def take_over(self, old: ModuleSeats) -> None:
        """Go on in place of `old`: with the markers that it has to tell, and, if they fit, what its connectors know."""
        self.markers = old.markers
        known = old.connectors.get_state()
        if self.connectors.fits(known):
            self.connectors.set_state(known)

    # -- one poll -----------------------------------------------------------------------------------------------------

    def act(self, acting: Rows, *, explore: bool, random_actions: bool) -> Columns:
        """Columns with a row for every seat; those of `acting` are meant."""
        some = None if len(acting) == self.width else acting
        if random_actions:
            columns = self.random(self.noise["random_actions"].next(acting), acting)
            return self.connectors.for_env(columns, some) if self.connectors.maps_actions else columns
        assert self._actor is not None
        columns = self._actor(self.noise["policy"].next(acting) if explore else None, some)
        return self.connectors.for_env(columns, some)

    def answer(self, rows: Rows, rewards: NDArray[np.float64], unseen: Sequence[int]) -> None:
        """The last actions of `rows` are answered, by what these see now; the rows `unseen` see nothing new."""
        assert self.fragment is not None, "who acted has a fragment"
        if self.connectors.sees:
            new = ~np.isin(rows, unseen) if unseen else slice(None)
            seen = rows[new]
            chosen = self.fragment.chosen(seen, self.connectors.actions)
            if len(seen):
                self.connectors.stepped(seen, chosen, rewards[new])
        self.fragment.answer(rows, rewards)

    def start(self, rows: Rows) -> None:
        """Agents have appeared in the seats `rows`, and see their first observations."""
        self.connectors.started(rows)
        if self.memory is not None:
            self.memory.reset(rows)

    def state_in(self, row: int, *, hangs: bool) -> dict[str, NDArray[Any]]:
        """What a recurrent module remembers before the row's next step, the one already chosen if that `hangs`."""
        return {} if self.memory is None else self.memory.of(row, before=hangs)

    def blank(self, env_index: int) -> None:
        """The env is gone; its seats see nothing."""
        for column in self.observations.columns.values():
            column[env_index :: self._num_envs] = 0
