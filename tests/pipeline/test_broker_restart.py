"""A broker that is killed and restarted on its port loses no batch that workers hold, and reuses no epoch or slot."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.broker.batches.limits import BrokerLimits, BrokerState
from headrace.broker.files.state_file import file_path, read_broker_file
from headrace.broker.sessions.core import BrokerCore
from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.ledger import Settled, WorkerTotals
from headrace.schemas.basics.bounds import MOST_EPOCH, MOST_LIVES
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.credentials.tokens import digest_of
from headrace.schemas.errors import FencedError, RunDirError
from headrace.schemas.messages import (
    Bye,
    Commit,
    Fenced,
    LearnerHello,
    LearnerWelcome,
    Obituary,
    SourceEnd,
    SourcePosition,
    SupervisorHello,
    WorkerHello,
    WorkerWelcome,
)
from support.pipeline.delivery import (
    Envs,
    Feeder,
    StartBroker,
    StartFeeder,
    Witness,
    ask_until_it_raises,
    batches_of,
    broker_process,
)
from support.waiting import TIMEOUT_S, wait_until


def paced(plan: list[ChunkBatch], every: int, gates: list[threading.Event]) -> Iterator[ChunkBatch | None]:
    """The plan, held up after each `every` batches until the next gate opens."""
    for number, batch in enumerate(plan):
        while number and number % every == 0 and not gates[number // every - 1].is_set():
            yield None
        yield batch


@pytest.mark.chaos
def test_every_batch_reaches_the_learner_exactly_once_through_three_broker_kills(
    stack: ExitStack, start_feeder: StartFeeder, tmp_path: Path
) -> None:
    plans = [Envs(seed, fails=0.0).fragments(80) for seed in (1, 2)]
    gates = [threading.Event() for _ in range(3)]
    broker = stack.enter_context(broker_process(tmp_path))
    endpoints = read_broker_file(tmp_path)
    assert endpoints is not None
    feeders: list[Feeder] = [
        start_feeder(endpoints.endpoints.worker, paced(plan, 20, gates), slot=slot) for slot, plan in enumerate(plans)
    ]
    witness = Witness()
    sequences: dict[int, list[int]] = {0: [], 1: []}
    stream = stack.enter_context(EpisodeStream(endpoints.endpoints.learner))

    def see_until(settled: int) -> None:
        def enough() -> bool:
            return all(feeder.session.settled.seq >= settled for feeder in feeders)

        for batch in batches_of(stream, enough):
            witness.see(batch)
            sequences[batch.slot].append(batch.seq)

    for round_number, gate in enumerate(gates, start=1):
        see_until(20 * round_number - 5)
        broker.signal(signal.SIGKILL)
        broker.wait()
        gate.set()
        broker = stack.enter_context(broker_process(tmp_path))
        again = read_broker_file(tmp_path)
        assert again is not None
        assert again.endpoints == endpoints.endpoints
    see_until(80)
    assert sequences == {0: list(range(1, 81)), 1: list(range(1, 81))}
    assert witness.steps == sum(batch.steps for plan in plans for batch in plan)
    assert not witness.markers
    assert not any(feeder.error for feeder in feeders)


def test_a_worker_sends_batches_again_that_the_stopped_broker_held(
    start_broker: StartBroker, start_feeder: StartFeeder
) -> None:
    """Only the stopped broker and the worker had the batches. The worker keeps a batch until it is settled."""
    first = start_broker()
    plan = Envs(3).fragments(10)
    feeder = start_feeder(first.endpoints.worker, plan)
    wait_until(lambda: feeder.session.accepted == 10, "ten accepted batches")
    first.stop()
    second, witness = start_broker(), Witness()
    with EpisodeStream(second.endpoints.learner) as stream:
        for batch in batches_of(stream, feeder.all_settled):
            witness.see(batch)
    assert witness.steps == sum(batch.steps for batch in plan)
    (row,) = second.rows().values()
    assert not list(row.problems())


def test_a_restarted_broker_does_not_resend_batches_that_the_learner_has(
    start_broker: StartBroker, start_feeder: StartFeeder
) -> None:
    first = start_broker()
    plan = Envs(4).fragments(10)
    feeder, witness = start_feeder(first.endpoints.worker, plan), Witness()
    with EpisodeStream(first.endpoints.learner, auto_commit=False) as stream:
        for _ in range(6):
            batch = stream.next(TIMEOUT_S)
            assert batch is not None
            witness.see(batch)
        first.stop()
        second = start_broker()

        def returned() -> bool:
            stream.pump(0.01)
            return (0, 1) in second.rows() and second.rows()[(0, 1)].held[1] > 0

        wait_until(returned, "the return of both")
        stream.commit()
        stream.auto_commit = True
        for batch in batches_of(stream, feeder.all_settled):
            witness.see(batch)
    assert witness.steps == sum(batch.steps for batch in plan)
    assert not list(second.rows()[(0, 1)].problems())


def test_a_restarted_broker_reports_the_end_of_a_replaced_worker_to_the_learner() -> None:
    """This happens when the supervisor is killed with its processes, and only the user's own learner survives."""
    settled = Settled(seq=3, committed=(30, 6))
    totals = WorkerTotals(seq=3, stepped=30, shipped=30, shipped_chunks=6)
    core = BrokerCore("fleet", BrokerLimits(), BrokerState(epoch=4, learner_token=digest_of("l"), incarnations={0: 1}))
    known = WorkerHello(fleet_id="fleet", token="old", slot=0, incarnation=1, totals=totals, settled=settled)
    core.receive(b"w1", known, 0.0)
    core.receive(b"w2", WorkerHello(fleet_id="fleet", token="new", slot=0, incarnation=2), 0.0)
    place = SourcePosition(slot=0, incarnation=1, settled=settled)
    core.receive(b"l1", LearnerHello(token="l", channel="stream", epoch=4, position=[place]), 1.0)
    supervisor = SupervisorHello(fleet_id="fleet", token="s")
    core.receive(b"s", supervisor, 1.0)
    words = Obituary(slot=0, incarnation=1, totals=totals, settled=settled, reason="worker_killed")
    core.receive(b"s", words, 1.0)
    core.tick(1.0)
    ends = [send.content for send in core.take_outbox() if isinstance(send.content, SourceEnd)]
    assert [(end.slot, end.incarnation) for end in ends] == [(0, 1)]


