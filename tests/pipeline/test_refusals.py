"""The broker refuses peers that it cannot serve, with a reason, and keeps serving all others."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.ledger import HeldBatch, Settled, WorkerTotals
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.errors import ExitCode, PortInUseError, RefusedError
from headrace.schemas.frames.wire import PROTOCOL_MINOR, MessageKind
from headrace.schemas.messages import (
    Bye,
    LearnerHello,
    LearnerRows,
    LearnerWelcome,
    Obituary,
    Reject,
    SupervisorHello,
    WorkerHello,
    WorkerWelcome,
    read,
)
from support.pipeline.delivery import (
    FLEET,
    SPACES,
    BrokerThread,
    Envs,
    RawPeer,
    StartBroker,
    StartFeeder,
    batches_of,
)
from support.waiting import TIMEOUT_S, wait_until


def hello(**fields: object) -> WorkerHello:
    return WorkerHello(**({"fleet_id": FLEET, "token": "t", "slot": 0} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ["worker", "learner"])
def test_a_peer_with_another_protocol_version_is_refused_with_both_versions(broker: BrokerThread, role: str) -> None:
    with RawPeer(getattr(broker.endpoints, role)) as peer:
        frames = hello().frames()
        peer.send([bytes(frames[0][:4]) + b"\x63" + bytes(frames[0][5:]), frames[1]])
        refused = read(Reject, peer.receive_kind(MessageKind.REJECT).header)
    assert (refused.code, refused.fatal) == ("version_mismatch", True)
    assert f"peer speaks protocol 99.{PROTOCOL_MINOR}, this side 1.x" in refused.detail


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


def test_an_obituary_from_a_peer_without_hello_is_refused_and_not_counted(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    frames = list(LearnerHello(token="x", channel="stream", epoch=3).frames())
    with RawPeer(broker.endpoints.worker) as peer:
        peer.send(Obituary(slot=5, incarnation=1, totals=WorkerTotals(), settled=Settled()).frames())
        refused = read(Reject, peer.receive().header)
        assert (refused.code, refused.fatal) == ("unknown_peer", False)
        peer.send([frames[0], frames[1][:-3]])
        assert read(Reject, peer.receive().header).code == "decode_error"
    assert (5, 1) not in broker.rows()


def test_a_message_at_the_port_of_another_role_is_refused_and_counted(broker: BrokerThread) -> None:
    with RawPeer(broker.endpoints.worker) as peer:
        peer.send(LearnerRows(epoch=1, rows=[]).frames())
        assert read(Reject, peer.receive().header).code == "unexpected_kind"
    assert broker.ask(lambda it: it.core.refusals.total) == 1


def test_a_worker_of_another_fleet_is_refused_by_name(broker: BrokerThread, start_feeder: StartFeeder) -> None:
    feeder = start_feeder(broker.endpoints.worker, fleet_id="other")
    wait_until(lambda: feeder.error, "a refusal")
    assert isinstance(feeder.error, RefusedError)
    assert feeder.error.exit_code is ExitCode.WRONG_FLEET
    assert "this broker serves fleet 'fleet', not 'other'" in str(feeder.error)


def test_a_supervisor_of_another_fleet_cannot_close_a_workers_books(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    """Its broker is gone and ours has the port now: the slots have the same names."""
    feeder = start_feeder(broker.endpoints.worker, Envs().fragments(2), incarnation=1)
    wait_until(lambda: feeder.session.accepted == 2, "two batches")
    with EpisodeStream(broker.endpoints.learner), RawPeer(broker.endpoints.worker) as peer:
        peer.send(SupervisorHello(fleet_id="other", token="s").frames())
        peer.send(Obituary(slot=0, incarnation=1, totals=WorkerTotals(), settled=Settled()).frames())
        assert read(Reject, peer.receive().header).code == "wrong_fleet"
        assert read(Reject, peer.receive().header).code == "unknown_peer"
    assert not broker.rows()[(0, 1)].closed
    assert feeder.error is None


def test_a_worker_with_other_spaces_is_refused_with_advice(broker: BrokerThread, start_feeder: StartFeeder) -> None:
    first = start_feeder(broker.endpoints.worker, slot=0)
    wait_until(lambda: first.session.welcome, "a welcome")
    other = Spaces(observation=Box(shape=(3,), dtype="<f4"), action=Discrete(n=2))
    feeder = start_feeder(broker.endpoints.worker, slot=1, spaces=other)
    wait_until(lambda: feeder.error, "a refusal")
    assert isinstance(feeder.error, RefusedError)
    assert feeder.error.code == "spaces_differ"
    assert "give every worker the same env" in str(feeder.error)


OTHER = Spaces(observation=Box(shape=(3,), dtype="<f4"), action=Discrete(n=2)).model_dump(mode="json")


def test_spaces_that_cannot_be_read_are_refused_and_do_not_bind_the_fleet(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    with RawPeer(broker.endpoints.worker) as peer:
        peer.send(hello(slot=7, spaces={"default_policy": {"observation": {"kind": "abyss"}}}).frames())
        refused = read(Reject, peer.receive_kind(MessageKind.REJECT).header)
        assert (refused.code, refused.fatal) == ("bad_space", True)
        assert "give this worker and its broker the same version of headrace" in refused.detail
    feeder = start_feeder(broker.endpoints.worker, slot=0)
    wait_until(lambda: feeder.session.welcome, "a welcome")
    assert broker.ask(lambda real: real.core.workers.spaces) == {"default_policy": SPACES.model_dump(mode="json")}


def join(peer: RawPeer) -> int:
    """Join as the worker in slot 7 with other spaces. Return its incarnation."""
    peer.send(hello(slot=7, spaces=OTHER).frames())
    return read(WorkerWelcome, peer.receive_kind(MessageKind.WELCOME).header).incarnation


def leave(broker: BrokerThread, peer: RawPeer, incarnation: int) -> None:
    """Have that worker leave, and wait until its books are closed."""
    peer.send(Bye(slot=7, incarnation=incarnation, totals=WorkerTotals(), settled=Settled(), reason="x").frames())
    wait_until(lambda: broker.rows()[(7, incarnation)].closed, "closed books")


def test_the_broker_drops_unused_spaces_when_the_worker_that_sent_them_leaves(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    with RawPeer(broker.endpoints.worker) as peer:
        incarnation = join(peer)
        refused = start_feeder(broker.endpoints.worker, slot=1)
        wait_until(lambda: refused.error, "a refusal while the first worker lives")
        leave(broker, peer, incarnation)
    feeder = start_feeder(broker.endpoints.worker, slot=0)
    wait_until(lambda: feeder.session.welcome, "a welcome")


def test_the_broker_keeps_spaces_that_a_learner_has_received(broker: BrokerThread, start_feeder: StartFeeder) -> None:
    """The learner's policy is built for these spaces, so it could read no batch of other spaces."""
    with EpisodeStream(broker.endpoints.learner) as stream, RawPeer(broker.endpoints.worker) as peer:
        incarnation = join(peer)
        assert stream.spaces(timeout_s=TIMEOUT_S).model_dump(mode="json") == OTHER
        leave(broker, peer, incarnation)
        feeder = start_feeder(broker.endpoints.worker, slot=0)
        wait_until(lambda: feeder.error, "a refusal")


