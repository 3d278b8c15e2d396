"""Control messages between workers, broker, learners and supervisors: all messages but BATCH (`batch.py`).

                 worker                      broker                      learner / publisher
    HELLO        ─────────────────────────────▶ ◀─────────────────────────── HELLO
    WELCOME      ◀───────────────────────────── ─────────────────────────────▶ WELCOME
    BATCH        ─────────────────────────────▶ ─────────────────────────────▶ BATCH (the same frames)
    ACK          ◀───────────────────────────── ◀─────────────────────────── COMMIT
    HEARTBEAT    ─────────────────────────────▶ ─────────────────────────────▶ STATUS
    WEIGHTS      ◀──────────── (PUB) ────────── ◀─────────────────────────── WEIGHTS, answered by WEIGHTS_ACK
    LEARNER_ROWS                               ◀─────────────────────────── rows that it logged, until stored
    TASKS        ◀───────────────────────────── ◀──────── (teacher) ──────── TASKS, answered by TASKS_ACK
    WEIGHTS_PULL ─────────────────────────────▶
    WEIGHTS_PART ◀─────────────────────────────
    SKIP         ─────────────────────────────▶ ─────────────────────────────▶ SOURCE_START, SOURCE_GAP
    BYE          ─────────────────────────────▶ ─────────────────────────────▶ SOURCE_END
    REJECT, FENCED ◀──────────────────────────  ─────────────────────────────▶
    OBITUARY     (supervisor) ────────────────▶ answered by ACK

Every ACK, WELCOME, HEARTBEAT, COMMIT and STATUS carries full cumulative state, so any of them may be lost. Unknown
fields are ignored: a newer minor version may add some, with defaults.
"""

from __future__ import annotations

from typing import Any

from headrace.schemas.errors import DecodeError
from headrace.schemas.messages.learner_messages import (
    Commit as Commit,
    GroupHello as GroupHello,
    LearnerFigures as LearnerFigures,
    LearnerHello as LearnerHello,
    LearnerRow as LearnerRow,
    LearnerRows as LearnerRows,
    LearnerWelcome as LearnerWelcome,
    RankHello as RankHello,
    Ranks as Ranks,
    SourceEnd as SourceEnd,
    SourceGap as SourceGap,
    SourceStart as SourceStart,
    Status as Status,
)
from headrace.schemas.messages.message_base import (
    Fenced as Fenced,
    Message as Message,
    ModuleKinds as ModuleKinds,
    ModuleShapes as ModuleShapes,
    Reject as Reject,
    SourcePosition as SourcePosition,
    WeightsRefusal as WeightsRefusal,
    kind_of as kind_of,
    messages_to as messages_to,
    read as read,
    tellable_shapes as tellable_shapes,
    tellable_weights as tellable_weights,
)
from headrace.schemas.messages.task_messages import (
    Tasks as Tasks,
    TasksAck as TasksAck,
    TeacherHello as TeacherHello,
    WeightedTask as WeightedTask,
)
from headrace.schemas.messages.weights_messages import (
    WeightsAck as WeightsAck,
    WeightsHeader as WeightsHeader,
    WeightsPart as WeightsPart,
    WeightsPull as WeightsPull,
)
from headrace.schemas.messages.worker_messages import (
    Ack as Ack,
    Bye as Bye,
    Heartbeat as Heartbeat,
    LastWords as LastWords,
    Obituary as Obituary,
    Skip as Skip,
    SupervisorHello as SupervisorHello,
    WorkerHello as WorkerHello,
    WorkerWelcome as WorkerWelcome,
)

HELLO_BY_ROLE: dict[str, type[Message]] = {
    "worker": WorkerHello,
    "learner": LearnerHello,
    "group": GroupHello,
    "rank": RankHello,
    "supervisor": SupervisorHello,
    "teacher": TeacherHello,
}


def read_hello(header: dict[str, Any]) -> Message:
    """Parse a HELLO of any role. Raises `DecodeError`."""
    role = header.get("role")
    if role == "env-host":
        where = "a worker's, sampling.env_hosts_port plus its slot (fleet.json has it as envs-SLOT)"
        raise DecodeError("bad_message", f"this is a port of the broker, and env hosts come to {where}")
    if not isinstance(role, str) or role not in HELLO_BY_ROLE:
        raise DecodeError("bad_message", f"HELLO of unknown role {role!r:.40}")
    return read(HELLO_BY_ROLE[role], header)
