"""What a policy server remembers of its clients, and what it says to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from headrace.schemas.episode_errors import (
    EpisodeAbortedError,
    EpisodeCompletedError,
    EpisodeError,
    UnknownEpisodeError,
)
from headrace.schemas.errors import HeadraceError
from headrace.schemas.messages import Message
from headrace.schemas.serving_errors import code_of, facts_of
from headrace.schemas.serving_messages import ClientReject
from headrace.schemas.wire import MessageKind


class Address(Protocol):
    """Where to send what is said to one request; equal ones lead to the same place."""

    def send(self, reply: Reply) -> None:
        """Send it, without waiting; nobody may be there any more."""


@dataclass(slots=True, eq=False)
class Reply:
    """What is said to one request: a message of that kind, and the action that goes with it.

    Its fields stand as they are sent, for one is made for every step of every client.
    """

    kind: MessageKind
    fields: Mapping[str, Any]
    action: Any = None
    """In the nesting of its space."""
    arrays: Mapping[str, NDArray[Any]] | None = None
    """Besides the action's."""

    @classmethod
    def of(cls, message: Message, arrays: Mapping[str, NDArray[Any]] | None = None) -> Reply:
        """Any message, all of whose fields are plain."""
        return cls(message.KIND, vars(message), arrays=arrays)


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What clients may take of the server; beyond that they are refused."""

    lease_s: float = 30.0
    """Silence after which a session has ended."""
    max_sessions: int = 1024
    max_episodes: int = 1024
    """Open ones of a session."""
    remembered_episodes: int = 64
    """Finished ones of a session, whose last request may still come again."""
    max_message_bytes: int = 16 << 20
    max_connections: int = 1024
    """By HTTP."""
    read_s: float = 10.0
    """In which an HTTP request has arrived whole; large ones have longer."""


@dataclass(slots=True, eq=False)
class EpisodeRecord:
    """One episode of a session."""

    session: SessionRecord
    id: str
    training_enabled: bool
    step: int = 0
    """The next one."""
    reply_to: Address | None = None
    """Where the next step is to be answered; None: it is not under way."""
    reply_number: int = 0
    wants_action: bool = False
    """Of the step under way: whether its answer says what to do."""
    ends: bool = False
    """Likewise: whether it is the last."""
    last: Reply | None = None
    """To the step before."""
    over: str | None = None
    """None: it is open; "": it has ended; else why it was aborted."""


@dataclass(slots=True, eq=False)
class SessionRecord:
    """One client, from its first word to its end."""

    token: str
    heard_at: float
    open: dict[str, EpisodeRecord] = field(default_factory=dict)
    ended: OrderedDict[str, EpisodeRecord] = field(default_factory=OrderedDict)
    shipped: int = 0
    """Shipments of chunks that were taken."""
    shipment_reply_to: Address | None = None
    """Where the next is to be answered; None: none is under way."""
    shipment_reply_number: int = 0


def refusal_of(error: HeadraceError, request: int = 0) -> Reply:
    """How an error is told to a client."""
    return Reply.of(ClientReject(request=request, error=code_of(error), message=str(error), facts=facts_of(error)))


def find(session: SessionRecord, id: str) -> EpisodeRecord:
    """An episode of the session, open or over; raises `UnknownEpisodeError`."""
    episode = session.open.get(id) or session.ended.get(id)
    if episode is None:
        raise UnknownEpisodeError(id)
    return episode


def over_error(id: str, reason: str | None) -> EpisodeError:
    """What is said of an episode that is over."""
    return EpisodeAbortedError(id, reason) if reason else EpisodeCompletedError(id)