def test_the_broker_keeps_the_spaces_of_a_waiting_batch(broker: BrokerThread, start_feeder: StartFeeder) -> None:
    first = start_feeder(broker.endpoints.worker, Envs().fragments(1), slot=0)
    wait_until(lambda: first.session.accepted == 1, "a batch")
    first.leave()
    wait_until(lambda: broker.rows()[(0, 1)].closed, "closed books")
    with RawPeer(broker.endpoints.worker) as peer:
        peer.send(hello(slot=7, spaces=OTHER).frames())
        assert read(Reject, peer.receive_kind(MessageKind.REJECT).header).code == "spaces_differ"


def test_a_worker_refused_for_its_spaces_leaves_no_live_row(broker: BrokerThread, start_feeder: StartFeeder) -> None:
    first = start_feeder(broker.endpoints.worker, slot=0)
    wait_until(lambda: first.session.welcome, "a welcome")
    with RawPeer(broker.endpoints.worker) as peer:  # a worker says HELLO, builds its envs, and says it again
        peer.send(hello(slot=7).frames())
        welcome = read(WorkerWelcome, peer.receive_kind(MessageKind.WELCOME).header)
        assert not broker.rows()[(7, welcome.incarnation)].closed
        peer.send(hello(slot=7, incarnation=welcome.incarnation, spaces=OTHER).frames())
        assert read(Reject, peer.receive_kind(MessageKind.REJECT).header).code == "spaces_differ"
    row = broker.rows()[(7, welcome.incarnation)]
    assert row.closed
    assert list(row.problems()) == []


