"""Backpressure: when the learner is slower than the workers, they wait, or the broker drops and counts old batches."""

from __future__ import annotations

from headrace.broker.process import Broker
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.accounts.ledger import add_up
from support.pipeline.delivery import (
    BrokerThread,
    Envs,
    Feeder,
    StartBroker,
    StartFeeder,
    Witness,
    batches_of,
)
from support.waiting import TIMEOUT_S, wait_until

PIXELS = 4000
MIB = 1 << 20


def books_balance(broker: BrokerThread, shipped: int) -> None:
    rows = broker.rows()
    for row in rows.values():
        assert not list(row.problems())
    ledger = add_up(rows)
    assert ledger.balance() == 0
    assert ledger.stepped == shipped


def _settled_in(broker: Broker) -> None:
    """As if the broker had served for half a minute without a learner."""
    broker.core.store.is_reconciled = True


def train(broker: BrokerThread, feeders: list[Feeder]) -> tuple[Witness, EpisodeStream]:
    witness = Witness()
    with EpisodeStream(broker.endpoints.learner) as stream:
        for batch in batches_of(stream, lambda: all(feeder.all_settled() for feeder in feeders)):
            witness.see(batch)
    return witness, stream


def test_without_a_learner_workers_wait_and_the_brokers_memory_is_bounded(
    start_broker: StartBroker, start_feeder: StartFeeder
) -> None:
    broker = start_broker(max_held_bytes=MIB, max_batch_bytes=MIB // 4)
    plans = [Envs(seed).fragments(60, pixels=PIXELS) for seed in (1, 2)]
    feeders = [start_feeder(broker.endpoints.worker, plan, slot=i, window=50) for i, plan in enumerate(plans)]
    wait_until(lambda: broker.held_bytes() > MIB * 3 // 4, "a full broker")
    wait_until(lambda: all(feeder.session.waiting_for == "learner" for feeder in feeders), "word of whom they wait for")
    largest = max(frames for feeder in feeders for frames in (s.nbytes for s in feeder.session._window))
    assert broker.held_bytes() <= MIB + len(feeders) * largest
    assert not any(feeder.all_shipped() for feeder in feeders)
    witness, _ = train(broker, feeders)
    total = sum(batch.steps for plan in plans for batch in plan)
    assert witness.steps == total
    books_balance(broker, total)
    assert broker.held_bytes() == 0


def test_a_stalled_learner_with_a_full_window_blocks_the_worker_until_it_resumes(
    start_broker: StartBroker, start_feeder: StartFeeder
) -> None:
    broker = start_broker(max_held_bytes=MIB, max_batch_bytes=MIB // 4)
    plan = Envs(1).fragments(60, pixels=PIXELS)
    witness = Witness()
    with EpisodeStream(broker.endpoints.learner, window_batches=4) as stream:
        feeder = start_feeder(broker.endpoints.worker, plan, window=50)
        wait_until(lambda: feeder.session.waiting_for == "learner", "a worker that waits for the learner")
        assert broker.held_bytes() <= MIB + MIB // 4
        for batch in batches_of(stream, feeder.all_settled):
            witness.see(batch)
    assert witness.steps == sum(batch.steps for batch in plan)


def test_a_full_window_stops_the_worker(broker: BrokerThread, start_feeder: StartFeeder) -> None:
    feeder = start_feeder(broker.endpoints.worker, Envs(1).fragments(9), window=3)
    wait_until(lambda: feeder.blocked and feeder.session.accepted == 3, "a full window")
    assert len(feeder.session.window()) == 3
    train(broker, [feeder])


def test_drop_oldest_keeps_the_newest_batches_and_counts_the_dropped_steps(
    start_broker: StartBroker, start_feeder: StartFeeder
) -> None:
    broker = start_broker(max_held_bytes=MIB, max_batch_bytes=MIB // 4, overflow="drop_oldest")
    plan = Envs(3, fails=0.0).fragments(80, pixels=PIXELS)
    broker.ask(_settled_in)
    feeder = start_feeder(broker.endpoints.worker, plan, window=50)
    wait_until(lambda: feeder.session.accepted == 80, "all batches accepted without a learner")
    assert broker.held_bytes() <= MIB
    assert broker.ask(lambda b: len(b.core.store.queue)) < 40
    assert broker.ask(lambda b: len(b.core.store.policy.candidates)) < 40
    witness, stream = train(broker, [feeder])
    total = sum(batch.steps for batch in plan)
    books_balance(broker, total)
    settled = broker.rows()[(0, 1)].settled
    assert settled.dropped["overflow"][0] > 0
    assert settled.committed[0] == witness.steps
    assert witness.steps + sum(steps for steps, _ in settled.dropped.values()) == total
    assert stream.delivered > 0


def test_drop_oldest_ends_the_episodes_it_cuts(start_broker: StartBroker, start_feeder: StartFeeder) -> None:
    """The learner has the beginning of an episode, and stands still while its middle is dropped."""
    broker = start_broker(max_held_bytes=MIB, max_batch_bytes=MIB // 4, overflow="drop_oldest")
    plan = Envs(4, ends=0.01, fails=0.0).fragments(80, pixels=PIXELS)
    witness = Witness()
    with EpisodeStream(broker.endpoints.learner, window_batches=1) as stream:
        feeder = start_feeder(broker.endpoints.worker, plan, window=60)
        wait_until(lambda: feeder.session.accepted == 80, "all batches accepted while the learner stands still")
        for batch in batches_of(stream, feeder.all_settled):
            witness.see(batch)
        assert stream.dropped["overflow"] > 0
        assert "overflow" in witness.markers.values()
        assert witness.steps + sum(stream.dropped.values()) == sum(batch.steps for batch in plan)
    books_balance(broker, sum(batch.steps for batch in plan))


def test_drop_stale_drops_batches_sampled_with_stale_weights(
    start_broker: StartBroker, start_feeder: StartFeeder
) -> None:
    broker = start_broker(overflow="drop_stale", max_staleness=2)
    broker.ask(_settled_in)
    plan = Envs(5, fails=0.0).fragments(10)
    feeder = start_feeder(broker.endpoints.worker, plan, label=(1, 1))
    with WeightPublisher(broker.endpoints.learner) as publisher:
        for _ in range(3):
            publisher.publish({"w": plan[0].columns["rewards"]})
        wait_until(lambda: broker.ask(lambda b: b.core.weights) == (1, 3) and feeder.session.accepted == 10, "both")
        assert broker.held_bytes() > 0
        publisher.publish({"w": plan[0].columns["rewards"]})
        wait_until(lambda: broker.held_bytes() == 0, "the end of what is three versions behind")
    witness, stream = train(broker, [feeder])
    assert (witness.steps, stream.delivered) == (0, 0)
    dropped = broker.rows()[(0, 1)].settled.dropped
    assert dropped == {"stale": (sum(b.steps for b in plan), sum(len(b) for b in plan))}
    books_balance(broker, sum(batch.steps for batch in plan))


def test_a_batch_too_stale_on_arrival_is_dropped_under_the_default_policy(
    start_broker: StartBroker, start_feeder: StartFeeder
) -> None:
    """The learner ends its episodes and gets the fresh batches."""
    broker = start_broker(max_staleness=2)
    fragments = Envs(7, ends=0.05, fails=0.0).fragments(12)
    labels = [(1, 9)] * 4 + [(1, 7)] * 4 + [(1, 6)] * 2 + [(1, 10)] * 2
    witness = Witness()
    with EpisodeStream(broker.endpoints.learner) as stream, WeightPublisher(broker.endpoints.learner) as publisher:
        for _ in range(9):
            publisher.publish({"w": fragments[0].columns["rewards"]})
        wait_until(lambda: broker.ask(lambda b: b.core.weights) == (1, 9), "nine versions")
        feeder = start_feeder(broker.endpoints.worker, fragments, labels=labels)
        for batch in batches_of(stream, feeder.all_settled):
            witness.see(batch)
        stale = sum(feeder.steps[seq] for seq in (9, 10))
        assert stream.dropped["stale"] == stale
        assert "stale" in witness.markers.values()
        total = sum(feeder.steps.values())
        assert witness.steps == total - sum(stream.dropped.values())
    books_balance(broker, total)
    assert broker.rows()[(0, 1)].settled.dropped["stale"][0] == stale


def test_a_window_of_stale_batches_does_not_stop_the_worker(
    start_broker: StartBroker, start_feeder: StartFeeder
) -> None:
    """The learner gathers more before it commits: batches dropped behind those in its hand cannot settle yet."""
    broker = start_broker(max_staleness=1)
    fragments = Envs(8, ends=1.0, fails=0.0).fragments(9)
    labels = [(1, 1)] * 4 + [(1, 3)] * 5
    with (
        EpisodeStream(broker.endpoints.learner, auto_commit=False, window_batches=2) as stream,
        WeightPublisher(broker.endpoints.learner) as publisher,
    ):
        publisher.publish({"w": fragments[0].columns["rewards"]})
        feeder = start_feeder(broker.endpoints.worker, fragments, labels=labels, window=4)
        wait_until(lambda: broker.ask(lambda b: b.core.store.sent_and_unsettled()) == 2, "two batches at the learner")
        wait_until(lambda: feeder.session.accepted == 4 and feeder.blocked, "a full window")
        for _ in range(2):
            publisher.publish({"w": fragments[0].columns["rewards"]})
        wait_until(lambda: broker.ask(lambda b: b.core.weights) == (1, 3), "two more versions at the broker")
        gathered = [stream.next(timeout_s=TIMEOUT_S).seq for _ in range(4)]
        assert gathered == [1, 2, 5, 6]
        stream.commit()
        for _ in batches_of(stream, feeder.all_settled):
            stream.commit()
    settled = broker.rows()[(0, 1)].settled
    assert settled.dropped == {"stale": (sum(feeder.steps[n] for n in (3, 4)), sum(len(fragments[n]) for n in (2, 3)))}
    books_balance(broker, sum(feeder.steps.values()))


def test_drop_oldest_drops_batches_above_a_count(start_broker: StartBroker, start_feeder: StartFeeder) -> None:
    broker = start_broker(overflow="drop_oldest", max_held_batches=3)
    broker.ask(_settled_in)
    feeder = start_feeder(broker.endpoints.worker, Envs(9).fragments(20), window=4)
    wait_until(lambda: feeder.session.accepted == 20, "twenty batches in a window of four, without a learner")
    assert broker.ask(lambda b: sorted(b.core.sources[(0, 1)].held)) == [18, 19, 20]
