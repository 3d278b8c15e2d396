"""All workers together keep one to two updates in flight. The learner sets the size, or the stream measures it."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.learner_stub.reference.training import gather
from headrace.learner_stub.streaming import stall_detector
from headrace.learner_stub.streaming.update_size import UpdateSize
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.errors import WindowStalledError
from headrace.schemas.messages.learner_messages import MOST_WINDOW_STEPS
from support.pipeline.delivery import BrokerThread, Envs, Feeder, StartFeeder, worker_process
from support.pipeline.worker_threads import constant_value
from support.waiting import TIMEOUT_S, wait_until

STEPS = 10
"""Steps of each batch here."""
NEVER = threading.Event()
WEIGHTS = {"w": np.zeros(3, np.float32)}


def _endless(seed: int) -> Iterator[ChunkBatch]:
    envs = Envs(seed, ends=0.0, fails=0.0)
    return (envs.fragment() for _ in itertools.count())


def _start(start_feeder: StartFeeder, broker: BrokerThread, workers: int, first: int = 0) -> list[Feeder]:
    places = range(first, first + workers)
    return [start_feeder(broker.endpoints.worker, _endless(n), slot=n, follows_learner=True) for n in places]


def _under_way(feeders: list[Feeder]) -> int:
    """Steps cut and not settled, once all wait for the learner.

    A feeder remains `blocked` for the moment between the news that a batch is settled and its next batch.
    """

    def full() -> list[int] | None:
        steps = [batch.steps for feeder in feeders for batch in feeder.session.window()]
        sessions = [feeder.session for feeder in feeders if feeder.blocked]
        waits = len(sessions) == len(feeders) and not any(each.has_room() or each.unaccepted() for each in sessions)
        return steps if waits else None

    return sum(wait_until(full, "full windows"))


@pytest.mark.parametrize(("workers", "update"), [(1, 200), (2, 200), (5, 200), (3, 1000)])
@pytest.mark.parametrize("auto_commit", [True, False])
def test_the_steps_in_flight_follow_the_update_size_that_the_learner_sets(
    broker: BrokerThread, start_feeder: StartFeeder, workers: int, update: int, auto_commit: bool
) -> None:
    options = {"auto_commit": auto_commit, "steps_per_update": update}
    with EpisodeStream(broker.endpoints.learner, **options) as stream:  # type: ignore[arg-type]
        feeders = _start(start_feeder, broker, workers)
        for number in range(4):
            gather(stream, update, NEVER)
            under_way = _under_way(feeders)
            assert under_way >= update
            if number:  # workers join one after another, so at first some have the window of a smaller fleet
                assert under_way <= 2.3 * update
            stream.commit()


@pytest.mark.parametrize("publishes", [True, False])
@pytest.mark.parametrize("auto_commit", [True, False])
def test_a_round_larger_than_the_workers_windows_comes(
    broker: BrokerThread, start_feeder: StartFeeder, auto_commit: bool, publishes: bool
) -> None:
    at = broker.endpoints.learner
    with EpisodeStream(at, auto_commit=auto_commit) as stream, WeightPublisher(at) as weights:
        _start(start_feeder, broker, 3)
        for _ in range(2):
            if publishes:
                weights.publish(WEIGHTS)
            assert len(stream.round_of(100, TIMEOUT_S)) == 100
            stream.commit()


def test_weights_published_while_a_round_is_awaited_do_not_keep_it_away(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    at = broker.endpoints.learner
    with EpisodeStream(at) as stream, WeightPublisher(at) as weights:
        _start(start_feeder, broker, 2)

        def came() -> bool:
            weights.publish(WEIGHTS)
            return bool(stream.round_of(100, 0.7))

        wait_until(came, "a round")


def test_a_round_for_which_no_worker_can_make_room_is_an_error(
    broker: BrokerThread, start_feeder: StartFeeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_detector, "STALLED_S", 2.0)
    with EpisodeStream(broker.endpoints.learner) as stream:
        start_feeder(broker.endpoints.worker, _endless(0), window=4, follows_learner=False)
        with pytest.raises(WindowStalledError, match="the stream holds 4 uncommitted batches and has waited"):
            stream.round_of(5)


def test_each_worker_keeps_one_batch_in_flight_even_for_tiny_updates(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    with EpisodeStream(broker.endpoints.learner, steps_per_update=1) as stream:
        feeders = _start(start_feeder, broker, 4)
        assert stream.next(TIMEOUT_S) is not None
        assert _under_way(feeders) == 4 * STEPS


def test_the_stream_measures_the_update_size_from_published_weights(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    """The first update already finds a small window, so it is not trained on hundreds of steps of the first weights."""
    update = 12 * STEPS
    with EpisodeStream(broker.endpoints.learner) as stream, WeightPublisher(broker.endpoints.learner) as weights:
        weights.publish(WEIGHTS)
        feeders = _start(start_feeder, broker, 3)
        assert _under_way(feeders) == 3 * STEPS
        for _ in range(3):
            gather(stream, update, NEVER)
            weights.publish(WEIGHTS)
        assert update <= _under_way(feeders) <= 2 * update


def test_a_new_fleet_at_an_old_address_measures_its_own_update_size(
    stack: ExitStack, tmp_path: Path, start_feeder: StartFeeder, free_port: int
) -> None:
    for name in ("older", "newer"):
        (tmp_path / name).mkdir()
    with BrokerThread(tmp_path / "older", port=free_port) as older, WeightPublisher(older.endpoints.learner) as weights:
        for _ in range(9):
            weights.publish(WEIGHTS)
    newer = stack.enter_context(BrokerThread(tmp_path / "newer", port=free_port))
    update = 12 * STEPS
    with EpisodeStream(newer.endpoints.learner) as stream, WeightPublisher(newer.endpoints.learner) as weights:
        feeders = _start(start_feeder, newer, 3)
        for _ in range(3):
            weights.publish(WEIGHTS)
            gather(stream, update, NEVER)
        weights.publish(WEIGHTS)
        assert update <= _under_way(feeders) <= 2 * update


def test_the_stream_measures_the_update_size_from_the_learners_commits(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    """Without weights a commit ends an update. An update far above the workers' windows does not starve the learner."""
    update = 120 * STEPS
    with EpisodeStream(broker.endpoints.learner, auto_commit=False) as stream:
        feeders = _start(start_feeder, broker, 3)
        stream.commit()
        for _ in range(2):
            assert sum(batch.steps for batch in gather(stream, update, NEVER)) == update
            assert not stream.starved
            stream.commit()
        gather(stream, update, NEVER)
        assert update <= _under_way(feeders) <= 2.3 * update


