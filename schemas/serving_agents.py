"""What is different on the wire where a policy server's episodes are those of several agents.

Spaces are told as {"agents": {agent: {"observation": space, "action": space}}}, an agent by the text of its id. Arrays
are named "obs/AGENT..." and "actions/AGENT...". All else of a step is told by agent too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from headrace.schemas.errors import DecodeError
from headrace.schemas.serving_messages import AnyStep
from headrace.schemas.spaces import Spaces, spaces_from_json
from headrace.schemas.wire import MessageKind

ALL = "__all__"
"""Among those who are done: the episode as a whole."""


class AgentsStep(AnyStep):
    """An EPISODE_STEP of several agents. Who is seen acts, unless `terminated` or `truncated` says that it is done."""

    KIND = MessageKind.EPISODE_STEP
    reward: dict[str, float] = Field(default={})
    """Of all that happened to an agent since the step before, whether it is seen or not."""
    info: dict[str, dict[str, Any]] = Field(default={})
    """Likewise."""
    terminated: dict[str, bool] = Field(default={})
    """True: the agent is done, and is seen now for the last time, if at all. "__all__": true is end = "terminated"."""
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
        """See `AnyStep`: rewards, infos, and who is terminated or truncated, by agent."""
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
    """As a WELCOME tells them."""
    return {"agents": {str(agent): spaces.model_dump(mode="json") for agent, spaces in by_agent.items()}}


def served_spaces_from_json(told: Any) -> Spaces | dict[str, Spaces]:
    """The spaces of a server's episodes: one agent's, or those of several by agent. Raises `DecodeError`."""
    if not isinstance(told, dict) or "agents" not in told:
        return spaces_from_json(told)
    by_agent = told["agents"]
    if not isinstance(by_agent, dict) or not by_agent:
        raise DecodeError("bad_space", "spaces of agents are no object by agent")
    return {agent: spaces_from_json(pair) for agent, pair in by_agent.items()}