def test_the_broker_gives_each_slot_and_incarnation_to_one_worker_only(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    first = start_feeder(broker.endpoints.worker, slot=0, incarnation=1)
    wait_until(lambda: first.session.welcome, "a welcome")
    second = start_feeder(broker.endpoints.worker, slot=0, incarnation=1)
    wait_until(lambda: second.error, "a refusal")
    assert isinstance(second.error, RefusedError)
    assert "slot 0 incarnation 1 already belongs to another process" in str(second.error)
    assert first.error is None


def test_repeated_hellos_of_a_worker_get_one_slot_and_incarnation(broker: BrokerThread) -> None:
    """A worker repeats its HELLO to a slow broker. The broker must not take it for its own successor."""
    for slot in (None, 7):
        with RawPeer(broker.endpoints.worker) as peer:
            for _ in range(3):
                peer.send(hello(slot=slot, token=f"slow{slot}").frames())
            places = set()
            for _ in range(3):
                welcome = read(WorkerWelcome, peer.receive_kind(MessageKind.WELCOME).header)
                places.add((welcome.slot, welcome.incarnation))
            assert len(places) == 1


def test_an_older_incarnation_is_fenced(broker: BrokerThread, start_feeder: StartFeeder) -> None:
    older = start_feeder(broker.endpoints.worker, Envs(1).fragments(1), incarnation=1)
    wait_until(lambda: older.session.accepted, "a batch")
    start_feeder(broker.endpoints.worker, incarnation=2)
    wait_until(lambda: older.error, "a fencing")
    assert older.error is not None
    assert older.error.exit_code is ExitCode.FENCED
    with RawPeer(broker.endpoints.worker) as peer:
        peer.send(hello(incarnation=1).frames())
        peer.receive_kind(MessageKind.FENCED)


def test_a_port_in_use_gives_an_error_that_names_it(
    start_broker: StartBroker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    broker = start_broker(allow_insecure=True)
    port = int(broker.endpoints.worker.rpartition(":")[2])
    with pytest.raises(PortInUseError, match=f":{port} is already in use"):
        start_broker(tmp_path_factory.mktemp("other"), port=port)


def test_spaces_reach_a_learner_that_started_before_the_worker(broker: BrokerThread, start_feeder: StartFeeder) -> None:
    with EpisodeStream(broker.endpoints.learner) as stream:
        start_feeder(broker.endpoints.worker)
        assert stream.spaces(timeout_s=TIMEOUT_S) == SPACES


def test_steps_that_a_fenced_worker_still_held_are_counted_as_fenced(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    older = start_feeder(broker.endpoints.worker, Envs(1).fragments(2), incarnation=1)
    wait_until(lambda: older.session.accepted == 2, "two batches")
    start_feeder(broker.endpoints.worker, incarnation=2)
    wait_until(lambda: older.error, "a fencing")
    late = HeldBatch(seq=3, steps=9, chunks=2)
    t = older.totals
    totals = t.model_copy(
        update={"seq": 3, "stepped": t.stepped + 9, "shipped": t.shipped + 9, "shipped_chunks": t.shipped_chunks + 2}
    )
    with EpisodeStream(broker.endpoints.learner), RawPeer(broker.endpoints.worker) as peer:
        peer.send(SupervisorHello(fleet_id=FLEET, token="s").frames())
        words = Obituary(slot=0, incarnation=1, totals=totals, settled=Settled(), window=[late], reason="fenced")
        peer.send(words.frames())
        wait_until(lambda: broker.rows()[(0, 1)].closed, "closed books")
    row = broker.rows()[(0, 1)]
    assert row.lost == {"fenced": (9, 2)}
    assert not list(row.problems())


def test_a_hello_at_the_other_roles_port_is_refused_with_the_right_endpoint(broker: BrokerThread) -> None:
    learner = LearnerHello(token="l", channel="stream")
    for at, right, message in (("learner", "worker", hello()), ("worker", "learner", learner)):
        with RawPeer(getattr(broker.endpoints, at)) as peer:
            peer.send(message.frames())
            refused = read(Reject, peer.receive_kind(MessageKind.REJECT).header)
        assert (refused.code, refused.fatal) == ("wrong_endpoint", True)
        assert getattr(broker.endpoints, right) in refused.detail


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
def test_a_broker_serves_at_an_ipv6_address(start_broker: StartBroker, start_feeder: StartFeeder) -> None:
    broker = start_broker(host="::1", allow_insecure=True)
    assert "[::1]" in broker.endpoints.learner
    feeder = start_feeder(broker.endpoints.worker, Envs(1).fragments(5))
    with EpisodeStream(broker.endpoints.learner) as stream:
        assert sum(1 for _ in batches_of(stream, feeder.all_settled)) == 5
