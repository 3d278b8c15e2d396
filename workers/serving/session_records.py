"""Records of a policy server's sessions and episodes, and the replies to clients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from headrace.schemas.errors import HeadraceError
from headrace.schemas.errors.episodes import (
    EpisodeAbortedError,
    EpisodeError,
)
from headrace.schemas.errors.serving import code_of, facts_of
from headrace.schemas.frames.wire import MessageKind
from headrace.schemas.messages import Message
from headrace.workers.serving.serving_messages import MOST_WAITING_FOR, ClientReject


class Address(Protocol):
    """The destination of the reply to one request, whose number it adds. Equal addresses lead to the same place."""

    def send(self, reply: Reply | Exception) -> None:
        """Send a reply, or the refusal for an error, without waiting. The client may be gone."""


@dataclass(slots=True, eq=False)
class Reply:
    """The reply to one request: a message of `kind` and, for a step, the action.

    It holds the fields as they are sent, not a `Message`, because every step of every client needs one.
    """

    kind: MessageKind
    fields: Mapping[str, Any]
    action: Any = None
    """The action, in the nesting of the action space."""
    arrays: Mapping[str, NDArray[Any]] | None = None
    """Further arrays of the message."""

    @classmethod
    def of(cls, message: Message, arrays: Mapping[str, NDArray[Any]] | None = None) -> Reply:
        """Return the reply that says `message`. All fields of the message must be plain values."""
        fields = {name: value for name, value in vars(message).items() if value or name not in message.LEFT_OUT}
        return cls(message.KIND, fields, arrays=arrays)


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """The most that clients may use of the server. Requests beyond it are refused."""

    lease_s: float = 30.0
    """Seconds that a session may be silent before it ends."""
    max_sessions: int = 1024
    max_episodes: int = 1024
    remembered_episodes: int = 64
    """Finished episodes of one session that are kept, because their last request may be repeated."""
    max_message_bytes: int = 16 << 20
    max_connections: int = 1024
    read_s: float = 10.0
    """Seconds for which an HTTP client may send nothing of a request that it has begun."""


@dataclass(slots=True, eq=False)
class EpisodeRecord:
    """One episode of a session."""

    session: SessionRecord
    id: str
    training_enabled: bool
    task: dict[str, Any] | None = None
    step: int = 0
    """The number of the next step."""
    reply_to: Address | None = None
    """Destination of the answer to the step under way; None: no step is under way."""
    asked_at: float = 0.0
    """Time at which the step under way came."""
    wants_action: bool = False
    """True if the answer to the step under way has an action."""
    ends: bool = False
    """True if the step under way is the last."""
    logged: Mapping[str, Any] = field(default_factory=dict)
    """The action that the client chose itself in the newest step, and its observation; else empty."""
    last: Reply | None = None
    """The reply to the previous step."""
    over: str | None = None
    """None: open; "": ended; else why it was aborted."""


@dataclass(slots=True, eq=False)
class SessionRecord:
    """One client, from hello to goodbye."""

    token: str
    heard_at: float
    open: dict[str, EpisodeRecord] = field(default_factory=dict)
    ended: OrderedDict[str, EpisodeRecord] = field(default_factory=OrderedDict)
    shipped: int = 0
    """The number of chunk shipments taken."""
    shipment_reply_to: Address | None = None
    """Destination of the answer to the shipment under way; None: no shipment is under way."""


def refusal_of(error: HeadraceError) -> Reply:
    """Return the reply that tells a client of `error`."""
    return Reply.of(ClientReject(error=code_of(error), message=str(error), facts=facts_of(error)))


def ack_of(waiting_for: str = "") -> Reply:
    """Return the reply that confirms a request; see `ClientAck`."""
    return Reply(MessageKind.ACK, {"waiting_for": waiting_for[:MOST_WAITING_FOR]} if waiting_for else {})


def find(session: SessionRecord, id: str) -> EpisodeRecord:
    """Return an episode of the session, open or over. Raises the `EpisodeError` "unknown_episode"."""
    episode = session.open.get(id) or session.ended.get(id)
    if episode is None:
        raise EpisodeError(id, "unknown_episode")
    return episode


def over_error(id: str, reason: str | None) -> EpisodeError:
    """Return the error for an episode that is over; `reason` is empty if it has ended normally."""
    return EpisodeAbortedError(id, reason) if reason else EpisodeError(id, "already_completed")
