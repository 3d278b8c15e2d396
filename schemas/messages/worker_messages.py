"""Messages between a worker, or the supervisor that reports its death, and the broker, except BATCH."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from headrace.schemas.accounts.env_errors import MOST_GROUPS, EnvErrorGroup
from headrace.schemas.accounts.ledger import Drop, HeldBatch, Settled, WorkerTotals
from headrace.schemas.accounts.logged_metrics import LoggedMetrics
from headrace.schemas.accounts.runner_counters import Counters
from headrace.schemas.accounts.worker_figures import (
    EnvHostCounts,
    EnvHostVersions,
    Ports,
    ServingFigures,
    TimeByPart,
    WaitByReason,
)
from headrace.schemas.basics.bounds import (
    MOST_SILENCE_S,
    WINDOW,
    Bytes,
    ChosenName,
    Incarnation,
    IncarnationOrNone,
    ListOf,
    Natural,
    Pid,
    Positive,
    Reason,
    Slot,
    Token,
    Version,
)
from headrace.schemas.basics.headrace_version import HeadraceVersion
from headrace.schemas.basics.process_usage import Usage
from headrace.schemas.chunks.open_episodes import OpenEpisodes
from headrace.schemas.frames.compression import Encodings
from headrace.schemas.frames.wire import MessageKind
from headrace.schemas.messages.message_base import (
    MOST_NAME,
    MOST_SHORT_DETAIL,
    Message,
    ModuleKinds,
    ModuleShapes,
    SettledByGroup,
    WeightsRefusal,
)

MOST_DROPPED = 1024
"""As many batches as a recorder holds, and a worker keeps."""


class WorkerHello(Message):
    """Connects or reconnects a worker. incarnation 0 asks for one. `settled` and `totals` are its latest knowledge."""

    KIND = MessageKind.HELLO
    role: Literal["worker"] = "worker"
    fleet_id: ChosenName
    token: Token
    """Random, one a process: tells a reconnect from another process in the same slot."""
    slot: Slot | None = None
    incarnation: IncarnationOrNone = 0
    host: str = ""
    pid: Pid = 0
    headrace_version: HeadraceVersion = ""
    spaces: dict[str, Any] = {}
    """Absent until the envs are built: see `module_spaces.py`."""
    num_envs: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    """Envs that step together; 0 until they are built, like `cut_steps`."""
    cut_steps: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    """Env steps of a cut."""
    weight_shapes: ModuleShapes = {}
    """Absent until the modules are built."""
    weight_kinds: ModuleKinds = {}
    settled: Settled = Settled()
    groups: SettledByGroup = {}
    totals: WorkerTotals = WorkerTotals()
    weights: Version = (0, 0)
    silence_s: float = Field(default=0.0, ge=0, le=MOST_SILENCE_S)
    """Seconds that it may stay silent from now on beyond the usual lease, while an env is being built."""


class WorkerWelcome(Message):
    """The broker's answer to a worker: its slot and incarnation, and where to go on."""

    KIND = MessageKind.WELCOME
    TO = ("worker",)
    fleet_id: ChosenName
    slot: Slot
    incarnation: Incarnation
    accepted: Natural = 0
    settled: Settled = Settled()
    groups: SettledByGroup = {}
    credit: Natural = 0
    window_steps: Natural = 0
    """Steps that this worker may keep unsettled, its share of what the learner wants under way; 0: no such limit."""
    synchronous: bool | None = None
    """True for synchronous sampling. None: a broker that has just restarted does not know; the worker keeps its mode.
    """
    round_steps: Natural = 0
    """Synchronous sampling: steps to ship with `weights` in all, before it waits for the next version."""
    max_batch_bytes: Bytes
    lease_s: float = Field(default=10.0, gt=0, le=MOST_SILENCE_S)
    heartbeat_interval_s: float = Field(default=1.0, gt=0, le=MOST_SILENCE_S)
    weights_endpoint: str = ""
    maps_weights: bool = False
    """True where workers of the broker's machine may subscribe to `MAPPING_TOPIC`."""
    weights: Version = (0, 0)
    steps_elsewhere: Natural = 0
    """Env steps that all other lives of workers in this fleet have made, as far as the broker knows."""
    steps_share: Natural | None = None
    """Env steps that the fleet may still take, divided by its workers and rounded up. None: the fleet has no bound."""
    counters: Counters = {}
    """Counters of the slot's earlier lives, from which the runner goes on."""
    encodings: Encodings = []
    """Encodings of a batch's arrays that this broker takes (`compression.py`)."""


class Ack(Message):
    """Broker to worker, cumulative.

    The worker need not send batches up to `accepted` again on this connection, and may send those up to `credit`. It
    need not keep those that are settled by the learner (`settled`) and by all `groups`.
    """

    KIND = MessageKind.ACK
    TO = ("worker", "supervisor")
    slot: Slot = 0
    incarnation: IncarnationOrNone = 0
    accepted: Natural = 0
    settled: Settled = Settled()
    groups: SettledByGroup = {}
    credit: Natural = 0
    window_steps: Natural = 0
    """As in the WELCOME, with the present value."""
    synchronous: bool | None = None
    round_steps: Natural = 0
    """Both as in the WELCOME, with present values."""
    weights: Version = (0, 0)
    dropped: Annotated[
        dict[Annotated[str, Field(max_length=MOST_NAME)], Annotated[ListOf[Positive], Field(max_length=MOST_DROPPED)]],
        Field(max_length=len(Drop)),
    ] = {}
    """Batches that are dropped and not settled yet: numbers by reason. The worker need not keep their bytes."""
    closed: bool = False
    """The books of this incarnation are closed: its BYE or obituary has been taken."""
    final: bool = False
    """They are closed, a learner has taken the end, and Redis has them: the recorder is not needed any more."""
    steps_elsewhere: Natural = 0
    """As in the WELCOME, with the present value."""
    steps_share: Natural | None = None
    """As in the WELCOME, with the present value."""
    waiting_for: str = ""
    """Peer that a worker waits for without credit, or after a round's share: "", "learner", "broker", "worker 3"."""
    heartbeat_interval_s: Annotated[float, Field(gt=0, le=MOST_SILENCE_S)] | None = None
    """As in the WELCOME, with the present value; None: not told."""


