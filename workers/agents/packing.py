"""A multi-agent env as one row of columns, so that it can live where envs of one agent do: in a process, on a host.

    observation   0 "red", 1 "blue", ...   each agent's observation, or any value of its space if it has none
                  observed, rewarded       int32 (agents,): 0 for an agent that is not, else its place in the env's dict
                  rewards                  float64 (agents,)
                  ends                     int8 (agents + 1,): a `ChunkEnd` each, last that of the episode as a whole
    action        0 "red", 1 "blue", ...   each agent's action
                  acting                   int32 (agents,), as `observed`

An agent has its index in possible_agents. Its id stands, as JSON, in the names of its columns, so equal spaces mean
equal agents. Infos travel beside the columns, by index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Box, Dict, Space, Spaces, Tuple
from headrace.schemas.errors import DecodeError, EnvContractError
from headrace.workers.agents.env import ALL, AgentDict

Columns = Mapping[str, NDArray[Any]]

_SEEN_FLAGS = ("observed", "rewarded", "rewards", "ends")
_ACTED_FLAGS = ("acting",)
_Key = TypeVar("_Key")


class Packing:
    """The agents of an env, and each agent's part of a row. `spaces` are the row's.

    Raises `EnvContractError` for an agent id that cannot be sent to another process.
    """

    def __init__(self, by_agent: Mapping[Any, Spaces]) -> None:
        self.by_agent = dict(by_agent)
        self.agents = {agent: index for index, agent in enumerate(self.by_agent)}
        self._keys = {agent: _key(index, agent) for agent, index in self.agents.items()}
        self._ids = list(self.agents)
        self._by_index = {str(index): agent for agent, index in self.agents.items()}
        count = len(self.agents)
        order = Box(shape=(count,), dtype="<i4", low=0.0, high=float(count))
        self._count = count
        seen = {
            "observed": order,
            "rewarded": order,
            "rewards": Box(shape=(count,), dtype="<f8"),
            "ends": Box(shape=(count + 1,), dtype="|i1", low=0.0, high=2.0),
        }
        self.spaces = Spaces(
            observation=Dict(spaces={**{self._keys[a]: own.observation for a, own in self.by_agent.items()}, **seen}),
            action=Dict(spaces={**{self._keys[a]: own.action for a, own in self.by_agent.items()}, "acting": order}),
        )

    @classmethod
    def of(cls, packed: Spaces) -> Packing:
        """Return the packing that has these spaces. Raises `DecodeError` if none has."""
        problem = "spaces of no multi-agent env"
        if not is_packed(packed):
            raise DecodeError("bad_space", problem)
        seen, done = _parts(packed.observation), _parts(packed.action)
        keys = [key for key in seen if key not in _SEEN_FLAGS]
        try:
            ids = {orjson.loads(key.partition(" ")[2]): key for key in keys}
            packing = cls({a: Spaces(observation=seen[key], action=done[key]) for a, key in ids.items()})
        except (ValueError, TypeError, KeyError) as error:
            raise DecodeError("bad_space", f"{problem}: {error!r:.200}") from error
        if packing.spaces != packed or keys != list(packing._keys.values()) or len(set(map(str, ids))) < len(keys):
            raise DecodeError("bad_space", f"{problem}: {keys!r:.200}")
        return packing

    # -- on the env's side --------------------------------------------------------------------------------------------

    def pack_seen(
        self, observations: AgentDict, rewards: Mapping[Any, float], ends: Mapping[Any, ChunkEnd]
    ) -> dict[str, Any]:
        """Return a row's observation, without unobserved agents. `ends` are those of done agents, and of ALL."""
        row: dict[str, Any] = {self._keys[agent]: value for agent, value in observations.items()}
        row["observed"], row["rewarded"] = self._order(observations), self._order(rewards)
        row["rewards"], row["ends"] = np.zeros(self._count), np.zeros(self._count + 1, np.int8)
        for agent, reward in rewards.items():
            row["rewards"][self.agents[agent]] = reward
        for agent, end in ends.items():
            row["ends"][self.agents.get(agent, self._count)] = end
        return row

    def pack_infos(self, infos: AgentDict) -> dict[str, Any]:
        """Return the infos by agent index, without those of unknown agents."""
        return {str(self.agents[agent]): info for agent, info in infos.items() if agent in self.agents}

    def unpack_actions(self, row: Mapping[str, Any]) -> AgentDict:
        """Return the actions of the agents that act, by id, in the order of their observations."""
        return {agent: row[self._keys[agent]] for agent in self._in_order(row["acting"])}

    # -- on the driver's side -----------------------------------------------------------------------------------------

    def unpack_observations(self, columns: Columns, row: int) -> AgentDict:
        """Return the observations of the observed agents, as views."""
        return {
            agent: _read(self.by_agent[agent].observation, columns, f"obs/{self._keys[agent]}", row)
            for agent in self._in_order(columns["obs/observed"][row])
        }

    def unpack_step(self, columns: Columns, row: int, infos: Mapping[str, Any]) -> tuple[AgentDict, ...]:
        """Return (observations, rewards, terminateds, truncateds, infos), as the env gave them."""
        values = columns["obs/rewards"][row].tolist()
        rewards = {agent: values[self.agents[agent]] for agent in self._in_order(columns["obs/rewarded"][row])}
        *ends, all_end = columns["obs/ends"][row].tolist()
        terminateds = {agent: True for agent, end in zip(self._ids, ends, strict=True) if end == ChunkEnd.TERMINATED}
        truncateds = {agent: True for agent, end in zip(self._ids, ends, strict=True) if end == ChunkEnd.TRUNCATED}
        terminateds[ALL], truncateds[ALL] = all_end == ChunkEnd.TERMINATED, all_end == ChunkEnd.TRUNCATED
        return self.unpack_observations(columns, row), rewards, terminateds, truncateds, self.unpack_infos(infos)

    def unpack_infos(self, infos: Mapping[str, Any]) -> AgentDict:
        """Return the infos by agent id. Leave out anything else that a host may have sent."""
        known = self._by_index
        return {known[key]: info for key, info in infos.items() if key in known and isinstance(info, dict)}

    def pack_actions(self, columns: Columns, row: int, actions: AgentDict) -> None:
        """Write the actions of the agents that act."""
        columns["actions/acting"][row] = self._order(actions)
        for agent, action in actions.items():
            _write(self.by_agent[agent].action, columns, f"actions/{self._keys[agent]}", row, action)

    # -- both ---------------------------------------------------------------------------------------------------------

    def _order(self, agents: Iterable[Any]) -> NDArray[np.int32]:
        order = np.zeros(self._count, np.int32)
        for place, agent in enumerate(agents, 1):
            order[self.agents[agent]] = place
        return order

    def _in_order(self, order: NDArray[np.int32]) -> list[Any]:
        present = np.flatnonzero(order)
        return [self._ids[index] for index in present[order[present].argsort(kind="stable")].tolist()]


