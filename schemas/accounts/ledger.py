"""The books: which steps were made, and what became of them. Each number is measured where it happens, then added up.

For each life of a worker (slot, incarnation), in steps and in chunks:

    stepped   = open + discarded + dropped + shipped        by the worker, at the moment it ships a batch
    shipped   = accepted + lost                             lost: shipped batches no broker accepted, by name
    accepted  = committed + held + dropped by name          by the broker, which alone decides what became of a batch

Steps are those of chunks, so they are an agent's: in an env of several agents an env step counts once for each agent
that acted in it. `open` steps are in fragment buffers, or were cut and wait for their number. Discarded steps never
became a chunk. Steps that the worker dropped became a chunk, but their batch got no number.

Numbers from worker and broker belong to the same moment, because the worker's totals ride in the header of each batch.
The broker keeps the totals of the last batch it accepted, so `shipped` there and `accepted` here cover exactly the same
batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict

from headrace.schemas.accounts.figures import Metric
from headrace.schemas.basics.bounds import (
    MOST_REASONS,
    BatchCount,
    ChosenName,
    IncarnationOrNone,
    Natural,
    OpenSteps,
    Positive,
    Reason,
    Slot,
)

_MODEL = ConfigDict(strict=True, frozen=True, extra="ignore")

Count = Annotated[tuple[Natural, Natural], Strict(False)]
"""(steps, chunks). Not strict, since JSON has only lists; the two integers are strict."""

CountsByReason = Annotated[dict[Reason, Count], Field(max_length=MOST_REASONS)]

StepsByModule = Annotated[dict[ChosenName, Natural], Field(max_length=1024)]
"""Twice as many modules as a fleet may have: a slot's earlier lives may have had others."""


class Discard(StrEnum):
    """Reasons for which steps never became a chunk."""

    ENV_EXCEPTION = "env_exception"
    ENV_HANG = "env_hang"
    ENV_BAD_DATA = "env_bad_data"
    RESET = "reset"
    SHUTDOWN = "shutdown"
    FENCED = "fenced"
    WORKER_KILLED = "worker_killed"
    CALLBACK_EXCEPTION = "callback_exception"
    ENV_CRASH = "env_crash"
    ENV_NEIGHBOUR = "env_neighbour"
    """Another env took down the process that both were in."""
    ENV_HOST_LOST = "env_host_lost"
    """The host of remote envs fell silent, left, or was refused."""
    CLIENT_LOST = "client_lost"
    """The client that drove an external episode is gone."""
    TRAINING_DISABLED = "training_disabled"
    """Steps of external episodes that were not to be trained on."""
    UNSHIPPED = "unshipped"
    """Steps of a client that acts by itself, which it could not bring to its worker: the worker died, forgot the
    client, or takes no message so large.
    """
    FROZEN = "frozen"
    """Steps of modules that a learner of one's own does not train. They stay with the worker."""


class Drop(StrEnum):
    """Reasons for which a batch that was cut did not reach a commit."""

    STALE = "stale"
    OVERFLOW = "overflow"
    OVERSIZE = "oversize"
    POISON = "poison"
    FENCED = "fenced"
    SHUTDOWN = "shutdown"
    GAP = "gap"
    BROKER_LOST = "broker_lost"
    WORKER_KILLED = "worker_killed"
    OTHER = "other"
    """A reason that only a newer peer knows."""
    BEFORE_GROUP = "before_group"
    """Settled by other consumer groups before this group began, or while a broker that had just started did not know
    the group.
    """


@dataclass(frozen=True, slots=True)
class CounterRow:
    """The row of a counter: all facts about a field of `WorkerTotals` except its type, which has its bounds.

    Recorder, folded lives, Redis, exporter and reference pages read these rows. Two values of one life merge to the
    larger one, those of several lives to their sum.

    - word: its place in an area of the recorder, for ever. New counters take the words from 96 on.
    - metric: its row among the fleet's lifetime counters; None if it is none of them.
    - value: the attribute to read where the field may be None; "" for the field itself.
    """

    word: int
    metric: Metric | None = None
    value: str = ""