class Skip(Message):
    """Worker to broker, in place of batch `seq`, which exists no more: it was poison, or the broker had dropped it."""

    KIND = MessageKind.SKIP
    TO = ("broker",)
    slot: Slot
    incarnation: Incarnation
    batch: HeldBatch
    reason: Reason
    totals: WorkerTotals
    """Totals at the moment when the batch was cut."""


class Heartbeat(Message):
    """Worker to broker: alive, with full cumulative state."""

    KIND = MessageKind.HEARTBEAT
    TO = ("broker",)
    LEFT_OUT = frozenset(
        (
            *("time_s", "envs_lost", "env_hosts", "env_host_versions", "serving", "ports", "env_error"),
            *("bytes_shipped", "waited_s", "window", "usage", "envs_usage", "tasks", "tasks_refused"),
        )
    )
    slot: Slot
    incarnation: Incarnation
    totals: WorkerTotals
    settled: Natural = 0
    weights: Version = (0, 0)
    blocked: Reason = ""
    round_steps: Natural = 0
    """Steps that it has shipped with `weights`."""
    refused: WeightsRefusal | None = None
    """The newest version that it could not load."""
    env_failures: Natural = 0
    """Failures of its envs in this life."""
    env_failure: Annotated[str, Field(max_length=MOST_SHORT_DETAIL)] = ""
    """The newest of them in words."""
    env_silence_s: float = Field(default=0.0, ge=0, le=MOST_SILENCE_S)
    """Seconds for which none of its envs has answered, while it waits for one."""
    env_call: Annotated[str, Field(max_length=MOST_SHORT_DETAIL)] = ""
    """The env call that has been in progress longest, in words; "" while envs answer."""
    counters: Counters = {}
    """Counters of its runner, all earlier lives of the slot included."""
    metrics: LoggedMetrics = {}
    """Metrics that callbacks have logged in this life: sums since its start, others over the newest values."""
    time_s: TimeByPart = {}
    """Seconds of this life so far, by the part of the work that took them."""
    envs_lost: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    """Envs that are down: they wait to be rebuilt, or for a host."""
    env_hosts: EnvHostCounts | None = None
    """Env hosts that are connected, and how many it takes for all envs; None where envs are not on hosts."""
    env_host_versions: EnvHostVersions = []
    serving: ServingFigures | None = None
    """None where no clients are served."""
    ports: Ports | None = None
    """Ports for env hosts and clients, which the broker publishes at the rendezvous; None where it serves none."""
    env_error: EnvErrorGroup | None = None
    """One group of failures of its envs, another in each heartbeat, with counts of this life."""
    bytes_shipped: Annotated[tuple[Bytes, Bytes], Strict(False)] | None = None
    """(bytes of arrays, bytes of messages) of the batches of this life. Compression makes the second smaller."""
    waited_s: WaitByReason = {}
    """Seconds of this life that it waited before it sampled on, as `blocked` says."""
    window: Annotated[tuple[Annotated[int, Field(ge=0, le=WINDOW)], Bytes], Strict(False)] | None = None
    """(batches, bytes in memory) in its window."""
    usage: Usage | None = None
    """The use of its process; None where the system does not tell."""
    envs_usage: Usage | None = None
    """The use of the processes of its envs, or its env hosts, together; None where it has none."""
    tasks: Version | None = None
    """The tasks that its next resets take; None: it has none."""
    tasks_refused: Annotated[str, Field(max_length=MOST_SHORT_DETAIL)] = ""
    """The tasks that its envs refuse, with the reasons, in words; "" if they take all."""


class LastWords(Message):
    """The state that one incarnation leaves behind: its totals, and each batch it cut and did not see settled by all.

    The broker counts those that it never accepted as lost, by `reason`: each is measured, none is inferred. An Ack with
    `closed` acknowledges the message; the sender repeats it until then.
    """

    slot: Slot
    incarnation: Incarnation
    totals: WorkerTotals
    settled: Settled
    groups: SettledByGroup = {}
    window: ListOf[HeldBatch] = []
    reason: Reason
    open_episodes: OpenEpisodes | None = None
    """Sent by earlier versions. The learner knows its open episodes itself."""


class Bye(LastWords):
    """Worker to broker: the worker leaves."""

    KIND = MessageKind.BYE
    TO = ("broker",)
    LEFT_OUT = frozenset(("env_errors",))
    reason: Reason = "shutdown"
    counters: Counters = {}
    """As in its last heartbeat, or newer."""
    metrics: LoggedMetrics = {}
    """As in its last heartbeat, or newer."""
    env_errors: Annotated[ListOf[EnvErrorGroup], Field(max_length=MOST_GROUPS + 1)] = []
    """All groups of failures of its envs."""


class SupervisorHello(Message):
    """Announces a supervisor that will report deaths. The broker does not answer it."""

    KIND = MessageKind.HELLO
    role: Literal["supervisor"] = "supervisor"
    fleet_id: ChosenName
    token: Token
    draining: bool = False
    """True once the fleet is being drained: its workers, wherever they were started, begin no further fragment."""


class Obituary(LastWords):
    """Supervisor to broker: this incarnation is dead. The fields are what its recorder holds."""

    KIND = MessageKind.OBITUARY
    TO = ("broker",)
    reason: Reason = "worker_killed"
