"""The outcome of a repeated episode."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.schemas.chunks.chunk import ChunkEnd


@dataclass(slots=True)
class Repeated:
    """How far the repetition came, how it ended, and where it first differed."""

    at: str = "construction"
    """The last call: "construction", "reset", or "step N", from 1 on."""
    error: BaseException | None = None
    end: ChunkEnd = ChunkEnd.ONGOING
    """How the episode ended, where it did not fail."""
    difference: str = ""
    """The first difference from what the worker saw, in words; "" for none."""
    differs_at: str = ""

    def note(self, what: str) -> None:
        """Note a difference, if it is the first one."""
        if not self.difference:
            self.difference, self.differs_at = what, self.at
