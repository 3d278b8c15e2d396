"""Messages that the core has ready to send."""

from __future__ import annotations

from typing import NamedTuple

from headrace.broker.batches.source import Peer
from headrace.schemas.frames.wire import Buffer
from headrace.schemas.messages import Message, Reject


class Send(NamedTuple):
    """One message for one peer. A batch goes as the frames it came in."""

    peer: Peer
    content: Message | list[Buffer]


class Outbox:
    """Gathers the core's messages in order."""

    def __init__(self) -> None:
        self._sends: list[Send] = []

    def send(self, peer: Peer | None, content: Message | list[Buffer]) -> None:
        """Add a message for `peer`, if there is one."""
        if peer is not None:
            self._sends.append(Send(peer, content))

    def reject(self, peer: Peer, code: str, detail: str) -> None:
        """Refuse this peer for good."""
        self.send(peer, Reject(code=code, detail=detail, fatal=True))

    def ask_hello(self, peer: Peer, detail: str = "say HELLO first") -> None:
        """Ask this peer for a HELLO with all it knows."""
        self.send(peer, Reject(code="unknown_peer", detail=detail, fatal=False))

    def take(self) -> list[Send]:
        """Return and forget all messages since the last call."""
        sends, self._sends = self._sends, []
        return sends
