"""Control messages: all but BATCH (`batch.py`) that workers, broker, learners and supervisors say to one another.

                 worker                      broker                      learner / publisher
    HELLO        ─────────────────────────────▶ ◀─────────────────────────── HELLO
    WELCOME      ◀───────────────────────────── ─────────────────────────────▶ WELCOME
    BATCH        ─────────────────────────────▶ ─────────────────────────────▶ BATCH (the same frames)
    ACK          ◀───────────────────────────── ◀─────────────────────────── COMMIT
    HEARTBEAT    ─────────────────────────────▶ ─────────────────────────────▶ STATUS
    WEIGHTS      ◀──────────── (PUB) ────────── ◀─────────────────────────── WEIGHTS, answered by WEIGHTS_ACK
    WEIGHTS_PULL ─────────────────────────────▶
    WEIGHTS_PART ◀─────────────────────────────
    SKIP         ─────────────────────────────▶ ─────────────────────────────▶ SOURCE_START, SOURCE_GAP
    BYE          ─────────────────────────────▶ ─────────────────────────────▶ SOURCE_END
    REJECT, FENCED ◀──────────────────────────  ─────────────────────────────▶
    OBITUARY     (supervisor) ────────────────▶ answered by ACK

Every ACK, WELCOME, HEARTBEAT, COMMIT and STATUS carries full cumulative state, so any of them may be lost.
Unknown fields are ignored: a newer minor version may add some, with defaults.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from headrace.schemas.errors import DecodeError
from headrace.schemas.ledger import Natural, Settled, WorkerTotals
from headrace.schemas.runner_counters import Counters
from headrace.schemas.wire import Buffer, MessageKind, encode

Positive = Annotated[Natural, Field(gt=0)]
Version = Annotated[tuple[Natural, Natural], Strict(False)]
"""(learner_epoch, seq) of weights, ordered as a pair; (0, 0) is none yet."""


M = TypeVar("M", bound=BaseModel)


class Message(BaseModel):
    """A control message; `KIND` names it on the wire."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    KIND: ClassVar[MessageKind]

    def frames(self) -> list[Buffer]:
        """The message as ZeroMQ frames."""
        return encode(self.KIND, self.model_dump())


class SourcePosition(BaseModel):
    """How far a learner got with one incarnation's batches: all up to `seq` that it was given are trained on."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    slot: Natural
    incarnation: Natural
    settled: Settled


class HeldBatch(BaseModel):
    """A batch in somebody's hands, by its counts."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    seq: Positive
    steps: Natural
    chunks: Natural


class WorkerHello(Message):
    """A worker (re)connects. incarnation 0 asks for one. `settled` and `totals` are its latest knowledge."""

    KIND = MessageKind.HELLO
    role: Literal["worker"] = "worker"
    fleet_id: str
    token: str
    """Random, one a process: tells a reconnect from another process in the same slot."""
    slot: Natural | None = None
    incarnation: Natural = 0
    host: str = ""
    pid: Natural = 0
    spaces: dict[str, Any] = {}
    """Once the envs stand: see `module_spaces.py`."""
    settled: Settled = Settled()
    totals: WorkerTotals = WorkerTotals()
    weights: Version = (0, 0)
    silence_s: float = Field(default=0.0, ge=0)
    """How long it may stay silent from now on beyond the usual lease (an env is being built)."""


class LearnerHello(Message):
    """A learner's stream or publisher (re)connects; both of one process bear the same token."""

    KIND = MessageKind.HELLO
    role: Literal["learner"] = "learner"
    fleet_id: str = ""
    """Empty: whichever fleet this broker serves."""
    token: str
    channel: Literal["stream", "publisher"]
    epoch: Natural = 0
    """The epoch this process already holds; 0 asks for one."""
    position: list[SourcePosition] = []
    held: dict[Annotated[str, Field(pattern=r"^[0-9]{1,18}/[0-9]{1,18}$")], list[HeldBatch]] = {}
    """Batches received and not yet committed, by "slot/incarnation"."""
    received_batches: Natural = 0
    """Batches that ever reached this process, repeated ones too; what the broker counts its credit from."""
    window_batches: Positive = 64
    window_bytes: Positive = 256 << 20
    host: str = ""
    pid: Natural = 0