def test_a_stream_without_updates_leaves_workers_their_full_windows(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    feeders = _start(start_feeder, broker, 2)
    assert _under_way(feeders) == 2 * 16 * STEPS
    with EpisodeStream(broker.endpoints.learner) as stream:
        for _ in range(50):
            assert stream.next(TIMEOUT_S) is not None
        assert _under_way(feeders) == 2 * 16 * STEPS


@pytest.mark.parametrize("auto_commit", [True, False])
def test_a_learner_that_publishes_only_once_has_a_bounded_window(
    broker: BrokerThread, start_feeder: StartFeeder, auto_commit: bool
) -> None:
    """A recorder or an evaluation has no updates, so the steps that it reads say nothing about the window."""
    feeders = _start(start_feeder, broker, 2)
    with (
        EpisodeStream(broker.endpoints.learner, auto_commit=auto_commit) as stream,
        WeightPublisher(broker.endpoints.learner) as weights,
    ):
        weights.publish(WEIGHTS)
        for _ in range(300):
            assert stream.next(TIMEOUT_S) is not None
            stream.commit()
        assert _under_way(feeders) <= (2 * 16 if auto_commit else 2 * 64) * STEPS


def test_until_a_learner_tells_its_window_each_worker_keeps_one_batch_of_an_earlier_learners_weights(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    """As in a resumed run: what workers sample before the learner comes is old once it trains."""
    with WeightPublisher(broker.endpoints.learner) as weights:
        weights.publish(WEIGHTS)
        wait_until(lambda: broker.ask(lambda b: b.core.weights) != (0, 0), "the weights")
    feeders = _start(start_feeder, broker, 3)
    assert _under_way(feeders) == 3 * STEPS
    with EpisodeStream(broker.endpoints.learner) as stream, WeightPublisher(broker.endpoints.learner) as weights:
        assert _under_way(feeders) == 3 * STEPS
        weights.publish(WEIGHTS)
        for _ in range(9):
            gather(stream, STEPS, NEVER)
            weights.publish(WEIGHTS)
            assert _under_way(feeders) == 3 * STEPS


def test_a_learner_that_tells_no_window_and_reads_on_gets_more_than_one_batch_of_each_worker(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    with WeightPublisher(broker.endpoints.learner) as weights:
        weights.publish(WEIGHTS)
    with EpisodeStream(broker.endpoints.learner, auto_commit=False) as stream:
        _start(start_feeder, broker, 2)
        assert sum(batch.steps for batch in gather(stream, 20 * STEPS, NEVER)) == 20 * STEPS


def test_idle_workers_leave_their_share_of_the_window_to_the_others(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    """Three of four ship nothing and wait for nothing, as with envs that are being built."""
    for slot in (1, 2, 3):
        start_feeder(broker.endpoints.worker, itertools.repeat(None), slot=slot, follows_learner=True)
    with EpisodeStream(broker.endpoints.learner, auto_commit=False, steps_per_update=40 * STEPS) as stream:
        _start(start_feeder, broker, 1)
        assert sum(batch.steps for batch in gather(stream, 40 * STEPS, NEVER)) == 40 * STEPS


def test_a_new_broker_gets_the_update_size_again(tmp_path: Path, stack: ExitStack, start_feeder: StartFeeder) -> None:
    first = stack.enter_context(BrokerThread(tmp_path))
    with EpisodeStream(first.endpoints.learner, steps_per_update=20 * STEPS) as stream:
        feeders = _start(start_feeder, first, 2)
        assert stream.next(TIMEOUT_S) is not None
        first.stop()
        stack.enter_context(BrokerThread(tmp_path))
        wait_until(lambda: stream.next(0.2), "a batch of the new broker")
        assert _under_way(feeders) <= 2 * 20 * STEPS


@pytest.mark.parametrize("steps", [0, MOST_WINDOW_STEPS // 2 + 1])
def test_an_update_size_out_of_bounds_is_refused(broker: BrokerThread, steps: int) -> None:
    with pytest.raises(ValueError, match=f"steps_per_update = {steps} "):
        EpisodeStream(broker.endpoints.learner, steps_per_update=steps).close()


def test_a_measured_size_is_the_mean_of_the_last_updates() -> None:
    size = UpdateSize(None, auto_commit=True)
    assert size.window_steps() is None
    size.end()
    assert size.window_steps() == 1
    for steps in (30, 50, 40):
        size.take(steps)
        size.end()
        size.end()  # weights published twice make no update of no steps
    assert size.steps == 40


@pytest.mark.parametrize(
    ("told", "auto_commit", "expected"), [(10, False, 30), (10, True, 10), (None, False, 30), (None, True, 30)]
)
def test_an_update_larger_than_usual_fits_where_nothing_is_settled_before_its_end(
    told: int | None, auto_commit: bool, expected: int
) -> None:
    size = UpdateSize(told, auto_commit=auto_commit)
    size.take(30)
    assert size.steps == expected


@pytest.mark.processes
def test_a_learner_with_small_updates_trains_on_fresh_data(
    broker: BrokerThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its training takes longer than sampling: when it publishes, all windows are full.

    Windows of 16 batches, which workers have while they know nothing of the learner, would be 16 versions. A worker
    that gets no processor for a while may fall some versions behind with one batch.
    """
    caplog.set_level(logging.WARNING, "headrace.learner")
    sampling = {"env": "CartPole-v1", "num_envs": 4, "rollout_fragment_length": 64, "seed": 1}
    sections = {"sampling": sampling, "learner": {"enabled": False}}
    at = broker.endpoints

    def all_wait() -> bool:
        stream.pump()
        return broker.ask(lambda b: all(source.blocked for source in b.core.live()))

    with (
        worker_process(tmp_path, at.worker, 0, 1, sections),
        worker_process(tmp_path, at.worker, 1, 1, sections),
        EpisodeStream(at.learner, warn_lag=8.0) as stream,
        WeightPublisher(at.learner) as weights,
    ):
        arrays = constant_value(stream.spaces(timeout_s=TIMEOUT_S), 1.0)
        weights.publish(arrays)
        for _ in range(8):
            gather(stream, 512, NEVER)
            wait_until(all_wait, "full windows")
            weights.publish(arrays)
        assert 0 < stream.lag <= 2, "two updates are under way at most, in the mean of all batches"
        assert stream.late_batches == 0
        for _ in range(12):
            weights.publish(arrays)
        gather(stream, 512, NEVER)
    assert stream.late_batches > 0
    (warning,) = (record.getMessage() for record in caplog.records if "versions behind" in record.message)
    assert "an update takes 512 steps" in warning
    assert "lower sampling.rollout_fragment_length" in warning
