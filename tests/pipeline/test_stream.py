"""The learner's stream over real sockets: exactly once, in order, settled when it was handed out, and its errors."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.learner_stub.link.broker_link import BrokerLink
from headrace.learner_stub.streaming import broker_stream, stall_detector
from headrace.learner_stub.streaming import stream as stream_module
from headrace.learner_stub.streaming.ready_batches import ReadyBatches
from headrace.learner_stub.streaming.session import LearnerSession, StreamLimits
from headrace.schemas.accounts.ledger import WorkerTotals, add_up
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.errors import ExitCode, FencedError, RefusedError, UnreachableError, WindowStalledError
from headrace.schemas.frames.wire import Buffer
from headrace.schemas.messages import Obituary, SupervisorHello, WorkerHello
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.peers.rendezvous import Published
from support.pipeline.delivery import (
    FLEET,
    SPACES,
    BrokerThread,
    Envs,
    RawPeer,
    StartBroker,
    StartFeeder,
    Witness,
    ask_until_it_raises,
    batches_of,
    script_process,
)
from support.ports import free_port
from support.waiting import TIMEOUT_S, wait_until

OpenStream = Callable[..., EpisodeStream]


@pytest.fixture
def open_stream(stack: ExitStack, broker: BrokerThread) -> OpenStream:
    """`open_stream(...)`: a stream from the broker."""
    return lambda **settings: stack.enter_context(
        EpisodeStream(broker.endpoints.learner, connect_timeout_s=TIMEOUT_S, **settings)
    )


def flip(at: int) -> Callable[[int, list[Buffer]], list[Buffer]]:
    """Damages the payload of batch `at` on its way."""

    def alter(seq: int, frames: list[Buffer]) -> list[Buffer]:
        if seq == at:
            damaged = bytearray(frames[2])
            damaged[7] ^= 1
            frames[2] = bytes(damaged)
        return frames

    return alter


def test_a_stream_ends_with_a_fleet_at_its_goal_before_its_broker_counts_as_silent(
    broker: BrokerThread, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_stream, "_QUIET_S", 0.0)
    published = Published(fleet_id="fleet", endpoints=broker.endpoints.model_dump())
    published.write(tmp_path / "meet.json")
    stream = stack.enter_context(EpisodeStream.of(tmp_path / "meet.json", connect_timeout_s=TIMEOUT_S))
    stream.pump(0.1)
    assert not stream.ended
    broker.stop()
    published.model_copy(update={"state": "stopped", "at_goal": True}).write(tmp_path / "meet.json")
    wait_until(lambda: (stream.pump(0.05), stream.ended)[1], "the end")
    assert stream._brokers[0].is_active, "it need not wait for the silence of a broker that may come back"
    assert list(stream) == []


def test_every_batch_is_handed_out_once_and_settled(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder
) -> None:
    batches = Envs(1).fragments(40)
    feeder, stream, witness = start_feeder(broker.endpoints.worker, batches), open_stream(), Witness()
    for batch in batches_of(stream, feeder.all_settled):
        witness.see(batch)
    assert witness.steps == sum(batch.steps for batch in batches)
    assert (stream.delivered, stream.redelivered, stream.pending) == (40, 0, 0)
    assert stream.spaces() == SPACES
    row = broker.rows()[(0, 1)]
    assert not list(row.problems())
    assert row.settled.committed[0] == witness.steps
    assert row.held == (0, 0)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ReadyBatches, "open"),
        (LearnerSession, "settle"),
        (stream_module, "await_message"),
    ],
)
def test_after_ctrl_c_in_a_call_a_stream_goes_on_with_each_batch_once(
    kind: Any,
    name: str,
    broker: BrokerThread,
    open_stream: OpenStream,
    start_feeder: StartFeeder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a notebook. Ctrl-C comes before the third call."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    calls, heard, witness = 0, 0, Witness()
    own = getattr(kind, name)

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            signal.raise_signal(signal.SIGINT)
        return own(*arguments, **named)

    try:
        stream = open_stream()
        monkeypatch.setattr(kind, name, interrupted)
        feeder = start_feeder(broker.endpoints.worker, Envs(1).fragments(20))
        deadline = time.monotonic() + TIMEOUT_S
        while not feeder.all_settled() and time.monotonic() < deadline:
            batch = None
            try:
                batch = stream.next(0.2)
                if calls >= 3 and not heard:
                    time.sleep(TIMEOUT_S)
            except KeyboardInterrupt:
                heard += 1
            if batch is not None:
                witness.see(batch)
        assert feeder.all_settled(), "a batch was lost"
    finally:
        signal.signal(signal.SIGINT, before)
    row = broker.rows()[(0, 1)]
    assert heard == 1
    assert row.settled.committed[0] == witness.steps == sum(feeder.steps.values())


def test_ctrl_c_in_a_commit_comes_after_the_commit_was_sent(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, own = signal.signal(signal.SIGINT, signal.default_int_handler), LearnerSession.commit
    sent = list[int]()

    def interrupted(session: LearnerSession, now: float, *, at_once: bool = True) -> None:
        signal.raise_signal(signal.SIGINT)
        own(session, now, at_once=at_once)
        sent.append(session.consumed_batches)

    start_feeder(broker.endpoints.worker, Envs(1).fragments(1))
    stream = open_stream(auto_commit=False)
    try:
        assert stream.next(TIMEOUT_S) is not None
        monkeypatch.setattr(LearnerSession, "commit", interrupted)
        stream.commit()
        with pytest.raises(KeyboardInterrupt):  # it comes a moment later
            time.sleep(TIMEOUT_S)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sent == [1]


def test_ctrl_c_ends_a_call_that_waits(broker: BrokerThread, open_stream: OpenStream) -> None:
    stream = open_stream()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        own = threading.get_ident()
        threading.Timer(0.2, signal.pthread_kill, (own, signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt) as raised:
            stream.next(TIMEOUT_S)
        assert time.monotonic() - began < TIMEOUT_S / 2
        assert raised.value.__context__ is None
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_round_comes_whole_also_where_it_is_larger_than_the_window(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder
) -> None:
    stream = open_stream(auto_commit=False, window_batches=2)
    feeder, witness = start_feeder(broker.endpoints.worker, Envs(3).fragments(14)), Witness()
    for _ in range(2):
        batches = stream.round_of(7, TIMEOUT_S)
        assert len(batches) == 7
        stream.commit()
        for batch in batches:
            witness.see(batch)
    assert witness.steps == sum(feeder.steps.values())
    assert stream.round_of(1, 0.1) == []


def test_an_incomplete_round_is_neither_handed_out_nor_in_the_position(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder
) -> None:
    stream = open_stream(auto_commit=False)
    start_feeder(broker.endpoints.worker, Envs(3).fragments(5))
    first = stream.round_of(3, TIMEOUT_S)
    place = stream.position()
    assert stream.round_of(3, 0.3) == []
    assert stream.position() == place
    assert [batch.seq for batch in first] == [1, 2, 3]
    assert [batch.seq for batch in stream.round_of(2, TIMEOUT_S)] == [4, 5]


@pytest.mark.parametrize("at", [2, 3])
def test_a_damaged_batch_in_a_round_is_replaced_and_settles_in_its_turn(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder, at: int
) -> None:
    stream = open_stream(auto_commit=False)
    feeder = start_feeder(broker.endpoints.worker, Envs(3).fragments(9), alter=flip(at))
    while not stream.dropped["poison"]:
        assert stream.round_of(3, TIMEOUT_S)
    wait_until(lambda: (stream.next(0.05), stream.commit(), feeder.all_settled())[-1], "the settlement")


def test_a_lag_of_commits_keeps_the_newest_batches_unsettled(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder
) -> None:
    stream = open_stream(commit_lag=2)
    feeder = start_feeder(broker.endpoints.worker, Envs(3).fragments(6))
    for _ in range(6):
        assert stream.next(TIMEOUT_S) is not None
    assert stream.next(0.5) is None
    assert feeder.session.settled.seq == 4
    stream.commit()
    wait_until(lambda: (stream.pump(0.01), feeder.all_settled())[-1], "the settlement")


def test_the_iterator_settles_a_batch_when_the_next_is_asked_for(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder
) -> None:
    feeder = start_feeder(broker.endpoints.worker, Envs().fragments(3))
    stream = open_stream()

    def settled() -> int:
        stream.pump()  # commits of an iterator are gathered for a moment
        return feeder.session.settled.seq

    for number, _ in enumerate(stream):
        wait_until(lambda n=number: settled() == n, f"{number} settled batches")  # type: ignore[misc]
        if number == 2:
            break


def test_a_batch_that_came_while_the_user_trained_is_not_held_up_until_another_comes(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker ships each batch after the commit of the one before, so no other comes."""
    start_feeder(broker.endpoints.worker, Envs().fragments(20), window=1)
    stream, waits, wait = open_stream(auto_commit=False), list[float](), stream_module.await_message

    def noted(links: Sequence[BrokerLink], wait_s: float, lock: AbstractContextManager[object]) -> None:
        if stream.pending:
            waits.append(wait_s)
        wait(links, wait_s, lock)

    monkeypatch.setattr(stream_module, "await_message", noted)
    for _ in range(20):
        assert stream._brokers[0].link.socket.poll(int(TIMEOUT_S * 1000)), "it is there before it is asked for"
        assert stream.next(TIMEOUT_S) is not None
        stream.commit()
    assert 0 < max(waits) <= StreamLimits().gather_s


