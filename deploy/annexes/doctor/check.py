"""The result of one check of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The result of a check; a fleet starts unless one fails."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """The result of one check: what was seen, and what to do about it.

    `advice` is empty if all is well, or if `seen` already says what to do.
    """

    name: str
    verdict: Verdict
    seen: str
    advice: str = ""

    def in_words(self) -> str:
        """Return what was seen, and what to do, in one sentence."""
        return f"{self.name}: {self.seen}{f'; {self.advice}' if self.advice else ''}"
