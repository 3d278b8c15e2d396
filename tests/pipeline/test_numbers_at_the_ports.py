"""Extreme numbers at a real broker: it keeps serving, and its run directory stays valid."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.broker.files.state_file import file_path, read_broker_file
from headrace.learner_stub import EpisodeStream
from headrace.learner_stub.link.connection import process_token
from headrace.schemas.accounts.ledger import Settled, WorkerTotals
from headrace.schemas.basics.bounds import MOST_EPOCH, MOST_LIVES
from headrace.schemas.errors import RunDirError
from headrace.schemas.frames.wire import MessageKind, encode
from headrace.schemas.messages import (
    Commit,
    Heartbeat,
    LearnerHello,
    LearnerWelcome,
    Message,
    Obituary,
    Reject,
    SourcePosition,
    SupervisorHello,
    WorkerHello,
    read,
)
from support.pipeline.delivery import (
    FLEET,
    BrokerThread,
    Envs,
    RawPeer,
    StartBroker,
    StartFeeder,
    batches_of,
    broker_process,
)
from support.waiting import wait_until

LARGE = (2**40 - 1, 2**53 - 1, 2**53, 2**63 - 1, 2**64 - 1)


def _with_large_numbers(message: Message) -> Iterator[list[Any]]:
    """The message with each of its numbers in turn at each large value, as frames."""

    def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        inside = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for name, value in inside:
            yield from places(value, (*path, name))
        if type(node) is int:
            yield path

    plain = orjson.dumps(message.model_dump())
    for *path, last in places(orjson.loads(plain)):
        for number in LARGE:
            header = node = orjson.loads(plain)
            for step in path:
                node = node[step]
            node[last] = number
            yield encode(message.KIND, header)


def _say_all(peer: RawPeer, introduction: Message, messages: list[Message]) -> None:
    """Say all of it on one connection, and wait until the broker has read the last."""
    peer.send(introduction.frames())
    for message in messages:
        for frames in _with_large_numbers(message):
            peer.send(frames)
    peer.send(encode(MessageKind.STATUS, {}))
    while "STATUS" not in (read(Reject, peer.receive_kind(MessageKind.REJECT).header).detail):
        pass


def test_no_extreme_number_stops_the_broker_or_damages_its_run_directory(
    tmp_path: Path, start_feeder: StartFeeder
) -> None:
    totals, settled = WorkerTotals(seq=1, stepped=1, shipped=1, shipped_chunks=1), Settled(seq=1, committed=(1, 1))
    place = SourcePosition(slot=0, incarnation=1, settled=settled)
    hello = WorkerHello(fleet_id=FLEET, token="x", slot=7, incarnation=1, totals=totals, settled=settled)
    learner = LearnerHello(token="x", channel="publisher", epoch=1, position=[place], held={})
    with broker_process(tmp_path) as process:
        before = read_broker_file(tmp_path)
        assert before is not None
        feeder = start_feeder(before.endpoints.worker, Envs(1).fragments(20), incarnation=1)
        with EpisodeStream(before.endpoints.learner) as stream:
            with RawPeer(before.endpoints.worker) as worker, RawPeer(before.endpoints.learner, "learner") as other:
                beat = Heartbeat(slot=7, incarnation=1, totals=totals, counters={"num_episodes_lifetime": 1})
                end = Obituary(slot=7, incarnation=1, totals=totals, settled=settled)
                _say_all(worker, SupervisorHello(fleet_id=FLEET, token="s"), [hello, beat, end])
                publisher = LearnerHello(token=process_token([before.endpoints.learner]), channel="publisher")
                _say_all(other, publisher, [learner, Commit(epoch=1, position=[place])])
            for _ in batches_of(stream, feeder.all_settled):
                pass
            assert stream.delivered == 20
        assert process.popen.poll() is None, process.log.read_text()
        after = read_broker_file(tmp_path)
    assert after is not None
    assert after.epoch < 100
    assert after.incarnations[0] == 1
    assert max(after.incarnations.values()) < 100
    assert "Traceback" not in process.log.read_text()
    with broker_process(tmp_path), EpisodeStream(before.endpoints.learner):
        again = start_feeder(before.endpoints.worker, Envs(2).fragments(1), incarnation=2)
        wait_until(lambda: again.session.accepted == 1, "the slot's next life to ship")


@pytest.mark.parametrize(
    "poison",
    [
        {"epoch": MOST_EPOCH + 1},
        {"incarnations": {"0": MOST_LIVES + 1}},
        {"incarnations": {str(2**63): 1}},
        {"owners": {"0": "../x"}},
    ],
)
def test_a_state_file_with_numbers_out_of_bounds_is_refused_as_damaged(
    poison: dict[str, Any], tmp_path: Path, start_broker: StartBroker
) -> None:
    start_broker().stop()
    file_path(tmp_path).write_bytes(orjson.dumps(orjson.loads(file_path(tmp_path).read_bytes()) | poison))
    with pytest.raises(RunDirError, match=r"broker\.json is damaged \(ValidationError\)"):
        start_broker()


def test_a_failing_handler_costs_one_message_and_the_broker_continues(
    broker: BrokerThread, start_feeder: StartFeeder, caplog: pytest.LogCaptureFixture
) -> None:
    """No message is known to do this: the handler of HELLOs of learners is made to fail for one."""
    learners = broker.broker.core.learners
    handle = learners.on_hello

    def fail(peer: bytes, hello: LearnerHello, spaces: dict[str, Any], now: float) -> None:
        if hello.token == "bad":
            raise OverflowError("int too big to convert")
        handle(peer, hello, spaces, now)

    learners.on_hello = fail  # type: ignore[method-assign]
    with RawPeer(broker.endpoints.learner) as peer:
        for token in ("bad", "bad", "good"):
            peer.send(LearnerHello(token=token, channel="publisher").frames())
        assert read(LearnerWelcome, peer.receive_kind(MessageKind.WELCOME).header).epoch == 1
    assert broker.ask(lambda asked: asked.core.refusals.total) == 2
    assert len([record for record in caplog.records if record.exc_info]) == 1
