"""What a port's own thread knows of one connection: its messages, and what they may cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.schemas.peers.message_budget import MessageBudget

REFUSED_BURST, REFUSED_PER_S = 1000, 50.0
"""The most that refused messages of one connection may cost at once, and in each second after that."""
KNOWN_FIRST, KNOWN_BURST, KNOWN_PER_S = 512, 2000, 1000.0
"""The most that messages of a known peer which bring nothing new may cost: at once on a new connection, at once after
a silence, and in each second after that. A heartbeat costs about 1 a second, and a HELLO of the largest size 257. A
worker that pulls 100 MB of weights asks a hundred times.
"""


def idle_messages() -> MessageBudget:
    """Return the budget of a new peer for messages that bring nothing new."""
    return MessageBudget(KNOWN_BURST, KNOWN_PER_S, KNOWN_FIRST)


@dataclass(slots=True, eq=False)
class PeerAccount:
    """The messages of one connection, as the port's own thread has counted them."""

    route: bytes = b""
    """The ROUTER's name for the connection. It gives each name once, while descriptors are used again."""
    taken: int = 0
    """Bytes of its whole messages."""
    messages: int = 0
    """Number of them."""
    base: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Its messages, the bytes that had come and those taken, and how often the port had been empty, at an earlier time
    from which its unread messages are counted.
    """
    counted: int = 0
    """Its messages at the last count of them."""
    is_ahead: bool = False
    """True if too many were unread then."""
    known: bool = False
    was_known: bool = False
    """True for a learner that has lost the lease."""
    strange: int = 0
    """Number of its messages that a stranger sent."""
    strange_bytes: int = 0
    """Bytes of them."""
    empty: int = 0
    """Number of them that were empty."""
    peer: tuple[str, int] | None = None
    """A stranger's address, read before its last message was answered. If the answer found the route, it is the route's
    peer: else the descriptor may be another connection's by now.
    """
    refusals: MessageBudget = field(default_factory=lambda: MessageBudget(REFUSED_BURST, REFUSED_PER_S, REFUSED_BURST))
    idle: MessageBudget = field(default_factory=idle_messages)
    """The messages of a known peer that brought nothing new. All connections of a worker's slot share one such budget,
    and all supervisors of a group, so that a peer gains nothing by a new connection.
    """
    fd: int = -1
    """The descriptor on which its last message came."""
    sent: int = 0
    """Bytes that were sent to it, as `may_send` counts them."""
    seen_taken: int = 0
    """Bytes of them that its system had taken at the last look."""
    progress: int = 0
    """The number that grew with the last message of a learner that brought something new."""
