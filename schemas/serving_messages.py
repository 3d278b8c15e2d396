"""What a policy server and its clients say to one another over ZeroMQ, and, as JSON, over HTTP.

                   client                        policy server
    HELLO           ─────────────────────────────▶      a session begins, or goes on after a reconnect
    WELCOME         ◀─────────────────────────────      spaces, limits, episodes that are open
    EPISODE_START   ─────────────────────────────▶
    EPISODE_STEP    ─────────────────────────────▶      what is seen, and the reward since the step before
    EPISODE_ABORT   ─────────────────────────────▶
    EPISODE_ANSWER  ◀─────────────────────────────      to each of the three
    WEIGHTS_PULL    ─────────────────────────────▶      from here on of a client that acts by itself
    WEIGHTS_PART    ◀─────────────────────────────
    EPISODE_CHUNKS  ─────────────────────────────▶      what it has cut
    HEARTBEAT, BYE  ─────────────────────────────▶
    ACK             ◀─────────────────────────────      to these three
    REJECT          ◀─────────────────────────────      in place of any answer

Steps of an episode are numbered from 0, and a client sends one when the one before is answered. So any message may be
lost or come twice: who has no answer sends the same again, gets the same answer, and has taken one step. `request` is
the client's own number, told again in the answer. Clients of a fleet need neither an address nor a connection of their
own for a session: it is told by its name, and by a token that only this client knows.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from headrace.schemas.ledger import Natural
from headrace.schemas.messages import Message, Positive, Version
from headrace.schemas.wire import MessageKind

Name = Annotated[str, Field(min_length=1, max_length=64)]
EpisodeId = Annotated[str, Field(min_length=1, max_length=128)]
Reason = Annotated[str, Field(max_length=200)]
End = Literal["no", "terminated", "truncated"]

MOST_EPISODES = 16
"""Of each kind in one shipment; more go into the next."""


class ClientRequest(Message):
    """What every request of a client bears."""

    request: Natural = 0
    session: Name
    token: Name
    """Random, one a client: two that chose the same name for their session are told apart by it."""


class ClientHello(ClientRequest):
    """Open the session, or go on with it."""

    KIND = MessageKind.HELLO
    role: Literal["client"] = "client"


class EpisodeStart(ClientRequest):
    """Begin an episode."""

    KIND = MessageKind.EPISODE_START
    episode: EpisodeId
    training_enabled: bool = True
    """False: the episode is counted, and no learner gets it."""


class AnyStep(ClientRequest):
    """Header of one step; arrays "obs..." are what is seen, "actions..." what was done where the client chose it.

    Of one agent it is an `EpisodeStep`, of several an `AgentsStep` (`serving_agents.py`).
    """

    episode: EpisodeId
    step: Natural
    off_policy: bool = False
    """The client has acted by itself, and says how."""
    end: End = "no"
    """Otherwise what is seen is the episode's last."""

    @property
    def news(self) -> tuple[Any, ...]:
        """What came of the step before, as `log_returns` takes it; nothing where nothing is said of it."""
        raise NotImplementedError


class EpisodeStep(AnyStep):
    """A step of one agent."""

    KIND = MessageKind.EPISODE_STEP
    reward: float = 0.0
    """Of all that happened since the step before."""
    info: dict[str, Any] | None = None
    """Likewise."""

    @property
    def news(self) -> tuple[Any, ...]:
        """See `AnyStep`: the reward and the info."""
        return (self.reward, self.info) if self.reward or self.info else ()


class EpisodeAbort(ClientRequest):
    """The episode will never finish."""

    KIND = MessageKind.EPISODE_ABORT
    episode: EpisodeId
    reason: Reason = ""


class ClientPull(ClientRequest):
    """A piece of the newest weights is asked for. When `version` is still the newest it begins at `offset`, all bytes
    that the client has of it; else at the beginning of the newest."""

    KIND = MessageKind.WEIGHTS_PULL
    version: Version = (0, 0)
    offset: Natural = 0


class ChunkShipment(ClientRequest):
    """Chunks that the client has cut, as the array "batch", uint8: a BATCH message's frames one after another.

    Shipments of a session are numbered from 1, and the next goes out when the last is answered.
    """

    KIND = MessageKind.EPISODE_CHUNKS
    number: Positive
    frame_sizes: list[Natural] = Field(default=[], max_length=64)
    """Where to cut the array; none where there are no chunks and no array, only counts."""
    discarded: dict[str, Natural] = Field(default={}, max_length=64)
    """Steps that will never be in a chunk, by reason, since the shipment before."""
    untrained: list[Annotated[tuple[float, Natural], Strict(False)]] = Field(default=[], max_length=MOST_EPISODES)
    """(return, length) of episodes that have ended since, which the client did not want to be trained on."""
    episodes: list[Annotated[tuple[float, Natural], Strict(False)]] = Field(default=[], max_length=MOST_EPISODES)
    """Likewise of those of several agents that are trained on; of one agent, the chunks tell."""
    env_steps: Annotated[tuple[Natural, Natural, Natural], Strict(False)] = (0, 0, 0)
    """Of several agents: env steps since then, and how many of them are in chunks, and discarded."""


class ClientHeartbeat(ClientRequest):
    """Alive; any other request says so too."""

    KIND = MessageKind.HEARTBEAT


class ClientBye(ClientRequest):
    """The session ends, and open episodes are aborted."""

    KIND = MessageKind.BYE


class ClientWelcome(Message):
    """The session is open."""

    KIND = MessageKind.WELCOME
    request: Natural = 0
    spaces: dict[str, Any]
    """As `schemas/spaces.py` writes them, of several agents as `serving_agents.py` does."""
    lease_s: float = Field(gt=0)
    """Silence after which the session ends."""
    max_message_bytes: Positive
    """What is larger is not to be sent: over ZeroMQ it would cost the connection."""
    episodes: dict[str, Natural] = Field(default={})
    """Those that are open: which step is next."""


class EpisodeAnswer(Message):
    """Header of an answer; arrays "actions..." are what to do, unless the client chose it or the episode is over."""

    KIND = MessageKind.EPISODE_ANSWER
    request: Natural = 0
    episode: EpisodeId
    next_step: Natural
    weights: Version = (0, 0)
    """(learner_epoch, seq) by which the action was chosen."""


class ClientPart(Message):
    """Header of a piece of weights, the array "part", uint8; empty where the client has all. The bytes of a version are
    those of a WEIGHTS message's frames one after another, `frame_sizes` where to cut them."""

    KIND = MessageKind.WEIGHTS_PART
    request: Natural = 0
    version: Version
    """(0, 0): there are no weights yet."""
    offset: Natural
    frame_sizes: list[Natural] = []


class ClientAck(Message):
    """Heard."""

    KIND = MessageKind.ACK
    request: Natural = 0


class ClientReject(Message):
    """The request is refused, and nothing came of it."""

    KIND = MessageKind.REJECT
    request: Natural = 0
    error: str
    """Its code, as in `serving_errors.py` and `episode_errors.py`."""
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