def test_nothing_is_settled_before_commit(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder
) -> None:
    feeder = start_feeder(broker.endpoints.worker, Envs().fragments(6))
    stream = open_stream(auto_commit=False)
    for _ in range(4):
        assert stream.next(TIMEOUT_S) is not None
    assert feeder.session.settled.seq == 0
    stream.commit()
    wait_until(lambda: feeder.session.settled.seq == 4, "four settled batches")


def test_one_thread_reads_while_others_publish_and_commit(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder, publisher: WeightPublisher
) -> None:
    batches = Envs(2).fragments(400)
    feeder, stream, witness = start_feeder(broker.endpoints.worker, batches), open_stream(auto_commit=False), Witness()
    is_read, errors = threading.Event(), list[BaseException]()

    def again_and_again(use: Callable[[], object]) -> None:
        try:
            while not is_read.is_set():
                use()
        except BaseException as error:
            errors.append(error)
            raise

    uses = [
        lambda: publisher.publish({"w": torch.ones(1000)}),
        lambda: publisher.log({"loss": 1.0}),
        lambda: (stream.commit(), stream.position(), time.sleep(0.001)),
    ]
    threads = [threading.Thread(target=again_and_again, args=(use,)) for use in uses]
    for thread in threads:
        thread.start()
    try:
        for _ in batches:
            batch = stream.next(TIMEOUT_S)
            assert batch is not None, errors
            witness.see(batch)
    finally:
        is_read.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert not errors
    stream.commit()
    wait_until(feeder.all_settled, "the settlement of all batches")
    assert witness.steps == sum(batch.steps for batch in batches)
    wait_until(lambda: bool(publisher.pump() or publisher.acknowledged[1] == publisher.seq), "the newest weights")


