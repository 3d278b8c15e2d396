"""Control messages between workers, broker, learners and supervisors: all messages but BATCH (`batch.py`).

                 worker                      broker                      learner / publisher
    HELLO        ─────────────────────────────▶ ◀─────────────────────────── HELLO
    WELCOME      ◀───────────────────────────── ─────────────────────────────▶ WELCOME
    BATCH        ─────────────────────────────▶ ─────────────────────────────▶ BATCH (the same frames)
    ACK          ◀───────────────────────────── ◀─────────────────────────── COMMIT
    HEARTBEAT    ─────────────────────────────▶ ─────────────────────────────▶ STATUS
    WEIGHTS      ◀──────────── (PUB) ────────── ◀─────────────────────────── WEIGHTS, answered by WEIGHTS_ACK
    LEARNER_ROWS                               ◀─────────────────────────── rows that it logged, until stored
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
    Commit,
    LearnerFigures,
    LearnerHello,
    LearnerRow,
    LearnerRows,
    LearnerWelcome,
    SourceEnd,
    SourceGap,
    SourceStart,
    Status,
)
from headrace.schemas.messages.message_base import (
    Fenced,
    Message,
    ModuleShapes,
    Reject,
    SourcePosition,
    WeightsRefusal,
    messages_to,
    read,
    tellable_shapes,
)
from headrace.schemas.messages.weights_messages import WeightsAck, WeightsHeader, WeightsPart, WeightsPull
from headrace.schemas.messages.worker_messages import (
    Ack,
    Bye,
    Heartbeat,
    LastWords,
    Obituary,
    Skip,
    SupervisorHello,
    WorkerHello,
    WorkerWelcome,
)

__all__ = [
    "HELLO_BY_ROLE",
    "Ack",
    "Bye",
    "Commit",
    "Fenced",
    "Heartbeat",
    "LastWords",
    "LearnerFigures",
    "LearnerHello",
    "LearnerRow",
    "LearnerRows",
    "LearnerWelcome",
    "Message",
    "ModuleShapes",
    "Obituary",
    "Reject",
    "Skip",
    "SourceEnd",
    "SourceGap",
    "SourcePosition",
    "SourceStart",
    "Status",
    "SupervisorHello",
    "WeightsAck",
    "WeightsHeader",
    "WeightsPart",
    "WeightsPull",
    "WeightsRefusal",
    "WorkerHello",
    "WorkerWelcome",
    "messages_to",
    "read",
    "read_hello",
    "tellable_shapes",
]

HELLO_BY_ROLE: dict[str, type[Message]] = {
    "worker": WorkerHello,
    "learner": LearnerHello,
    "supervisor": SupervisorHello,
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
