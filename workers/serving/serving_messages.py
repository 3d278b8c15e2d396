"""Messages between a policy server and its clients, over ZeroMQ and, as JSON, over HTTP.

                   client                        policy server
    HELLO           ─────────────────────────────▶      a session begins, or goes on after a reconnect
    WELCOME         ◀─────────────────────────────      spaces, limits, episodes that are open
    EPISODE_START   ─────────────────────────────▶
    EPISODE_STEP    ─────────────────────────────▶      the observation, and the reward since the step before
    EPISODE_ABORT   ─────────────────────────────▶
    EPISODE_ANSWER  ◀─────────────────────────────      to each of the three
    WEIGHTS_PULL    ─────────────────────────────▶      from here on: of a client that acts by itself
    WEIGHTS_PART    ◀─────────────────────────────
    EPISODE_CHUNKS  ─────────────────────────────▶      chunks that it has cut
    HEARTBEAT, BYE  ─────────────────────────────▶
    ACK             ◀─────────────────────────────      to these three
    REJECT          ◀─────────────────────────────      in place of any answer

Steps of an episode are numbered from 0. A client sends a step when the step before is answered. Requests are
idempotent, so any message may be lost or come twice: a client without an answer sends the same request again and gets
the same answer. The episode then takes one step only. `request` is the client's own number, repeated in the answer.

A session needs neither an address nor a connection of its own. It is known by its name, and by a token that only its
client knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, model_validator

from headrace.schemas.basics.bounds import MOST_SILENCE_S, ListOf, Natural, Positive, Version
from headrace.schemas.chunks.spaces import Spaces, spaces_from_json
from headrace.schemas.errors import DecodeError
from headrace.schemas.errors.serving import ServingError
from headrace.schemas.frames.wire import MessageKind
from headrace.schemas.messages import Message

Name = Annotated[str, Field(min_length=1, max_length=64)]
EpisodeId = Annotated[str, Field(min_length=1, max_length=128)]
Reason = Annotated[str, Field(max_length=200)]
End = Literal["no", "terminated", "truncated"]
ALL = "__all__"
"""Stands among the agents that are done, for the episode as a whole."""

MOST_WAITING_FOR = 500
"""Characters of `ClientAck.waiting_for`."""

MOST_EPISODES = 16
"""The most episodes of each kind in one shipment; more go into the next."""


class ClientRequest(Message):
    """The fields of every request of a client."""

    request: Natural = 0
    session: Name
    token: Name
    """Random, one for each client: it tells apart two clients that chose the same name for their session."""


class ClientHello(ClientRequest):
    """Opens the session, or goes on with it."""

    KIND = MessageKind.HELLO
    role: Literal["client"] = "client"


class EpisodeStart(ClientRequest):
    """Begins an episode."""

    KIND = MessageKind.EPISODE_START
    episode: EpisodeId
    training_enabled: bool = True
    """False: the episode is counted, and no learner gets it."""


class AnyStep(ClientRequest):
    """Header of one step. Arrays: "obs..." is the observation, "actions..." the action where the client chose it.

    A step of one agent is an `EpisodeStep`, of several an `AgentsStep`.
    """

    episode: EpisodeId
    step: Natural
    off_policy: bool = False
    """The client has acted by itself, and sends its action."""
    end: End = "no"
    """Any value but "no": this observation is the episode's last."""

    @property
    def news(self) -> tuple[Any, ...]:
        """Return the results of the step before, as `log_returns` takes them; empty where the client sent none."""
        raise NotImplementedError


class EpisodeStep(AnyStep):
    """A step of one agent."""

    KIND = MessageKind.EPISODE_STEP
    reward: float = 0.0
    """Sum of rewards since the step before."""
    info: dict[str, Any] | None = None
    """Info since the step before."""

    @property
    def news(self) -> tuple[Any, ...]:
        """Return the reward and the info."""
        return (self.reward, self.info) if self.reward or self.info else ()


class EpisodeAbort(ClientRequest):
    """Says that the episode will never finish."""

    KIND = MessageKind.EPISODE_ABORT
    episode: EpisodeId
    reason: Reason = ""


class ClientPull(ClientRequest):
    """Asks for a piece of the newest weights.

    When `version` is still the newest, the piece begins at `offset`, after all bytes that the client has of it.
    Otherwise it is the first piece of the newest version.
    """

    KIND = MessageKind.WEIGHTS_PULL
    version: Version = (0, 0)
    offset: Natural = 0


