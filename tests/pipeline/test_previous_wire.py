"""Peers of the previous minor wire version work with today's peers. A tape plays the side of the old peers."""

from __future__ import annotations

from contextlib import ExitStack

import golden_wire
import numpy as np
import orjson
import pytest
from jsonschema import Draft202012Validator

from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.frames.wire import PROTOCOL_MAJOR, PROTOCOL_MINOR, MessageKind, read_tag
from headrace.workers.fleet.session import SessionState
from support.pipeline.delivery import BrokerThread, Envs, Feeder, Witness, batches_of
from support.pipeline.tape import PEERS, Entry, OldBroker, OldPeers, Player, deaf, read_tape
from support.waiting import wait_until

FOLDER = golden_wire.folder_of(PROTOCOL_MAJOR, PROTOCOL_MINOR - 1)
TAPE = read_tape(FOLDER / "fleet.tape")
READERS = orjson.loads((FOLDER / "readers.json").read_bytes())["$defs"]
SENT = Envs(golden_wire.SEED).fragments(golden_wire.BATCHES)


def of(*peers: str) -> list[Entry]:
    return [entry for entry in TAPE if entry.peer in peers]


def check_as_old_reader(entry: Entry) -> None:
    """Today's peer says its version, and nothing that one of the previous version would refuse."""
    is_forwarded = entry.kind is MessageKind.BATCH and not entry.up
    assert read_tag(entry.frames[0])[1:3] == (PROTOCOL_MAJOR, PROTOCOL_MINOR - is_forwarded)
    name = {MessageKind.BATCH: "BatchHeader", MessageKind.WEIGHTS: "WeightsHeader"}.get(
        entry.kind, entry.kind.name.title().replace("_", "")
    )
    if entry.kind in (MessageKind.HELLO, MessageKind.WELCOME):
        name = ("Worker" if entry.peer == "worker" else "Learner") + name
    Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": READERS}).validate(entry.header)


@pytest.fixture
def old_broker(stack: ExitStack) -> OldBroker:
    """The ports of a broker of the previous version. `play` lets it speak."""
    broker = OldBroker()
    stack.callback(broker.close)
    return broker


def play(stack: ExitStack, old: OldBroker | OldPeers, tape: list[Entry]) -> Player:
    is_up = isinstance(old, OldPeers)
    return stack.enter_context(Player(tape, old.send, old.receive, check_as_old_reader, up=is_up))


def test_the_tape_is_of_the_previous_version() -> None:
    assert {read_tag(entry.frames[0])[1:3] for entry in TAPE} == {(PROTOCOL_MAJOR, PROTOCOL_MINOR - 1)}
    assert {entry.peer for entry in TAPE} == set(PEERS)


def test_an_old_worker_and_an_old_learner_work_with_todays_broker(broker: BrokerThread, stack: ExitStack) -> None:
    at = broker.endpoints
    peers = OldPeers({"worker": at.worker, "stream": at.learner, "publisher": at.learner})
    stack.callback(peers.close)
    play(stack, peers, TAPE).wait()
    (row,) = wait_until(lambda: [row for row in broker.rows().values() if row.end_taken], "the learner's last word")
    assert row.closed
    assert row.settled.committed == (sum(batch.steps for batch in SENT), sum(map(len, SENT)))


def test_todays_worker_works_with_an_old_broker(old_broker: OldBroker, stack: ExitStack) -> None:
    tape = play(stack, old_broker, of("worker"))
    feeder = stack.enter_context(deaf(Feeder(old_broker.worker, SENT)))
    wait_until(lambda: feeder.all_settled() and feeder.weights.newest == (1, 1), "the old broker's settlement, weights")
    feeder.leave()
    tape.wait()
    wait_until(lambda: feeder.session.state is SessionState.LEFT, "the worker's end")
    assert feeder.error is None


def test_todays_learner_works_with_an_old_broker(old_broker: OldBroker, stack: ExitStack) -> None:
    tape = play(stack, old_broker, of("stream", "publisher"))
    stream = stack.enter_context(EpisodeStream(old_broker.learner))
    publisher = stack.enter_context(WeightPublisher(old_broker.learner))
    publisher.publish({"w": np.arange(4, dtype=np.float32)})
    wait_until(lambda: publisher.pump() or publisher.acknowledged == (1, 1), "the old broker's word on the weights")
    witness = Witness()
    for batch in batches_of(stream, tape.finished.is_set):
        witness.see(batch)
    tape.wait()
    assert witness.steps == sum(batch.steps for batch in SENT)
    assert not witness.open_episodes()
