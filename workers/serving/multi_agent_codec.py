"""Observations and actions of several agents: what `values.py` is for one, in dicts by agent id.

On the way an agent is the text of its id; here it is the id itself. Client and server both use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from headrace.schemas.errors import EnvContractError
from headrace.schemas.layout import Layout
from headrace.schemas.spaces import Space, leaves
from headrace.workers.serving.space_codec import SpaceCodec, row_or_error


class MultiAgentCodec:
    """Those of agents with these `spaces`, any of whom may be missing. `root` is "obs" or "actions".

    An agent's arrays are named "ROOT/AGENT...". All raise `EnvContractError`, which names the agent at fault; the
    constructor too, for agents of whom an array could not tell whose it is, or who would have none.
    """

    layout: Layout | None = None
    """Each message says anew of whom it has arrays."""

    def __init__(self, spaces: Mapping[Any, Space], root: str, *, check_bounds: bool = True) -> None:
        self._root, self._prefix = root, f"{root}/"
        self._ids = {str(agent): agent for agent in spaces}
        self._codecs = {agent: SpaceCodec(space, root, check_bounds=check_bounds) for agent, space in spaces.items()}
        self._owners: dict[str, tuple[Any, str]] = {}
        """Of each array that there may be: whose it is, and how it is named among its owner's own."""
        for agent, space in spaces.items():
            self._learn_names(agent, [name for name, _ in leaves(space, root)])

    def _learn_names(self, agent: Any, own_names: list[str]) -> None:
        if not own_names:
            seen = f"that of {agent!r:.80}, which has nothing in it"
            raise EnvContractError(f"{self._root} space", seen, "of something that a client can send")
        for own in own_names:
            name = self._name(agent, own)
            if name in self._owners:
                both = f"{self._owners[name][0]!r:.80} and {agent!r:.80}, who both have {name!r:.80}"
                raise EnvContractError("agents", both, "of ids that no slash confuses with another's arrays")
            self._owners[name] = agent, own

    def _name(self, agent: Any, own: str) -> str:
        return f"{self._root}/{agent}{own.removeprefix(self._root)}"

    def read(self, value: Any) -> dict[Any, Any]:
        """From lists, numbers and arrays by agent, as `SpaceCodec.read`; who is told by id or its text."""
        return self._each(SpaceCodec.read, self._by_agent(value))

    def read_row(self, value: Any) -> dict[Any, dict[str, NDArray[Any]]]:
        """`read`, as `SpaceCodec.read_row` gives it."""
        return self._each(SpaceCodec.read_row, self._by_agent(value))

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> dict[Any, Any]:
        """From the arrays of a message, in whose order agents come; as `SpaceCodec.from_arrays`."""
        return self._each(SpaceCodec.from_arrays, self._sorted_out(arrays))

    def read_rows(self, values: Sequence[Any]) -> list[dict[Any, dict[str, NDArray[Any]]] | EnvContractError]:
        """Likewise, as `SpaceCodec.read_rows` gives it."""
        return [row_or_error(self.read_row, value) for value in values]

    def row_from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> dict[Any, dict[str, NDArray[Any]]]:
        """Likewise, as `SpaceCodec.row_from_arrays` gives it."""
        return self._each(SpaceCodec.row_from_arrays, self._sorted_out(arrays))

    def _each(self, read: Callable[[SpaceCodec, Any], Any], by_agent: Mapping[Any, Any]) -> dict[Any, Any]:
        found = {}
        for agent, value in by_agent.items():
            try:
                found[agent] = read(self._codecs[agent], value)
            except EnvContractError as error:
                raise EnvContractError(f"{error.what} of agent {agent!r}", error.seen, error.expected) from error
        return found

    def _by_agent(self, value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise EnvContractError(self._root, f"{value!r:.100}", "an object by agent")
        return {self._agent(str(told)): own for told, own in value.items()}

    def _agent(self, told: str) -> Any:
        if told not in self._ids:
            raise EnvContractError("agent", f"{told!r:.80} in {self._root}", f"one of {list(self._ids)!r:.200}")
        return self._ids[told]

    def _sorted_out(self, arrays: Mapping[str, NDArray[Any]]) -> dict[Any, dict[str, NDArray[Any]]]:
        by_agent: dict[Any, dict[str, NDArray[Any]]] = {}
        for name, array in arrays.items():
            if name == self._root or name.startswith(self._prefix):
                if name not in self._owners:
                    wanted = f"{self._prefix}AGENT..., AGENT one of {list(self._ids)!r:.200}"
                    raise EnvContractError(self._root, f"{name!r:.80}", wanted)
                agent, own = self._owners[name]
                by_agent.setdefault(agent, {})[own] = array
        return by_agent

    def to_arrays(self, value: Mapping[Any, Any]) -> dict[str, NDArray[Any]]:
        """The arrays of a message."""
        return {
            self._name(agent, own): array
            for agent, part in value.items()
            for own, array in self._codecs[agent].to_arrays(part).items()
        }

    def to_json(self, value: Mapping[Any, Any]) -> dict[str, Any]:
        """Lists and numbers by agent."""
        return {str(agent): self._codecs[agent].to_json(part) for agent, part in value.items()}
