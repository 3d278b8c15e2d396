"""The codec of an episode: how a server describes its spaces and reads and writes observations, actions and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Space, Spaces, leaves
from headrace.schemas.errors import EnvContractError
from headrace.workers.envs.observations import NoteOutside
from headrace.workers.serving.row_layout import RowLayout
from headrace.workers.serving.serving_messages import AgentsStep, EpisodeStep, agent_spaces_to_json
from headrace.workers.serving.space_codec import SpaceCodec, row_or_error


@dataclass(frozen=True, slots=True)
class EpisodeCodec:
    """The codecs for episodes of one agent, or of several."""

    spaces_json: dict[str, Any]
    observation: SpaceCodec | MultiAgentCodec
    action: SpaceCodec | MultiAgentCodec
    step_message: type[EpisodeStep] | type[AgentsStep] = EpisodeStep

    @classmethod
    def of(
        cls,
        spaces: Spaces | Mapping[Any, Spaces],
        *,
        check_bounds: bool = True,
        note_outside: NoteOutside | None = None,
    ) -> EpisodeCodec:
        """Return the codec for one agent's `spaces`, or for those of several agents by id.

        Actions are always checked: a policy never gives one that is outside. Raises as `MultiAgentCodec` does.
        """
        if isinstance(spaces, Spaces):
            observation = SpaceCodec(spaces.observation, "obs", check_bounds=check_bounds, note_outside=note_outside)
            return cls(spaces.model_dump(mode="json"), observation, SpaceCodec(spaces.action, "actions"))
        observations = {agent: own.observation for agent, own in spaces.items()}
        seen = MultiAgentCodec(observations, "obs", check_bounds=check_bounds, note_outside=note_outside)
        done = MultiAgentCodec({agent: own.action for agent, own in spaces.items()}, "actions")
        return cls(agent_spaces_to_json(spaces), seen, done, AgentsStep)


class MultiAgentCodec:
    """Reads and writes dicts by agent. Any agent may be missing. `root` is "obs" or "actions".

    Messages name an agent by the text of its id, values by the id itself. An agent's arrays are named "ROOT/AGENT...".
    Client and server both use this codec. All methods raise `EnvContractError`, which names the agent. The
    constructor raises it for agents with the same array name, and for an agent without any array.
    """

    layout: RowLayout | None = None
    """None: the agents differ from message to message."""

    def __init__(
        self,
        spaces: Mapping[Any, Space],
        root: str,
        *,
        check_bounds: bool = True,
        note_outside: NoteOutside | None = None,
    ) -> None:
        self._root, self._prefix = root, f"{root}/"
        self._ids = {str(agent): agent for agent in spaces}
        self._codecs = {
            agent: SpaceCodec(space, root, check_bounds=check_bounds, note_outside=note_outside)
            for agent, space in spaces.items()
        }
        self._owners: dict[str, tuple[Any, str]] = {}
        """By array name: the agent, and the name of the array in the agent's own codec."""
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
        """Convert lists, numbers and arrays by agent, as `SpaceCodec.read` does. Keys are ids or their texts."""
        return self._each(SpaceCodec.read, self._by_agent(value))

    def read_row(self, value: Any) -> dict[Any, dict[str, NDArray[Any]]]:
        """Convert lists, numbers and arrays by agent to rows by agent."""
        return self._each(SpaceCodec.read_row, self._by_agent(value))

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> dict[Any, Any]:
        """Convert the arrays of a message to values by agent, in the order of the arrays."""
        return self._each(SpaceCodec.from_arrays, self._split(arrays))

    def read_rows(self, values: Sequence[Any]) -> list[dict[Any, dict[str, NDArray[Any]]] | EnvContractError]:
        """Return what `read_row` returns or raises for each value."""
        return [row_or_error(self.read_row, value) for value in values]

    def row_from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> dict[Any, dict[str, NDArray[Any]]]:
        """Return the rows by agent of a message's arrays, in the order of the arrays."""
        return self._each(SpaceCodec.row_from_arrays, self._split(arrays))

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
        return {self._agent(str(key)): own for key, own in value.items()}

    def _agent(self, text: str) -> Any:
        if text not in self._ids:
            raise EnvContractError("agent", f"{text!r:.80} in {self._root}", f"one of {list(self._ids)!r:.200}")
        return self._ids[text]

    def _split(self, arrays: Mapping[str, NDArray[Any]]) -> dict[Any, dict[str, NDArray[Any]]]:
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
        """Convert values by agent to the arrays of a message."""
        return {
            self._name(agent, own): array
            for agent, part in value.items()
            for own, array in self._codecs[agent].to_arrays(part).items()
        }

    def to_json(self, value: Mapping[Any, Any]) -> dict[str, Any]:
        """Convert values by agent to lists and numbers."""
        return {str(agent): self._codecs[agent].to_json(part) for agent, part in value.items()}
