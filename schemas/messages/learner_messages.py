"""Messages between a learner and the broker, except BATCH and the weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict

from headrace.schemas.accounts.figures import LEARNER_PARTS as LEARNER_PARTS
from headrace.schemas.accounts.lag_buckets import LagCounts
from headrace.schemas.accounts.ledger import HeldBatch, Settled
from headrace.schemas.accounts.logged_metrics import RowValues
from headrace.schemas.basics.bounds import (
    HIGHEST_PORT,
    MOST_RANKS,
    TRAIN,
    Bytes,
    ChosenName,
    Epoch,
    EpochOrNone,
    GroupName,
    Incarnation,
    ListOf,
    Natural,
    Pid,
    Positive,
    Reason,
    Seconds,
    Slot,
    Token,
    Version,
    WeightsSeq,
)
from headrace.schemas.basics.headrace_version import HeadraceVersion, Program
from headrace.schemas.basics.process_usage import Usage
from headrace.schemas.chunks.open_episodes import OpenEpisodes
from headrace.schemas.frames.compression import Encodings
from headrace.schemas.frames.wire import MessageKind
from headrace.schemas.messages.message_base import Message, ModuleKinds, ModuleShapes, SourcePosition, WeightsRefusal

MOST_ROWS = 32
"""Most rows in one message."""

MOST_WINDOW_STEPS = 1 << 40


WindowSteps = Annotated[int, Field(ge=0, le=MOST_WINDOW_STEPS)] | None
"""Steps that all workers together may have under way: cut and not settled.

0: as many as each worker's own window holds. None: the learner does not know yet, and its earlier number stays in
force.
"""

TimeOfParts = Annotated[dict[Annotated[str, Field(max_length=20)], Seconds], Field(max_length=16)]

Threads = Annotated[int, Field(ge=0, le=1 << 16)]


class Ranks(BaseModel):
    """The ranks of one consumer group: processes that share its batches, which rank 0 hands to the others."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    rank: Annotated[int, Field(ge=0, lt=MOST_RANKS)]
    """The rank of the process that tells."""
    world_size: Annotated[int, Field(ge=2, le=MOST_RANKS)]
    host: Annotated[str, Field(max_length=255)] = ""
    """The name or address by which other machines reach rank 0."""
    port: Annotated[int, Field(ge=0, le=HIGHEST_PORT)] = 0
    """The port at which rank 0 serves the others; 0 from the others."""
    secret: Token = ""
    """The word by which rank 0 knows its own ranks."""


class LearnerHello(Message):
    """Connects or reconnects a learner's stream or publisher. Both of one process bear the same token."""

    KIND = MessageKind.HELLO
    LEFT_OUT = frozenset(("ranks",))
    role: Literal["learner"] = "learner"
    fleet_id: ChosenName = ""
    """Empty: any fleet that this broker serves."""
    token: Token
    channel: Literal["stream", "publisher"]
    epoch: EpochOrNone = 0
    """The epoch this process already holds; 0 asks for one."""
    position: ListOf[SourcePosition] = []
    held: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}/[0-9]{1,9}$")], ListOf[HeldBatch]] = {}
    """Batches received and not yet committed, by "slot/incarnation"."""
    received_batches: Natural = 0
    """Batches that ever reached this process, repeated ones too. The broker counts the learner's credit from it."""
    window_batches: Positive = 64
    window_bytes: Annotated[Bytes, Field(ge=1)] = 256 << 20
    window_steps: WindowSteps = None
    synchronous: bool = False
    """Workers are to ship an update with each version of the weights, and wait for the next one. The broker's config
    may say so too.
    """
    steps_per_update: Annotated[int, Field(ge=0, le=MOST_WINDOW_STEPS)] = 0
    """Steps of an update, for synchronous sampling; 0: one cut of each worker."""
    host: str = ""
    pid: Pid = 0
    program: Program = ""
    """The command that started it, without arguments: a script, or `python -m MODULE`."""
    headrace_version: HeadraceVersion = ""
    encodings: Encodings = []
    """Encodings of a batch's arrays that this learner reads. It is given others without compression."""
    ranks: Ranks | None = None
    """The ranks that share the batches of this stream; None for a stream of one process."""


class GroupHello(LearnerHello):
    """Connects or reconnects the stream of another consumer group than `TRAIN`, or removes a group.

    An earlier broker, which would take such a stream for a new learner, refuses the role. A WELCOME answers both.
    """

    role: Literal["group"] = "group"  # type: ignore[assignment]
    channel: Literal["stream", "remove"]  # type: ignore[assignment]
    group: GroupName


class RankHello(Message):
    """Asks where rank 0 of a consumer group serves the other ranks. A WELCOME answers it."""

    KIND = MessageKind.HELLO
    role: Literal["rank"] = "rank"
    group: GroupName = TRAIN


