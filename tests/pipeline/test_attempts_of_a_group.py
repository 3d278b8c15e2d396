"""A stranger with the key of a worker or a supervisor tries to speak for workers that live, at a real broker.

The threat model has the table of these attempts and of the broker's answers, row by row.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from headrace.deploy.run.key_pairs import add_key, make_keys
from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.ledger import HeldBatch, Settled, WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch, encode_batch
from headrace.schemas.credentials.keys import ClientKeys, read_broker_keys, read_client_keys
from headrace.schemas.frames.wire import Buffer, MessageKind, decode_header
from headrace.schemas.messages import (
    Bye,
    Heartbeat,
    LearnerHello,
    Message,
    Obituary,
    Skip,
    SupervisorHello,
    WeightsPull,
    WorkerHello,
)
from headrace.schemas.peers import sockets
from support.pipeline.delivery import FLEET, BrokerThread, Envs, StartBroker, StartFeeder, batches_of
from support.waiting import TIMEOUT_S

GROUP, OTHER = "gpu", "cpu"
OWN_SLOT, OTHERS_SLOT = 0, 1000
"""The slot of the fleet's own worker, and of one of the other group."""
THREAT_MODEL = Path(__file__).parents[2] / "docs" / "internals" / "threat-model.md"
LIFE: dict[str, Any] = {"slot": OWN_SLOT, "incarnation": 1}
LAST: dict[str, Any] = LIFE | {"totals": WorkerTotals(), "settled": Settled(), "reason": "worker_killed"}


def joins(**told: Any) -> WorkerHello:
    return WorkerHello(**{"fleet_id": FLEET, "token": "stranger", **told})


def supervises(**told: Any) -> SupervisorHello:
    return SupervisorHello(**{"fleet_id": FLEET, "token": "stranger", **told})


def batch() -> list[Buffer]:
    cut = Envs().fragment()
    totals = WorkerTotals(seq=1, stepped=cut.steps, shipped=cut.steps, shipped_chunks=len(cut))
    header = BatchHeader(fleet_id=FLEET, **LIFE, seq=1, steps=cut.steps, chunks=len(cut), totals=totals)
    return encode_batch(cut, header)


SKIPPED = HeldBatch(seq=1, steps=1, chunks=1)


@dataclass(frozen=True)
class Attempt:
    """One row of the table: what a peer with a key of the group says at a port, and the broker's answers."""

    key: str
    tries: str
    says: Sequence[Message | list[Buffer]]
    happens: str
    port: str = "worker"


NOT_HEARD = "the handshake fails"
OWN = "the fleet's own slot"
ATTEMPTS = [
    Attempt("worker", f"join in {OWN} as its present life", [joins(**LIFE)], "`slot_taken`"),
    Attempt("worker", "join in no named slot", [joins()], "`welcome`"),
    Attempt("worker", f"send a batch of {OWN}", [batch()], "`unknown_peer`"),
    Attempt(
        "worker", f"send a batch of {OWN} from a slot that it has", [joins(), batch()], "`welcome`, then `unknown_peer`"
    ),
    Attempt("worker", f"send a heartbeat of {OWN}", [Heartbeat(**LIFE, totals=WorkerTotals())], "`unknown_peer`"),
    Attempt(
        "worker",
        f"leave out a batch of {OWN}",
        [Skip(**LIFE, batch=SKIPPED, reason="poison", totals=WorkerTotals(seq=1))],
        "`unknown_peer`",
    ),
    Attempt("worker", f"say BYE for {OWN}", [Bye(**LAST)], "`unknown_peer`"),
    Attempt("worker", f"report the death of {OWN}", [Obituary(**LAST)], "`unknown_peer`"),
    Attempt("worker", "pose as a supervisor", [supervises()], "`wrong_role`"),
    Attempt(
        "worker", "pose as a learner", [LearnerHello(fleet_id=FLEET, token="x", channel="stream")], "`wrong_endpoint`"
    ),
    Attempt("worker", "pull weights before it has joined", [WeightsPull(offset=0, length=1)], "`unknown_peer`"),
    Attempt("worker", "connect to the learners' port", [], NOT_HEARD, "learner"),
    Attempt("supervisor", "report a death without HELLO", [Obituary(**LAST)], "`unknown_peer`"),
    Attempt("supervisor", f"join in {OWN}", [joins(slot=OWN_SLOT, incarnation=2)], "`wrong_role`"),
    Attempt("supervisor", "connect to the learners' port", [], NOT_HEARD, "learner"),
    Attempt("supervisor", "listen at the weights' port", [], NOT_HEARD, "weights"),
]


