"""Observations and actions of several agents: what `values.py` is for one, in dicts by agent id.

On the way an agent is the text of its id; here it is the id itself. Client and server both use it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from headrace.schemas.errors import EnvContractError
from headrace.schemas.spaces import Space, leaves
from headrace.workers.serving.values import Values


class AgentValues:
    """Those of agents with these `spaces`, any of whom may be missing. `root` is "obs" or "actions".

    An agent's arrays are named "ROOT/AGENT...". All raise `EnvContractError`, which names the agent at fault; the
    constructor too, for agents of whom an array could not tell whose it is, or who would have none.
    """

    def __init__(self, spaces: Mapping[Any, Space], root: str, *, check_bounds: bool = True) -> None:
        self._root = root
        self._ids = {str(agent): agent for agent in spaces}
        self._values = {agent: Values(space, root, check_bounds=check_bounds) for agent, space in spaces.items()}
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
        """From lists, numbers and arrays by agent, as `Values.read`; who is told by id or its text."""
        if not isinstance(value, Mapping):
            raise EnvContractError(self._root, f"{value!r:.100}", "an object by agent")
        found = {}
        for told, own in value.items():
            agent = self._agent(str(told))
            with _naming(agent):
                found[agent] = self._values[agent].read(own)
        return found

    def _agent(self, told: str) -> Any:
        if told not in self._ids:
            raise EnvContractError("agent", f"{told!r:.80} in {self._root}", f"one of {list(self._ids)!r:.200}")
        return self._ids[told]

    def of_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> dict[Any, Any]:
        """From the arrays of a message, in whose order agents come; as `Values.of_arrays`."""
        by_agent: dict[Any, dict[str, NDArray[Any]]] = defaultdict(dict)
        for name, array in arrays.items():
            if name.split("/", 1)[0] == self._root:
                if name not in self._owners:
                    wanted = f"{self._root}/AGENT..., AGENT one of {list(self._ids)!r:.200}"
                    raise EnvContractError(self._root, f"{name!r:.80}", wanted)
                agent, own = self._owners[name]
                by_agent[agent][own] = array
        found = {}
        for agent, own_arrays in by_agent.items():
            with _naming(agent):
                found[agent] = self._values[agent].of_arrays(own_arrays)
        return found

    row_of, row = of_arrays, read
    """As the table takes them: see `Values`."""

    def arrays(self, value: Mapping[Any, Any]) -> dict[str, NDArray[Any]]:
        """The arrays of a message."""
        return {
            self._name(agent, own): array
            for agent, part in value.items()
            for own, array in self._values[agent].arrays(part).items()
        }

    def json(self, value: Mapping[Any, Any]) -> dict[str, Any]:
        """Lists and numbers by agent."""
        return {str(agent): self._values[agent].json(part) for agent, part in value.items()}


@contextmanager
def _naming(agent: Any) -> Iterator[None]:
    """Whose value it was that is refused."""
    try:
        yield
    except EnvContractError as error:
        raise EnvContractError(f"{error.what} of agent {agent!r}", error.seen, error.expected) from error