_STEPPED = Metric("agent_steps_total", "agent steps", "taken by workers; the ledger counts these")
_EPISODES = Metric(
    "episodes_total", "episodes", "finished", shown="Episodes; mean length {episode_len_mean}; {left_out}"
)
_ENV_FAILURES = Metric(
    *("env_failures_total", "failures", "of sub-environments"),
    shown="Env failures; rebuilt {env_rebuilds_total}",
    chart="Failures: envs failed",
)
_ENV_STEPS = Metric(
    "env_steps_total", "env steps", "taken by workers' envs, one for all agents that acted", shown="Env steps"
)

_OUTSIDE = Metric(
    "observations_outside_total", "observations", "of agents with values outside their Box, delivered as told"
)


class WorkerTotals(BaseModel):
    """Running totals of one incarnation right after batch `seq` was cut (0: none yet).

    They are in steps, unless the name has another unit.
    """

    model_config = _MODEL
    seq: Annotated[Natural, CounterRow(1, Metric("batches_total", "batches", "cut by workers"))] = 0
    stepped: Annotated[Natural, CounterRow(2, _STEPPED)] = 0
    open: Annotated[OpenSteps, CounterRow(3)] = 0
    shipped: Annotated[Natural, CounterRow(4)] = 0
    shipped_chunks: Annotated[
        Natural, CounterRow(5, Metric("chunks_total", "chunks", "in batches that workers cut"))
    ] = 0
    discarded: Annotated[dict[Reason, Natural], Field(max_length=MOST_REASONS)] = {}
    dropped: CountsByReason = {}
    """Dropped by the worker itself before the batch got a number, such as the last cut of a fenced worker."""
    episodes: Annotated[Natural, CounterRow(6, _EPISODES)] = 0
    env_failures: Annotated[Natural, CounterRow(7, _ENV_FAILURES)] = 0
    env_rebuilds: Annotated[Natural, CounterRow(8, Metric("env_rebuilds_total", "rebuilds", "of sub-environments"))] = 0
    env_steps: Annotated[Natural | None, CounterRow(14, _ENV_STEPS, value="steps_of_envs")] = None
    """Steps of envs, counted once for all agents that acted. None from a peer or a book that knows envs of one agent
    only.
    """
    observations_outside: Annotated[Natural | None, CounterRow(96, _OUTSIDE, value="known_outside")] = None
    """Observations with values outside their Box, delivered as told. None from a peer that does not count them."""
    module_steps: StepsByModule = {}
    """`shipped` by module; in a row, as of the last batch accepted. Empty where that is not known."""

    @property
    def steps_of_envs(self) -> int:
        """Return `env_steps`; where that is not known, `stepped`, since every step is then an env's."""
        return self.stepped if self.env_steps is None else self.env_steps

    @property
    def known_outside(self) -> int:
        """Return `observations_outside`; 0 where that is not known."""
        return self.observations_outside or 0


COUNTERS: Mapping[str, CounterRow] = MappingProxyType(
    {
        name: row
        for name, field in WorkerTotals.model_fields.items()
        for row in field.metadata
        if isinstance(row, CounterRow)
    }
)
"""The rows of all counters, by their fields of `WorkerTotals`."""


class HeldBatch(BaseModel):
    """The counts of a batch that a worker, the broker or a learner holds."""

    model_config = _MODEL
    seq: Positive
    steps: BatchCount
    chunks: BatchCount

    @property
    def count(self) -> Count:
        """Return (steps, chunks)."""
        return (self.steps, self.chunks)


class Settled(BaseModel):
    """The final state of one incarnation's batches 1..seq. It depends on history alone, so the longer one wins."""

    model_config = _MODEL
    seq: Natural = 0
    committed: Count = (0, 0)
    dropped: CountsByReason = {}

    def add(self, committed: Count, dropped: Mapping[str, Count]) -> Settled:
        """Return the value one batch further on."""
        merged = dict(self.dropped)
        for reason, count in dropped.items():
            merged[reason] = plus(merged.get(reason, (0, 0)), count)
        return Settled(seq=self.seq + 1, committed=plus(self.committed, committed), dropped=merged)

    def total(self) -> Count:
        """Return steps and chunks of all settled batches."""
        return total_of((self.committed, *self.dropped.values()))