def test_the_threat_model_has_a_row_for_each_attempt() -> None:
    page = THREAT_MODEL.read_text(encoding="utf-8")
    rows = re.findall(r"^\| a (\w+)'s key \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    assert rows == [(attempt.key, attempt.tries, attempt.happens) for attempt in ATTEMPTS]


def test_no_attempt_with_a_key_speaks_for_a_life_of_another(
    start_broker: StartBroker, start_feeder: StartFeeder, tmp_path: Path
) -> None:
    """All attempts, one after each batch of two honest workers, whose books stay exact."""
    folder, over = tmp_path / "keys", threading.Event()
    make_keys(folder)
    for role, group in (("worker", GROUP), ("supervisor", GROUP), ("worker", OTHER)):
        add_key(folder, role, group)
    broker = start_broker(keys=read_broker_keys(folder), workers=1)
    own, other = (
        start_feeder(broker.endpoints.worker, deliver(slot, over), slot=slot, keys=keys)
        for slot, keys in (
            (OWN_SLOT, read_client_keys(folder, "worker")),
            (OTHERS_SLOT, read_client_keys(folder, "worker", OTHER)),
        )
    )
    attempts, happened = iter(ATTEMPTS), []
    with EpisodeStream(broker.endpoints.learner, keys=folder, connect_timeout_s=TIMEOUT_S) as stream:
        for _ in batches_of(stream, lambda: own.all_settled() and other.all_settled()):
            if (attempt := next(attempts, None)) is None:
                over.set()
            else:
                keys = read_client_keys(folder, attempt.key, GROUP)
                happened.append((attempt.key, attempt.tries, happens(attempt, broker, keys)))
    assert happened == [(attempt.key, attempt.tries, attempt.happens) for attempt in ATTEMPTS]
    rows = broker.rows()
    for slot, feeder in ((OWN_SLOT, own), (OTHERS_SLOT, other)):
        assert feeder.error is None
        assert {key for key in rows if key[0] == slot} == {(slot, 1)}
        assert rows[slot, 1].settled.committed[0] == sum(feeder.steps.values()) > 0
    assert stream.delivered == len(own.steps) + len(other.steps)


def deliver(slot: int, over: threading.Event) -> Iterator[ChunkBatch]:
    envs = Envs(slot)
    while not over.is_set():
        yield envs.fragment()


def happens(attempt: Attempt, broker: BrokerThread, keys: ClientKeys) -> str:
    """Return the broker's answers to the messages of an attempt, which has a connection of its own."""
    context = zmq.Context()
    try:
        socket = context.socket(zmq.SUB if attempt.port == "weights" else zmq.DEALER)
        for name, value in (sockets.COMMON | keys.options()).items():
            socket.setsockopt(getattr(zmq, name), value)
        monitor = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.HANDSHAKE_FAILED_AUTH)
        socket.connect(getattr(broker.endpoints, attempt.port))
        assert monitor.poll(1000 * TIMEOUT_S), "no handshake"
        if zmq.Event(int.from_bytes(monitor.recv_multipart()[0][:2], "little")) == zmq.Event.HANDSHAKE_FAILED_AUTH:
            return NOT_HEARD
        elsewhere = {"worker": joins, "supervisor": supervises}[attempt.key](fleet_id="another")
        for message in (*attempt.says, elsewhere):
            socket.send_multipart(message if isinstance(message, list) else message.frames())
        answers: list[str] = []
        while "wrong_fleet" not in answers:  # that to the last message
            assert socket.poll(1000 * TIMEOUT_S), f"only {answers}"
            kind, header = decode_header(socket.recv_multipart())
            if kind in (MessageKind.REJECT, MessageKind.WELCOME):
                answers.append(header.get("code", "welcome"))
        return ", then ".join(f"`{answer}`" for answer in answers[:-1]) or "nothing"
    finally:
        context.destroy(linger=0)