def test_the_next_learner_gets_the_uncommitted_batches_again(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder
) -> None:
    batches = Envs(2, fails=0.0).fragments(10)
    feeder, witness = start_feeder(broker.endpoints.worker, batches), Witness()
    first = open_stream(auto_commit=False)
    for number in range(6):
        batch = first.next(TIMEOUT_S)
        assert batch is not None
        if number < 3:
            witness.see(batch)
            first.commit()
    wait_until(lambda: feeder.session.settled.seq == 3, "the broker to have every commit of the first learner")
    first.close()
    second = open_stream()
    for batch in batches_of(second, feeder.all_settled):
        witness.see(batch)
    assert witness.steps == sum(batch.steps for batch in batches)


def test_a_position_in_the_checkpoint_gives_exactly_once_training(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder
) -> None:
    """The process dies between its checkpoint and the commit: the broker has those batches still, the learner not."""
    batches = Envs(3, fails=0.0).fragments(12)
    feeder, witness = start_feeder(broker.endpoints.worker, batches), Witness()
    first = open_stream(auto_commit=False)
    for _ in range(5):
        batch = first.next(TIMEOUT_S)
        assert batch is not None
        witness.see(batch)
    checkpoint = first.position()
    first.next(TIMEOUT_S)
    first.close()
    second = open_stream(position=checkpoint)
    for batch in batches_of(second, feeder.all_settled):
        witness.see(batch)
    assert witness.steps == sum(batch.steps for batch in batches)
    assert not list(broker.rows()[(0, 1)].problems())