class LearnerWelcome(Message):
    """The broker's answer to a learner: its lease, and the spaces once a worker has told them."""

    KIND = MessageKind.WELCOME
    TO = ("stream", "publisher")
    LEFT_OUT = frozenset(("ranks",))
    fleet_id: ChosenName
    epoch: Epoch
    spaces: dict[str, Any] = {}
    published: Version = (0, 0)
    weight_shapes: ModuleShapes = {}
    """Shapes of the weights that workers load, once one has told them."""
    weight_kinds: ModuleKinds = {}
    maps_weights: bool = False
    """True if the broker takes announced weights from its machine's memory."""
    ranks: Ranks | None = None
    """In answer to a rank: where rank 0 serves; None while it has no stream here."""


class LearnerFigures(BaseModel):
    """Figures that a learner measures of itself, cumulative since it opened its stream."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    time_spent: TimeOfParts = {}
    """Seconds of its thread by part: those of `LEARNER_PARTS`, which add up to all of its time."""
    consumed_lag: LagCounts = []
    """Agent steps handed to its user, by their lag at that moment (`lag_buckets.py`)."""
    usage: Usage | None = None
    """The use of its process; the time counts from its start."""
    torch_threads: Threads = 0
    """Threads that torch uses for one operation; 0 without torch, on a GPU, or by a learner that does not tell."""
    cores: Threads = 0
    """Cores on which its process may run."""


class Commit(Message):
    """Learner to broker, cumulative: its position at each source that changed since the stream began."""

    KIND = MessageKind.COMMIT
    TO = ("broker",)
    LEFT_OUT = frozenset(("figures",))
    epoch: Epoch
    position: ListOf[SourcePosition] = []
    in_hand: Natural = 0
    """Batches and gaps received and not committed."""
    consumed_batches: Natural = 0
    """Number of batches, of all ever received, that the learner's user has been given."""
    waiting: bool = False
    """True while the learner's user waits for a batch. The stream then says so twice a second."""
    window_steps: WindowSteps = None
    figures: LearnerFigures | None = None
    """Sent some times a second; None: unchanged."""


class LearnerRow(BaseModel):
    """A row of figures that a learner logged, such as the losses of one update.

    (epoch, number) is its name: it rises from row to row, over all lives of a fleet's learners.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    epoch: Epoch
    number: Positive
    """Microseconds since 1970 by the learner's clock, raised where needed so that it rises from row to row."""
    weights_seq: WeightsSeq = 0
    """Sequence number of the newest weights that the learner had published."""
    values: RowValues


class LearnerRows(Message):
    """Publisher to broker: rows that the broker has not stored yet, as far as the publisher knows."""

    KIND = MessageKind.LEARNER_ROWS
    TO = ("broker",)
    epoch: Epoch
    rows: Annotated[ListOf[LearnerRow], Field(max_length=MOST_ROWS)]


class Status(Message):
    """Broker to learner: the heartbeat, with the fleet's state."""

    KIND = MessageKind.STATUS
    TO = ("stream", "publisher")
    epoch: Epoch
    held_batches: Natural = 0
    workers: Natural = 0
    workers_here: Natural = 0
    """Number of these workers on the learner's own host. Workers and learners that tell no host do not count."""
    workers_blocked: Natural = 0
    spaces: dict[str, Any] = {}
    published: Version = (0, 0)
    rows_stored: Annotated[tuple[EpochOrNone, Natural], Strict(False)] = (0, 0)
    """(epoch, number) of the newest row of a learner that is in Redis. Rows up to it need not be sent again."""
    waiting_for: str = ""
    """In synchronous sampling: the peer that the round waits for, the learner or some workers."""
    weight_shapes: ModuleShapes = {}
    """As in the WELCOME, where they have changed since this connection was last told of them; else empty."""
    weight_kinds: ModuleKinds = {}
    refused: WeightsRefusal | None = None
    """A worker could not load this version of the weights."""


class SourceStart(Message):
    """Broker to learner, before the first batch of an incarnation on a connection.

    It says what became of the batches up to `settled.seq`, which the learner will not be given.
    """

    KIND = MessageKind.SOURCE_START
    TO = ("stream",)
    slot: Slot
    incarnation: Incarnation
    settled: Settled


class SourceGap(Message):
    """Broker to learner, in place of batch `batch.seq`, which was dropped."""

    KIND = MessageKind.SOURCE_GAP
    TO = ("stream",)
    slot: Slot
    incarnation: Incarnation
    batch: HeldBatch
    reason: Reason


class SourceEnd(Message):
    """Broker to learner: batch `seq` was the last of this incarnation; the learner aborts its open episodes.

    It comes again after a reconnect until a position says that the learner's user has taken it. With `seq` 0 it comes
    once more when the broker has folded this life: the learner may forget it too.
    """

    KIND = MessageKind.SOURCE_END
    TO = ("stream",)
    slot: Slot
    incarnation: Incarnation
    seq: Natural
    reason: Reason
    open_episodes: OpenEpisodes | None = None
    """Sent by earlier versions."""