def is_packed(spaces: Spaces) -> bool:
    """Return whether these are the spaces of a packed multi-agent env."""
    seen, done = _parts(spaces.observation), _parts(spaces.action)
    return all(flag in seen for flag in _SEEN_FLAGS) and all(flag in done for flag in _ACTED_FLAGS)


def problem_of_kind(spaces: Spaces, several_agents: bool) -> str:
    """Return why envs with `spaces` are of the wrong kind for a worker (`several_agents` or not); empty if they fit.

    Raises `DecodeError` for spaces of several agents that no multi-agent env can have.
    """
    if is_packed(spaces) != several_agents:
        theirs, ours = ("one agent", "several") if several_agents else ("several agents", "one")
        return f"its envs are of {theirs}, and those of this worker of {ours}, as sampling.policies says"
    if several_agents:
        Packing.of(spaces)
    return ""


def _parts(space: Space) -> dict[str, Space]:
    return space.spaces if isinstance(space, Dict) else {}


def _key(index: int, agent: Any) -> str:
    try:
        if isinstance(agent, str | int) and not isinstance(agent, bool):
            return f"{index} {orjson.dumps(agent).decode()}"
    except TypeError:  # of more than 64 bits, or no UTF-8
        pass
    expected = "text or a whole number of 64 bits, so that another process can be told (or env_placement = 'inline')"
    raise EnvContractError("agent id", f"{agent!r:.80} ({type(agent).__name__})", expected)


def _read(space: Space, columns: Columns, name: str, row: int) -> Any:
    if isinstance(space, Dict):
        return {key: _read(sub, columns, f"{name}/{key}", row) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(_read(sub, columns, f"{name}/{index}", row) for index, sub in enumerate(space.spaces))
    return columns[name][row]


def _write(space: Space, columns: Columns, name: str, row: int, value: Any) -> None:
    if isinstance(space, Dict):
        for key, sub in space.spaces.items():
            _write(sub, columns, f"{name}/{key}", row, value[key])
    elif isinstance(space, Tuple):
        for index, sub in enumerate(space.spaces):
            _write(sub, columns, f"{name}/{index}", row, value[index])
    else:
        columns[name][row] = value