def test_a_stream_says_that_steps_were_committed_after_its_position(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder, caplog: pytest.LogCaptureFixture
) -> None:
    """An earlier learner that lived on committed them, after this one had read the checkpoint."""
    batches = Envs(3, fails=0.0).fragments(12)
    start_feeder(broker.endpoints.worker, batches)
    first = open_stream(auto_commit=False)
    assert first.round_of(2, TIMEOUT_S)
    behind = first.position()
    assert first.round_of(3, TIMEOUT_S)
    first.commit()
    newest = first.position()
    for position in (newest, None):  # nothing is missed, and a learner without a position begins anew
        second = open_stream(position=position, auto_commit=False)
        assert second.next(TIMEOUT_S) is not None
        second.close()
    assert "older position" not in caplog.text
    third = open_stream(position=behind, auto_commit=False)
    while (batch := third.next(TIMEOUT_S)) is not None and not batch.steps:  # markers of the hole
        pass
    assert batch is not None
    missed = sum(batch.steps for batch in batches[2:5])
    assert f"goes on from an older position: {missed} steps or more were committed after it" in caplog.text


def test_a_batch_behind_a_marker_is_not_settled_before_it_is_handed_out(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder
) -> None:
    """After a gap one batch may become two; asking for the second must not settle it."""
    batches = Envs(width=1, ends=0.0, fails=0.0).fragments(2) + Envs(7, width=1, ends=0.0, fails=0.0).fragments(1)
    feeder = start_feeder(broker.endpoints.worker, batches, alter=flip(2))
    stream = open_stream()
    assert stream.next(TIMEOUT_S) is not None
    markers = stream.next(TIMEOUT_S)
    assert markers is not None
    assert [chunk.end_reason for chunk in markers] == ["poison"]
    stream.commit()
    wait_until(lambda: feeder.session.settled.seq == 2, "the settlement of what is missing")
    assert stream.position()[0]["settled"]["seq"] == 2
    last = stream.next(TIMEOUT_S)
    assert last is not None
    assert last[0].chunk_index == 0
    assert stream.position()[0]["settled"]["seq"] == 3
    stream.next(0.3)
    wait_until(lambda: feeder.session.settled.seq == 3, "the settlement of the last")


def test_a_damaged_payload_is_counted_and_its_episodes_are_ended(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder
) -> None:
    batches = Envs(4).fragments(12)
    feeder = start_feeder(broker.endpoints.worker, batches, alter=flip(5))
    stream, witness = open_stream(), Witness()
    for batch in batches_of(stream, feeder.all_settled):
        witness.see(batch)
    assert stream.dropped["poison"] == feeder.steps[5]
    assert witness.steps + sum(stream.dropped.values()) == sum(batch.steps for batch in batches)
    assert "poison" in witness.markers.values()
    row = broker.rows()[(0, 1)]
    assert not list(row.problems())
    assert row.settled.dropped["poison"][0] == feeder.steps[5]
    assert add_up(broker.rows()).balance() == 0


def test_a_batch_with_a_damaged_header_is_dropped_as_poison(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder
) -> None:
    def alter(seq: int, frames: list[Buffer]) -> list[Buffer]:
        return [frames[0], bytes(frames[1])[:-1] + b" ", *frames[2:]] if seq == 2 else frames

    feeder = start_feeder(broker.endpoints.worker, Envs(4).fragments(4), alter=alter)
    stream, witness = open_stream(), Witness()
    for batch in batches_of(stream, feeder.all_settled):
        witness.see(batch)
    assert stream.dropped["poison"] == feeder.steps[2]
    assert not list(broker.rows()[(0, 1)].problems())


def test_the_newer_learner_wins_and_the_older_is_fenced(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder
) -> None:
    feeder, witness = start_feeder(broker.endpoints.worker, Envs(5).fragments(20)), Witness()
    older = open_stream()
    assert older.next(TIMEOUT_S) is not None
    newer = open_stream()
    assert newer.epoch > older.epoch
    with pytest.raises(FencedError) as raised:
        ask_until_it_raises(older)
    assert raised.value.exit_code is ExitCode.FENCED
    for batch in batches_of(newer, feeder.all_settled):
        witness.see(batch)
    assert witness.steps > 0


def test_a_stream_of_another_fleet_is_refused_with_both_names(open_stream: OpenStream) -> None:
    with pytest.raises(RefusedError, match="'fleet', not 'other'"):
        open_stream(fleet_id="other")


def test_a_missing_broker_raises_an_error_within_the_timeout(free_port: int) -> None:
    with pytest.raises(UnreachableError, match=f"{free_port} after 0.3 s"):
        EpisodeStream(f"tcp://127.0.0.1:{free_port}", connect_timeout_s=0.3)


