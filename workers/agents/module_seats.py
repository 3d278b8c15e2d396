"""The seats that one module plays in all envs: each one's row, observation and random streams.

Rows are ordered by agent, then by env: row = place of the agent in this module * envs + env. Rows are added when an
agent is first mapped to the module, so a seat's row never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import StateError
from headrace.workers.connectors.vector_connectors import VectorConnectors
from headrace.workers.envs.observations import NoteOutside, Observations
from headrace.workers.policy.acting_module import ActingModule
from headrace.workers.policy.noise import ActionNoise
from headrace.workers.policy.policies import Policy
from headrace.workers.randomness.seeds import (
    SEAT_USES,
    NoiseUse,
    SeatStreams,
    SeedTree,
    check_array,
    read_streams,
    write_streams,
)


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
        note_outside: NoteOutside | None,
    ) -> None:
        self.module_id = module_id
        self.env_spaces = env_spaces
        self.index = index
        self.on_widen: Callable[[], None] | None = None
        """Called when there are more rows than before."""
        self._num_envs, self._seeds = num_envs, seeds
        self._observations_of = partial(
            Observations, env_spaces.observation, check_bounds=check_bounds, note_outside=note_outside
        )
        self._places: dict[int, int] = {}
        self.observations = self._observations_of(0)
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
        observations = self._observations_of(len(by_row))
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


Modules = Mapping[str, ModuleSeats]


def read_seats(streams: SeatStreams, modules: Modules) -> dict[str, Any]:
    """Return the state of all seats' streams.

    entropy: uint8, little-endian, and incarnation: the root for the streams of new seats.

    keys: int64 (streams, 4), (env, use, module, agent) of each known stream; streams: uint64 (streams, 6). modules: by
    id, the agents that have seats, int64, and by use the numbers drawn for them, ordered by agent, then by env.
    """
    entropy = streams.entropy
    return {
        "entropy": np.frombuffer(entropy.to_bytes((entropy.bit_length() + 7) // 8, "little"), np.uint8),
        "incarnation": streams.incarnation,
        "keys": np.array(list(streams.known), np.int64).reshape(-1, 4),
        "streams": read_streams(list(streams.known.values())).reshape(-1, 6),
        "modules": {
            module_id: {
                "agents": np.array(module.agents, np.int64),
                **{use: noise.read() for use, noise in module.policy.noise.rows.items()},
            }
            for module_id, module in modules.items()
        },
    }


def write_seats(streams: SeatStreams, modules: Modules, state: Mapping[str, Any]) -> None:
    """Continue from the state of `read_seats`. Agents with seats here only begin as they would have begun there."""
    streams.restart(int.from_bytes(state["entropy"].tobytes(), "little"), state["incarnation"])
    keys = [tuple(key) for key in state["keys"].tolist()]
    write_streams([streams.at(key) for key in keys], state["streams"])
    drawn = set()
    for module_id, known in state["modules"].items():
        module, agents = modules[module_id], known["agents"].tolist()
        rows = module.rows_of(agents)
        module.policy.noise.begin_again()
        for use, noise in module.policy.noise.rows.items():
            noise.write(rows, known[use]["numbers"], known[use]["used"])
        drawn |= {(module.index, agent) for agent in agents}
    # `begin_again` drew from streams whose numbers `state` holds already, so set these streams back.
    again = [i for i, key in enumerate(keys) if key[2:] in drawn]
    write_streams([streams.at(keys[i]) for i in again], state["streams"][again])


def check_seats(modules: Modules, num_envs: int, num_agents: int, state: Any) -> None:
    """Raise `StateError` unless `write_seats` can take `state`."""
    check_array(state, "seats", "entropy", np.uint8, (None,))
    keys = check_array(state, "seats", "keys", np.int64, (None, 4))
    check_array(state, "seats", "streams", np.uint64, (len(keys), 6))
    known, incarnation = state.get("modules"), state.get("incarnation")
    if not isinstance(incarnation, int) or incarnation < 0:
        raise StateError(f"random_streams/seats/incarnation should be a whole number, got {incarnation!r:.80}")
    if not isinstance(known, Mapping) or known.keys() != modules.keys():
        seen = list(known) if isinstance(known, Mapping) else known
        raise StateError(
            f"random_streams/seats is of the modules {seen!r:.200}; this runner has {list(modules)!r:.200}"
        )
    _check_range("keys", keys, (num_envs, max(SEAT_USES.values()) + 1, len(modules), num_agents))
    for module_id, module in modules.items():
        _check_module(module, num_envs, num_agents, known[module_id])


def _check_module(module: ModuleSeats, num_envs: int, num_agents: int, state: Any) -> None:
    name = f"seats/{module.module_id}"
    agents = check_array(state, name, "agents", np.int64, (None,))
    _check_range(f"{module.module_id}/agents", agents, num_agents)
    rows = len(agents) * num_envs
    for use, noise in module.policy.noise.rows.items():
        noise.check(f"{name}/{use}", state.get(use), rows)


def _check_range(name: str, numbers: Any, limit: Any) -> None:
    if (numbers < 0).any() or (numbers >= limit).any():
        raise StateError(f"random_streams/seats/{name} should be from 0 to below {limit}; the state is of another env")