class SupervisorHello(Message):
    """A supervisor that will report deaths; it asks for nothing."""

    KIND = MessageKind.HELLO
    role: Literal["supervisor"] = "supervisor"
    fleet_id: str
    token: str


class WorkerWelcome(Message):
    """The broker's answer to a worker: who it is now and from where to go on."""

    KIND = MessageKind.WELCOME
    fleet_id: str
    slot: Natural
    incarnation: Positive
    accepted: Natural = 0
    settled: Settled = Settled()
    credit: Natural = 0
    max_batch_bytes: Positive
    lease_s: float = Field(default=10.0, gt=0)
    heartbeat_interval_s: float = Field(default=1.0, gt=0)
    weights_endpoint: str = ""
    weights: Version = (0, 0)
    steps_elsewhere: Natural = 0
    """Env steps that all lives of workers in this fleet but this one have made, as the broker knows by now."""
    counters: Counters = {}
    """Of the slot's earlier lives, for the runner to go on from."""


class LearnerWelcome(Message):
    """The broker's answer to a learner: its lease, and the spaces once a worker has told them."""

    KIND = MessageKind.WELCOME
    fleet_id: str
    epoch: Positive
    spaces: dict[str, Any] = {}
    published: Version = (0, 0)


class Reject(Message):
    """This peer or this message is refused; `fatal` says whether to stop."""

    KIND = MessageKind.REJECT
    code: str
    detail: str
    fatal: bool = True
    seq: Natural = 0
    """The refused batch, if one was."""


class Fenced(Message):
    """Another has taken this one's place. For a worker: `accepted` is final, no later batch of it counts."""

    KIND = MessageKind.FENCED
    detail: str
    accepted: Natural = 0
    settled: Settled = Settled()


class Ack(Message):
    """Broker to worker, cumulative: batches up to `accepted` need not be sent again on this connection, up to
    `settled.seq` need not be kept, and up to `credit` may be sent."""

    KIND = MessageKind.ACK
    slot: Natural = 0
    incarnation: Natural = 0
    accepted: Natural = 0
    settled: Settled = Settled()
    credit: Natural = 0
    weights: Version = (0, 0)
    closed: bool = False
    """The books of this incarnation are closed: its BYE or obituary has been taken."""
    steps_elsewhere: Natural = 0
    """As in the WELCOME, by now."""
    waiting_for: str = ""
    """Whom the fleet waits for when there is no credit: "" | "learner" | "broker"."""


class Skip(Message):
    """Worker to broker, in place of batch `seq`: it exists no more, for the reason given (it was poison, or the broker
    that had it is gone and `ack = "broker"` let the worker forget it)."""

    KIND = MessageKind.SKIP
    slot: Natural
    incarnation: Positive
    batch: HeldBatch
    reason: str
    totals: WorkerTotals
    """As of the moment the batch was cut."""


class Heartbeat(Message):
    """Worker to broker: alive, with full cumulative state."""

    KIND = MessageKind.HEARTBEAT
    slot: Natural
    incarnation: Positive
    totals: WorkerTotals
    settled: Natural = 0
    weights: Version = (0, 0)
    blocked: str = ""
    counters: Counters = {}
    """Its runner's, all earlier lives of the slot included."""


class LastWords(Message):
    """What one incarnation leaves behind: its totals, and each batch it cut and did not see settled, with its counts.

    Of these the broker counts as lost, by `reason`, those it never accepted: measured batch by batch, not inferred.
    Acknowledged by an Ack with `closed`; repeated until then.
    """

    slot: Natural
    incarnation: Positive
    totals: WorkerTotals
    settled: Settled
    window: list[HeldBatch] = []
    reason: str