def test_a_learner_without_a_connection_repeats_hello_and_does_not_spin() -> None:
    session, now, hellos = LearnerSession("l", StreamLimits()), 0.0, 0
    while now < 1.0:
        session.tick(now)
        hellos += len(session.take_outbox())
        session.not_sent(now)
        assert session.idle_s(now) > 0, "its caller would not wait at all"
        now += session.idle_s(now)
    assert 10 < hellos < 100


def test_a_learner_that_waits_without_committing_gets_a_stall_error(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_detector, "STALLED_S", 0.5)
    start_feeder(broker.endpoints.worker, Envs().fragments(9), window=3)
    stream = open_stream(auto_commit=False)
    with pytest.raises(WindowStalledError, match="3 uncommitted") as raised:
        ask_until_it_raises(stream)
    assert raised.value.uncommitted == 3


def test_a_worker_that_died_before_sending_spaces_does_not_disturb_the_learner(
    broker: BrokerThread, open_stream: OpenStream
) -> None:
    stream = open_stream()
    with RawPeer(broker.endpoints.worker) as peer:
        peer.send(WorkerHello(fleet_id=FLEET, token="t", slot=0, incarnation=1).frames())
        peer.receive()
        peer.send(SupervisorHello(fleet_id=FLEET, token="s").frames())
        peer.send(Obituary(slot=0, incarnation=1, totals=WorkerTotals(), settled={}).frames())  # type: ignore[arg-type]
        wait_until(lambda: (0, 1) in broker.rows() and broker.rows()[(0, 1)].closed, "closed books")
        assert stream.next(0.5) is None


def test_open_episodes_of_a_worker_that_left_are_aborted(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder
) -> None:
    feeder = start_feeder(broker.endpoints.worker, Envs(width=2, ends=0.0, fails=0.0).fragments(3))
    stream, witness = open_stream(), Witness()
    wait_until(feeder.all_shipped, "shipping")
    feeder.leave("worker_killed")
    for batch in batches_of(stream, lambda: len(witness.markers) == 2):
        witness.see(batch)
    assert set(witness.markers.values()) == {"worker_killed"}


def test_prefetched_batches_survive_a_long_training_step(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder
) -> None:
    """Messages that came while the user trained are taken before silence is judged: no HELLO, nothing sent twice."""
    feeder = start_feeder(broker.endpoints.worker, Envs(6).fragments(12))
    stream, witness = open_stream(), Witness()
    first = stream.next(TIMEOUT_S)
    assert first is not None
    witness.see(first)
    wait_until(lambda: broker.ask(lambda b: b.core.store.sent_and_unsettled()) == 12, "all sent ahead")
    stream._brokers[0].session._heard -= 60.0
    for batch in batches_of(stream, feeder.all_settled):
        witness.see(batch)
    assert stream.redelivered == 0
    assert stream.delivered == 12


def test_a_second_stream_of_the_same_process_is_a_newer_learner(open_stream: OpenStream) -> None:
    first, second = open_stream(), open_stream()
    assert first.token != second.token
    with pytest.raises(FencedError):
        ask_until_it_raises(first)
    assert second.next(0.1) is None


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_later_stream_of_the_process_ends_the_older_one_and_its_publisher_at_once(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder, *, is_closed: bool
) -> None:
    """Not after all that the older one has received, and with a sentence that names the later stream."""
    start_feeder(broker.endpoints.worker, Envs(5).fragments(20))
    older = open_stream()
    with WeightPublisher(broker.endpoints.learner) as publisher:
        assert older.next(TIMEOUT_S) is not None
        if is_closed:
            older.close()
        later = open_stream()
        calls = [lambda: publisher.publish({"w": torch.zeros(1)}), publisher.pump]
        for call in calls if is_closed else [*calls, lambda: older.next(0.0), older.pump]:
            with pytest.raises(FencedError, match="a later EpisodeStream of this process has taken over"):
                call()
        assert later.next(TIMEOUT_S) is not None
        with WeightPublisher(broker.endpoints.learner) as again:
            assert again.publish({"w": torch.zeros(1)}) == 1


def test_a_later_stream_that_cannot_open_leaves_the_older_one_alone(open_stream: OpenStream) -> None:
    older = open_stream()
    with pytest.raises(RefusedError, match="'fleet', not 'other'"):
        open_stream(fleet_id="other")
    assert older.next(0.0) is None


_LEARNER = """
import sys
from headrace.learner_stub import EpisodeStream
from headrace.learner_stub.streaming.session import LearnerSession, StreamLimits
with EpisodeStream(sys.argv[1]) as stream:
    for batch in stream:
        print(batch.seq, flush=True)
"""