def test_a_learner_keeps_its_lease_when_its_publisher_rejoins_before_its_stream() -> None:
    """The broker was killed after it had welcomed the stream, and before it answered the publisher."""
    core = BrokerCore("fleet", BrokerLimits(), BrokerState(epoch=2, learner_token=digest_of("l")))
    core.receive(b"p", LearnerHello(token="l", channel="publisher"), 0.0)
    core.receive(b"s", Commit(epoch=2), 0.0)
    core.receive(b"s", LearnerHello(token="l", channel="stream", epoch=2), 0.0)
    told = [(send.peer, send.content) for send in core.take_outbox()]
    assert [peer for peer, content in told if isinstance(content, Fenced)] == []
    epochs = {peer: content.epoch for peer, content in told if isinstance(content, LearnerWelcome)}
    assert epochs == {b"p": 2, b"s": 2}


def test_the_old_learner_is_fenced_when_only_a_worker_knows_the_newer_epoch() -> None:
    core = BrokerCore("fleet", BrokerLimits(), BrokerState(epoch=2, learner_token=digest_of("old")))
    hello = WorkerHello(fleet_id="fleet", token="w", slot=0, incarnation=1, weights=(3, 5))
    core.receive(b"w", hello, 0.0)
    core.receive(b"new", LearnerHello(token="new", channel="stream", epoch=3), 0.0)
    core.receive(b"old", LearnerHello(token="old", channel="stream", epoch=2), 0.0)
    told = [(send.peer, send.content) for send in core.take_outbox()]
    assert [peer for peer, content in told if isinstance(content, LearnerWelcome)] == [b"new"]
    assert [peer for peer, content in told if isinstance(content, Fenced)] == [b"old"]


def test_an_epoch_is_never_given_out_twice(start_broker: StartBroker) -> None:
    first = start_broker()
    with EpisodeStream(first.endpoints.learner) as older:
        first.stop()
        second = start_broker()
        with EpisodeStream(second.endpoints.learner) as newer:
            assert newer.epoch > older.epoch
            with pytest.raises(FencedError):
                ask_until_it_raises(older)


