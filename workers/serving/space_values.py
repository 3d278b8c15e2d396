"""How a server's spaces are told, and its observations, actions and steps read and written: of one agent or several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.schemas.serving_agents import AgentsStep, agent_spaces_to_json
from headrace.schemas.serving_messages import EpisodeStep
from headrace.schemas.spaces import Spaces
from headrace.workers.serving.agent_values import AgentValues
from headrace.workers.serving.values import Values


@dataclass(frozen=True, slots=True)
class SpaceValues:
    """Those of one kind of episode."""

    told: dict[str, Any]
    observation: Values | AgentValues
    action: Values | AgentValues
    step: type[EpisodeStep] | type[AgentsStep] = EpisodeStep

    @classmethod
    def of(cls, spaces: Spaces | Mapping[Any, Spaces], *, check_bounds: bool = True) -> SpaceValues:
        """Those of one agent's `spaces`, or of several agents by id.

        Actions are always checked: a policy never gives one that is outside. Raises as `AgentValues` does.
        """
        if isinstance(spaces, Spaces):
            observation = Values(spaces.observation, "obs", check_bounds=check_bounds)
            return cls(spaces.model_dump(mode="json"), observation, Values(spaces.action, "actions"))
        seen = AgentValues({agent: own.observation for agent, own in spaces.items()}, "obs", check_bounds=check_bounds)
        done = AgentValues({agent: own.action for agent, own in spaces.items()}, "actions")
        return cls(agent_spaces_to_json(spaces), seen, done, AgentsStep)
