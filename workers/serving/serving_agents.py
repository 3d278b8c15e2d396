"""The wire format of a policy server whose episodes have several agents, where it differs from that of one agent.

Spaces are {"agents": {agent: {"observation": space, "action": space}}}, with each agent as the text of its id. Arrays
are named "obs/AGENT..." and "actions/AGENT...". All other parts of a step are by agent too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from headrace.schemas.chunks.spaces import Spaces, spaces_from_json
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import MessageKind
from headrace.workers.serving.serving_messages import AnyStep

ALL = "__all__"
"""Stands among the agents that are done, for the episode as a whole."""


class AgentsStep(AnyStep):
    """An EPISODE_STEP of several agents.

    Each agent with an observation acts, unless `terminated` or `truncated` names it.
    """

    KIND = MessageKind.EPISODE_STEP
    reward: dict[str, float] = Field(default={})
    """Sum of rewards of each agent since the step before, with or without an observation."""
    info: dict[str, dict[str, Any]] = Field(default={})
    """Info of each agent since the step before, with or without an observation."""
    terminated: dict[str, bool] = Field(default={})
    """True: the agent is done, and this is its last observation, if any. "__all__": true means end = "terminated"."""
    truncated: dict[str, bool] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _end_of_all(cls, told: Any) -> Any:
        end = _said_of_all(told) if isinstance(told, dict) else None
        if end is None:
            return told
        if told.get("end", "no") not in ("no", end):
            raise ValueError(f"end is {told['end']!r:.40}, and {end} says {ALL!r}; say one of them")
        return {**told, "end": end}

    @property
    def news(self) -> tuple[Any, ...]:
        """Return rewards, infos, and who is terminated or truncated, by agent."""
        news = self.reward, self.info, _of_agents(self.terminated), _of_agents(self.truncated)
        return news if any(news) else ()


def _said_of_all(told: dict[str, Any]) -> Literal["terminated", "truncated"] | None:
    ends: tuple[Literal["terminated", "truncated"], ...] = ("terminated", "truncated")
    for end in ends:
        dones = told.get(end)
        if isinstance(dones, dict) and dones.get(ALL) is True:
            return end
    return None


def _of_agents(dones: Mapping[str, bool]) -> dict[str, bool]:
    return {agent: done for agent, done in dones.items() if agent != ALL}


def agent_spaces_to_json(by_agent: Mapping[Any, Spaces]) -> dict[str, Any]:
    """Return the spaces as a WELCOME carries them."""
    return {"agents": {str(agent): spaces.model_dump(mode="json") for agent, spaces in by_agent.items()}}


def served_spaces_from_json(told: Any) -> Spaces | dict[str, Spaces]:
    """Parse the spaces of a server's episodes: one agent's, or those of several by agent. Raises `DecodeError`."""
    if not isinstance(told, dict) or "agents" not in told:
        return spaces_from_json(told)
    by_agent = told["agents"]
    if not isinstance(by_agent, dict) or not by_agent:
        raise DecodeError("bad_space", "spaces of agents are no object by agent")
    return {agent: spaces_from_json(pair) for agent, pair in by_agent.items()}