def plus(a: Count, b: Count) -> Count:
    """Return the componentwise sum."""
    return (a[0] + b[0], a[1] + b[1])


def total_of(counts: Iterable[Count]) -> Count:
    """Return the componentwise sum of all."""
    return reduce(plus, counts, (0, 0))


class LedgerRow(BaseModel):
    """The books of one incarnation, as the broker reports them to Redis in one write, in (steps, chunks) pairs."""

    model_config = _MODEL
    slot: Slot
    incarnation: IncarnationOrNone
    totals: WorkerTotals
    accepted: Count
    held: Count
    settled: Settled
    lost: dict[str, Count] = {}
    """Shipped but never accepted, by name: as the recorder of a dead worker holds them, or as a fenced worker told."""
    closed: bool = False
    end_taken: bool = False
    """True once a learner's user has taken the end: no episode of this life lacks its marker."""
    stopped: bool = False
    """True if the broker that held the batches of this closed life has stopped in order."""

    def problems(self, name: str = "") -> Iterator[str]:
        """Yield one sentence for each equation that does not hold. `name` stands for the row in it."""
        name = name or f"slot {self.slot} incarnation {self.incarnation}"
        t = self.totals
        discarded, dropped = sum(t.discarded.values()), total_of(t.dropped.values())
        if t.stepped != t.open + discarded + dropped[0] + t.shipped:
            yield (
                f"{name}: stepped {t.stepped} != open {t.open} + discarded {discarded} + dropped {dropped[0]} "
                f"+ shipped {t.shipped}"
            )
        shipped, lost = (t.shipped, t.shipped_chunks), total_of(self.lost.values())
        if shipped != plus(self.accepted, lost):
            yield f"{name}: shipped {shipped} != accepted {self.accepted} + lost {lost} (steps, chunks)"
        settled = self.settled.total()
        if self.accepted != plus(self.held, settled):
            yield f"{name}: accepted {self.accepted} != held {self.held} + settled {settled} (steps, chunks)"
        if t.module_steps and self.accepted[0] != sum(t.module_steps.values()):
            yield f"{name}: accepted {self.accepted[0]} steps != those of its modules {sum(t.module_steps.values())}"
        if self.closed and t.open:
            yield f"{name}: closed with {t.open} steps still open"


class FleetLedger(BaseModel):
    """All rows added up: stepped = committed + queued + sum dropped[reason] + sum discarded[reason]."""

    model_config = ConfigDict(frozen=True)
    stepped: int = 0
    committed: tuple[int, int] = (0, 0)
    queued: int = 0
    """Steps in workers' buffers, the broker's memory, or the learner's hands."""
    dropped: dict[str, tuple[int, int]] = {}
    discarded: dict[str, int] = {}

    def balance(self) -> int:
        """Return steps on the left of the equation less those on the right; 0 when the books balance."""
        right = self.committed[0] + self.queued + total_of(self.dropped.values())[0] + sum(self.discarded.values())
        return self.stepped - right


def add_up(rows: Mapping[tuple[int, int], LedgerRow]) -> FleetLedger:
    """Add up the books of every incarnation to those of the fleet."""
    stepped = queued = 0
    committed: Count = (0, 0)
    dropped: CountsByReason = {}
    discarded: dict[str, int] = {}
    for row in rows.values():
        stepped += row.totals.stepped
        queued += row.totals.open + row.held[0]
        committed = plus(committed, row.settled.committed)
        for source in (row.totals.dropped, row.lost, row.settled.dropped):
            for reason, count in source.items():
                dropped[reason] = plus(dropped.get(reason, (0, 0)), count)
        for reason, steps in row.totals.discarded.items():
            discarded[reason] = discarded.get(reason, 0) + steps
    return FleetLedger(stepped=stepped, committed=committed, queued=queued, dropped=dropped, discarded=discarded)