def test_an_incarnation_is_never_given_out_twice(start_broker: StartBroker, start_feeder: StartFeeder) -> None:
    first = start_broker()
    feeder = start_feeder(first.endpoints.worker)
    wait_until(lambda: feeder.session.welcome, "a welcome")
    feeder.stop()
    first.stop()
    again = start_feeder(start_broker().endpoints.worker)
    wait_until(lambda: again.session.welcome, "a welcome")
    assert (feeder.session.incarnation, again.session.incarnation) == (1, 2)


def test_a_restarted_broker_keeps_a_slot_for_its_worker_until_the_lease_ends() -> None:
    """Two groups on other machines fought for the slot, each ending the other's worker."""

    def slots(*hellos: tuple[float, WorkerHello]) -> list[int]:
        core = BrokerCore("fleet", BrokerLimits(lease_s=10.0), BrokerState(incarnations={1000: 1}))
        core.tick(0.0)
        for at, hello in hellos:
            core.receive(hello.token.encode(), hello, at)
        return [send.content.slot for send in core.take_outbox() if isinstance(send.content, WorkerWelcome)]

    new, old = (
        WorkerHello(fleet_id="fleet", token="n"),
        WorkerHello(fleet_id="fleet", token="o", slot=1000, incarnation=1),
    )
    assert slots((1.0, new), (2.0, old)) == [1001, 1000]
    assert slots((11.0, new)) == [1000], "it did not come within its lease"
    left = Bye(slot=1000, incarnation=1, totals=WorkerTotals(), settled=Settled())
    core = BrokerCore("fleet", BrokerLimits(lease_s=10.0), BrokerState(incarnations={1000: 1}))
    core.tick(0.0)
    core.receive(b"o", old, 1.0)
    core.receive(b"o", left, 2.0)
    core.receive(b"n", new, 3.0)
    (_, last) = [send.content.slot for send in core.take_outbox() if isinstance(send.content, WorkerWelcome)]
    assert last == 1000, "its worker has left in order"


def test_a_damaged_state_file_gives_an_error_that_names_the_file(start_broker: StartBroker, tmp_path: Path) -> None:
    file_path(tmp_path).write_text("{")
    with pytest.raises(RunDirError, match=r"broker\.json is damaged"):
        start_broker()


def test_only_the_owner_can_read_the_state_file(start_broker: StartBroker, tmp_path: Path) -> None:
    start_broker()
    assert file_path(tmp_path).stat().st_mode & 0o777 == 0o600


def test_a_broker_that_cannot_write_its_state_serves_those_who_have_joined_and_lets_others_wait(
    start_broker: StartBroker, start_feeder: StartFeeder, tmp_path: Path
) -> None:
    broker = start_broker()
    plan = Envs(1, fails=0.0).fragments(4)
    with EpisodeStream(broker.endpoints.learner, connect_timeout_s=TIMEOUT_S) as stream:
        gate = threading.Event()
        start_feeder(broker.endpoints.worker, paced(plan, 2, [gate]))
        batches = iter(stream)
        seen = [next(batches), next(batches)]
        in_the_way = tmp_path / f".broker.json.{os.getpid()}"
        (in_the_way / "folder").mkdir(parents=True)
        start_feeder(broker.endpoints.worker, Envs(2, fails=0.0).fragments(1), slot=1)
        wait_until(lambda: broker.ask(lambda made: bool(made._held_back)), "the broker to hold a welcome back")
        gate.set()
        seen += [next(batches), next(batches)]
        assert [batch.slot for batch in seen] == [0, 0, 0, 0]
        known = read_broker_file(tmp_path)
        assert known is not None
        assert known.incarnations == {0: 1}
        shutil.rmtree(in_the_way)
        assert next(batches).slot == 1
        known = read_broker_file(tmp_path)
        assert known is not None
        assert known.incarnations == {0: 1, 1: 1}


@pytest.mark.parametrize(
    "poison",
    [
        {"epoch": MOST_EPOCH + 1},
        {"incarnations": {"0": MOST_LIVES + 1}},
        {"incarnations": {str(2**63): 1}},
    ],
)
def test_a_state_file_with_numbers_out_of_bounds_is_refused_as_damaged(
    poison: dict[str, Any], tmp_path: Path, start_broker: StartBroker
) -> None:
    start_broker().stop()
    file_path(tmp_path).write_bytes(orjson.dumps(orjson.loads(file_path(tmp_path).read_bytes()) | poison))
    with pytest.raises(RunDirError, match=r"broker\.json is damaged \(ValidationError\)"):
        start_broker()