class Bye(LastWords):
    """Worker to broker: leaving."""

    KIND = MessageKind.BYE
    reason: str = "shutdown"
    counters: Counters = {}
    """As in its last heartbeat, or later ones."""


class Commit(Message):
    """Learner to broker, cumulative: its position at each source that changed since the stream began."""

    KIND = MessageKind.COMMIT
    epoch: Positive
    position: list[SourcePosition] = []
    in_hand: Natural = 0
    """Batches and gaps received and not committed."""
    consumed_batches: Natural = 0
    """Of all batches ever received, how many the user has been given."""
    waiting: bool = False


class Status(Message):
    """Broker to learner: heartbeat with what a learner may want to know."""

    KIND = MessageKind.STATUS
    epoch: Positive
    held_batches: Natural = 0
    workers: Natural = 0
    workers_blocked: Natural = 0
    spaces: dict[str, Any] = {}
    published: Version = (0, 0)


class SourceStart(Message):
    """Broker to learner, before the first batch of an incarnation on a connection: what became of those up to
    `settled.seq`, which the learner will not be given."""

    KIND = MessageKind.SOURCE_START
    slot: Natural
    incarnation: Positive
    settled: Settled


class SourceGap(Message):
    """Broker to learner, in the place of batch `batch.seq`: it was dropped."""

    KIND = MessageKind.SOURCE_GAP
    slot: Natural
    incarnation: Positive
    batch: HeldBatch
    reason: str


class SourceEnd(Message):
    """Broker to learner: after batch `seq` nothing more comes from this incarnation; its open episodes are aborted."""

    KIND = MessageKind.SOURCE_END
    slot: Natural
    incarnation: Positive
    seq: Natural
    reason: str


class WeightsAck(Message):
    """Broker to publisher: this version stands in the relay."""

    KIND = MessageKind.WEIGHTS_ACK
    version: Version


class WeightsHeader(Message):
    """Header of a WEIGHTS message. Its arrays are the tensors; over PUB a large version comes without them, as an
    announcement that it can be pulled."""

    KIND = MessageKind.WEIGHTS
    fleet_id: str
    version: Version
    digest: str
    """blake2b-128 over names, dtypes, shapes and bytes of the tensors, in hexadecimal."""


class WeightsPull(Message):
    """Worker to broker: send `length` bytes from `offset` of the newest version's blob."""

    KIND = MessageKind.WEIGHTS_PULL
    offset: Natural
    length: int = Field(ge=1, le=4 << 20)
    version: Version = (0, 0)
    """The version being pulled; at offset 0 whichever is newest."""


class WeightsPart(Message):
    """Header of the answer; its one array `part` (uint8) holds the bytes. The blob is the version's WEIGHTS frames one
    after another, `frame_sizes` where to cut it. When `version` is another than was asked for, begin anew with it."""

    KIND = MessageKind.WEIGHTS_PART
    version: Version
    offset: Natural
    frame_sizes: list[Natural] = []


class Obituary(LastWords):
    """Supervisor to broker: this incarnation is dead; the rest is what its recorder holds."""

    KIND = MessageKind.OBITUARY
    reason: str = "worker_killed"


HELLO_BY_ROLE: dict[str, type[Message]] = {
    "worker": WorkerHello,
    "learner": LearnerHello,
    "supervisor": SupervisorHello,
}


def read(message: type[M], header: dict[str, Any]) -> M:
    """The header as `message`; raises `DecodeError` naming the field that is wrong."""
    try:
        return message.model_validate(header)
    except ValidationError as error:
        raise DecodeError("bad_message", f"{message.__name__}: {_first(error)}") from error


def read_hello(header: dict[str, Any]) -> Message:
    """A HELLO of whichever role."""
    role = header.get("role")
    if not isinstance(role, str) or role not in HELLO_BY_ROLE:
        raise DecodeError("bad_message", f"HELLO of unknown role {role!r:.40}")
    return read(HELLO_BY_ROLE[role], header)


def _first(error: ValidationError) -> str:
    first: Any = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])):.100}: {first['msg']:.200}"
