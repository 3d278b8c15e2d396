"""The codec of an episode: how a server describes its spaces and reads and writes observations, actions and steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.schemas.chunks.spaces import Spaces
from headrace.workers.serving.multi_agent_codec import MultiAgentCodec
from headrace.workers.serving.serving_agents import AgentsStep, agent_spaces_to_json
from headrace.workers.serving.serving_messages import EpisodeStep
from headrace.workers.serving.space_codec import SpaceCodec


@dataclass(frozen=True, slots=True)
class EpisodeCodec:
    """The codecs for episodes of one agent, or of several."""

    spaces_json: dict[str, Any]
    observation: SpaceCodec | MultiAgentCodec
    action: SpaceCodec | MultiAgentCodec
    step_message: type[EpisodeStep] | type[AgentsStep] = EpisodeStep

    @classmethod
    def of(cls, spaces: Spaces | Mapping[Any, Spaces], *, check_bounds: bool = True) -> EpisodeCodec:
        """Return the codec for one agent's `spaces`, or for those of several agents by id.

        Actions are always checked: a policy never gives one that is outside. Raises as `MultiAgentCodec` does.
        """
        if isinstance(spaces, Spaces):
            observation = SpaceCodec(spaces.observation, "obs", check_bounds=check_bounds)
            return cls(spaces.model_dump(mode="json"), observation, SpaceCodec(spaces.action, "actions"))
        seen = MultiAgentCodec(
            {agent: own.observation for agent, own in spaces.items()}, "obs", check_bounds=check_bounds
        )
        done = MultiAgentCodec({agent: own.action for agent, own in spaces.items()}, "actions")
        return cls(agent_spaces_to_json(spaces), seen, done, AgentsStep)