@pytest.mark.chaos
def test_a_killed_learner_process_loses_nothing(
    broker: BrokerThread, open_stream: OpenStream, start_feeder: StartFeeder, tmp_path: Path
) -> None:
    gate = threading.Event()

    def paced() -> Iterator[ChunkBatch | None]:
        for number, batch in enumerate(Envs(8).fragments(60)):
            while number == 30 and not gate.is_set():
                yield None
            yield batch

    feeder = start_feeder(broker.endpoints.worker, paced())
    with script_process(_LEARNER, broker.endpoints.learner, log=tmp_path / "learner.log") as learner:
        wait_until(lambda: feeder.session.settled.seq >= 10, "ten settled batches")
        learner.signal(signal.SIGKILL)
        assert learner.wait() == -signal.SIGKILL
    gate.set()
    stream = open_stream()
    seen = [batch.seq for batch in batches_of(stream, feeder.all_settled) if batch.seq]
    assert seen == list(range(seen[0], 61))
    assert seen[0] > 10
    assert not list(broker.rows()[(0, 1)].problems())


def test_a_broker_restart_in_the_same_run_dir_keeps_its_ports(start_broker: StartBroker) -> None:
    first = start_broker()
    first.stop()
    assert start_broker().endpoints == first.endpoints


def test_a_position_of_another_fleet_is_refused(broker: BrokerThread) -> None:
    place = {"fleet_id": "another", "slot": 0, "incarnation": 1, "settled": {"seq": 3, "committed": [3, 3]}}
    with pytest.raises(RefusedError, match="another"):
        EpisodeStream(broker.endpoints.learner, position=[place], connect_timeout_s=TIMEOUT_S)


def test_a_loop_with_batch_timeout_s_ends_with_a_logged_reason(
    broker: BrokerThread, start_feeder: StartFeeder, caplog: pytest.LogCaptureFixture
) -> None:
    plan = Envs().fragments(3)
    start_feeder(broker.endpoints.worker, plan)
    with EpisodeStream(broker.endpoints.learner, batch_timeout_s=0.5) as stream:
        assert len(list(stream)) == 3
    assert "no batch for batch_timeout_s = 0.5 s" in caplog.text


def test_a_wait_says_for_whom(
    open_stream: OpenStream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream_module, "SAY_WAITING_S", 0.3)
    monkeypatch.setattr(stall_detector, "SAY_WAITING_S", 0.3)
    stream = open_stream()
    with pytest.raises(UnreachableError):
        stream.spaces(timeout_s=0.7)
    assert "no worker has told the spaces of its envs: waiting for a first worker (0 s, waits" in caplog.text
    assert stream.next(1.2) is None
    assert "no batch for 1 s: waiting for a first worker" in caplog.text
    assert stall_detector.StallDetector([], rank=1).whom() == "waiting for the next round of rank 0"


def test_threads_that_wait_together_count_their_wait_once(
    open_stream: OpenStream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stall_detector, "SAY_WAITING_S", 1.0)
    stream, began = open_stream(), time.monotonic()
    threads = [threading.Thread(target=stream.next, args=(2.0,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    told = [int(seconds) for seconds in re.findall(r"no batch for (\d+) s", caplog.text)]
    assert max(told) <= round(time.monotonic() - began)


def test_the_wait_for_a_worker_ends_with_the_fleet(open_stream: OpenStream, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = open_stream()
    monkeypatch.setattr(EpisodeStream, "ended", "it was stopped")
    with pytest.raises(UnreachableError, match=r"no worker answers .* s; it was stopped"):
        stream.spaces(timeout_s=TIMEOUT_S)


def test_a_message_that_is_cut_off_by_the_brokers_death_is_left_out() -> None:
    """libzmq drops what a connection has left when it ends, also in the midst of a message that is being read."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.bind(endpoint)
        learner = BrokerLink(FleetPlace(endpoint, "learner"), None, "token", 0)
        wait_until(lambda: learner.send([b"here"]), "a connection")
        peer, _ = server.recv_multipart()
        server.send_multipart([peer, *[b"frame"] * 1_000])
        assert learner.socket.poll(1000 * TIMEOUT_S)
        server.close(linger=0)
        threading.Event().wait(0.5)  # any call of the socket would take note of the end
        assert list(learner.received()) == []
        learner.close()
