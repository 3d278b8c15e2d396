"""The books of a consumer group besides the learner's, and its state, which Redis has in `consumer_groups`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import Count, CountsByReason, Drop, FleetLedger, LedgerRow, add_up
from headrace.schemas.basics.bounds import Bytes, Natural, Pid

MOST_TEXT = 255
_Text = Annotated[str, Field(max_length=MOST_TEXT)]
_Number = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]


class GroupRow(BaseModel):
    """One group at one moment, by the broker's clock. Times are absent before their first event.

    - on_slow: what happens while its reader is slow or away, as `broker.consumer_groups` says.
    - declared: whether that setting names it. Else its first reader made it.
    - behind: whether its books may lack the newest batches. A broker that has started waits for the reader's position.
    - connected, waiting: whether its reader is connected, and waits for a batch while none is on its way.
    - host, pid, program: of its newest reader.
    - since_unix_s, heard_unix_s, committed_unix_s: when that reader came, was last heard of, and last committed.
    - held_batches, held_bytes, lag_steps, oldest_s: accepted and not settled by the group; the oldest is so old.
    - committed, dropped: (steps, chunks) that it has settled in all, those dropped by reason.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)
    on_slow: Literal["wait", "drop"] = "drop"
    declared: bool = False
    behind: bool = False
    connected: bool = False
    waiting: bool = False
    host: _Text = ""
    pid: Pid = 0
    program: _Text = ""
    since_unix_s: _Number | None = None
    heard_unix_s: _Number | None = None
    committed_unix_s: _Number | None = None
    held_batches: Natural = 0
    held_bytes: Bytes = 0
    lag_steps: Natural = 0
    oldest_s: _Number = 0.0
    committed: Count = (0, 0)
    dropped: CountsByReason = {}

    @property
    def lost_steps(self) -> int:
        """Return the steps that it was to get and did not: all that it dropped, but for those before it began."""
        return sum(steps for reason, (steps, _) in self.dropped.items() if reason != Drop.BEFORE_GROUP)

    def figures(self) -> dict[str, float]:
        """Return the gauges of `GAUGE_TABLE` with the label `group`."""
        return {
            "group_readers": int(self.connected),
            "group_lag_agent_steps": self.lag_steps,
            "group_oldest_age_s": self.oldest_s,
            "group_committed_agent_steps": self.committed[0],
            "group_lost_agent_steps": self.lost_steps,
        }


@dataclass(frozen=True, slots=True)
class GroupBooks:
    """A group's state, its rows by (slot, incarnation), and folded lives by slot. In a report, those that changed."""

    state: GroupRow = field(default_factory=GroupRow)
    rows: Mapping[tuple[int, int], LedgerRow] = field(default_factory=dict)
    folded: Mapping[int, FoldedLives] = field(default_factory=dict)

    def unreported(self) -> GroupBooks:
        """Return the books of a broker that does not report any more: no reader is connected to it."""
        return replace(self, state=self.state.model_copy(update={"connected": False, "waiting": False}))

    def fleet(self) -> FleetLedger:
        """Return the sum of the books."""
        return add_up({**self.rows, **{(slot, 0): lives.row for slot, lives in self.folded.items()}})