class ChunkShipment(ClientRequest):
    """Chunks that the client has cut, as the array "batch", uint8: a BATCH message's frames one after another.

    Shipments of a session are numbered from 1. The next one goes out when the last is answered.
    """

    KIND = MessageKind.EPISODE_CHUNKS
    LEFT_OUT = frozenset(("outside",))
    number: Positive
    frame_sizes: ListOf[Natural] = Field(default=[], max_length=64)
    """Sizes at which to cut the array. Empty if there are only counts: no chunks and no array."""
    discarded: dict[str, Natural] = Field(default={}, max_length=64)
    """Steps since the shipment before that will never be in a chunk, by reason."""
    untrained: ListOf[Annotated[tuple[float, Natural], Strict(False)]] = Field(default=[], max_length=MOST_EPISODES)
    """(return, length) of episodes ended since then that the client did not want to be trained on."""
    episodes: ListOf[Annotated[tuple[float, Natural], Strict(False)]] = Field(default=[], max_length=MOST_EPISODES)
    """(return, length) of episodes of several agents ended since then that are trained on. Of one agent, the chunks
    tell.
    """
    env_steps: Annotated[tuple[Natural, Natural, Natural], Strict(False)] = (0, 0, 0)
    """With several agents: env steps since then, how many of them are in chunks, and how many were discarded."""
    outside: Natural = 0
    """Observations since then with values outside their Box."""


class ClientHeartbeat(ClientRequest):
    """Says that the client is alive; any other request says so too."""

    KIND = MessageKind.HEARTBEAT


class ClientBye(ClientRequest):
    """Ends the session; the server aborts its open episodes."""

    KIND = MessageKind.BYE


class ClientWelcome(Message):
    """Says that the session is open."""

    KIND = MessageKind.WELCOME
    request: Natural = 0
    spaces: dict[str, Any]
    """As `schemas/chunks/spaces.py` writes them; of several agents, as `agent_spaces_to_json` does."""
    lease_s: float = Field(gt=0, le=MOST_SILENCE_S)
    """Seconds of silence after which the session ends."""
    max_message_bytes: Positive
    """A client must not send more: over ZeroMQ it would cost the connection."""
    episodes: dict[str, Natural] = Field(default={})
    """Open episodes: id -> next step."""


class EpisodeAnswer(Message):
    """Header of an answer. Arrays "actions..." are the actions, unless the client chose them or the episode is over."""

    KIND = MessageKind.EPISODE_ANSWER
    LEFT_OUT = frozenset(("task",))
    request: Natural = 0
    episode: EpisodeId
    next_step: Natural
    weights: Version = (0, 0)
    """(learner_epoch, seq) of the weights that chose the action."""
    task: dict[str, Any] | None = None
    """In the answer to a start: the task with which the episode is to begin."""


class ClientPart(Message):
    """Header of a piece of weights, the array "part", uint8; empty where the client has all.

    The bytes of a version are the frames of a WEIGHTS message one after another; `frame_sizes` says where to cut them.
    """

    KIND = MessageKind.WEIGHTS_PART
    request: Natural = 0
    version: Version
    """(0, 0): there are no weights yet."""
    offset: Natural
    frame_sizes: ListOf[Natural] = []


class ClientAck(Message):
    """Confirms a request that needs no other answer."""

    KIND = MessageKind.ACK
    request: Natural = 0
    waiting_for: str = Field(default="", max_length=MOST_WAITING_FOR)
    """In the answer to a heartbeat: what the worker waits for while it takes no steps; else left out."""


class ClientReject(Message):
    """Refuses a request, which had no effect."""

    KIND = MessageKind.REJECT
    request: Natural = 0
    error: str
    """The error's code, as in `errors/serving.py` and `errors/episodes.py`."""
    message: str
    facts: dict[str, Any] = Field(default={})


REQUESTS: dict[MessageKind, type[ClientRequest]] = {
    cls.KIND: cls
    for cls in (
        ClientHello,
        EpisodeStart,
        EpisodeStep,
        EpisodeAbort,
        ClientPull,
        ChunkShipment,
        ClientHeartbeat,
        ClientBye,
    )
}
ANSWERS: dict[MessageKind, type[Message]] = {
    cls.KIND: cls for cls in (ClientWelcome, EpisodeAnswer, ClientPart, ClientAck, ClientReject)
}


class AgentsStep(AnyStep):
    """An EPISODE_STEP of several agents: all parts of a step are by agent, as are its arrays, "obs/AGENT...".

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


def another_request_error(episode: str, step: int) -> ServingError:
    """Return the error for a step that is repeated with another call or other values."""
    return ServingError(
        f"step {step} of episode {episode!r} was sent as another request; repeat that one, or abort the episode",
        "step_order",
    )


def bytes_of(row: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a row, or rows by agent, as bytes by name, which compare also where there is NaN."""
    return {name: bytes_of(own) if isinstance(own, Mapping) else own.tobytes() for name, own in row.items()}


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
    """Return the spaces as a WELCOME carries them.

    {"agents": {agent: {"observation": space, "action": space}}}, with each agent as the text of its id.
    """
    return {"agents": {str(agent): spaces.model_dump(mode="json") for agent, spaces in by_agent.items()}}


def served_spaces_from_json(told: Any) -> Spaces | dict[str, Spaces]:
    """Parse the spaces of a server's episodes: one agent's, or those of several by agent. Raises `DecodeError`."""
    if not isinstance(told, dict) or "agents" not in told:
        return spaces_from_json(told)
    by_agent = told["agents"]
    if not isinstance(by_agent, dict) or not by_agent:
        raise DecodeError("bad_space", "spaces of agents are no object by agent")
    return {agent: spaces_from_json(pair) for agent, pair in by_agent.items()}
