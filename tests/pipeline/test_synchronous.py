"""Synchronous sampling: sample, train, sample. No step is old, runs repeat to the bit, no worker stalls the others."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.batches.rounds import Rounds
from headrace.broker.batches.source import Source, StoredBatch
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.learner_stub.checkpoints.checkpoint import Checkpoint, load_checkpoint
from headrace.learner_stub.reference.policies import LearnerPolicies, build_policies
from headrace.learner_stub.reference.training import gather, train
from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch
from headrace.schemas.errors import ConfigError
from headrace.schemas.settings.config_loading import build_config
from support.pipeline.delivery import BrokerThread, Process, worker_process
from support.pipeline.worker_threads import constant_value
from support.waiting import TIMEOUT_S, wait_until

NEVER = threading.Event()
SAMPLING: dict[str, Any] = {"env": "CartPole-v1", "num_envs": 4, "rollout_fragment_length": 32, "seed": 1}
UPDATES = 4


class _Updates(LearnerPolicies):
    """The reference learner's policies, which stop the training after `UPDATES` updates."""

    def __init__(self, policies: LearnerPolicies, stopping: threading.Event) -> None:
        super().__init__(policies.by_id)
        self._stopping = stopping

    def update(self, *arguments: Any) -> dict[str, float]:
        metrics = super().update(*arguments)
        if self.updates == UPDATES:
            self._stopping.set()
        return metrics


def _reference_run(run_dir: Path, *, synchronous_by_config: bool) -> Checkpoint:
    """Train with two real workers until `UPDATES` updates are done; return what stands in the checkpoint."""
    run_dir.mkdir()
    learner = {"steps_per_update": 600, "minibatch_size": 128, "epochs": 2}
    sections = {"sampling": {**SAMPLING, "synchronous": synchronous_by_config}, "learner": learner}
    config, stopping = build_config(sections), threading.Event()
    with (
        BrokerThread(run_dir, synchronous=synchronous_by_config, workers=2) as broker,
        worker_process(run_dir, broker.endpoints.worker, 0, 1, sections),
        worker_process(run_dir, broker.endpoints.worker, 1, 1, sections),
        EpisodeStream(
            broker.endpoints.learner, auto_commit=False, steps_per_update=600, synchronous=not synchronous_by_config
        ) as stream,
        WeightPublisher(broker.endpoints.learner) as weights,
    ):
        policies = _Updates(build_policies(config, stream.module_spaces(timeout_s=TIMEOUT_S)), stopping)
        train(policies, 600, stream, weights, run_dir / "learner.checkpoint", stopping, synchronous=True)
        assert stream.lag == 0.0
    saved = load_checkpoint(run_dir / "learner.checkpoint")
    assert saved is not None
    return saved


@pytest.mark.processes
def test_two_runs_with_one_seed_are_equal_to_the_bit(tmp_path: Path) -> None:
    """The config asks for synchronous sampling in one run, and the learner in the other."""
    first = _reference_run(tmp_path / "a", synchronous_by_config=True)
    assert first.state["updates"] == UPDATES
    assert first.state["steps"] == UPDATES * 600
    second = _reference_run(tmp_path / "b", synchronous_by_config=False)
    assert second.state == first.state
    assert {name: array.tobytes() for name, array in second.arrays.items()} == {
        name: array.tobytes() for name, array in first.arrays.items()
    }
    assert second.position == first.position


class Fleet:
    """Workers in processes of their own, and a learner of a test that publishes when it has an update."""

    def __init__(self, tmp_path: Path, stack: ExitStack, workers: int, steps: int = 256, **sampling: Any) -> None:
        self.run_dir, self._stack = tmp_path, stack
        self.broker = stack.enter_context(BrokerThread(tmp_path, workers=workers, lease_s=2.0))
        self.sections = {"sampling": {**SAMPLING, **sampling}}
        self.workers = [self.start(slot) for slot in range(workers)]
        at, self.steps = self.broker.endpoints.learner, steps
        self.stream = stack.enter_context(EpisodeStream(at, synchronous=True, steps_per_update=steps))
        self.weights = stack.enter_context(WeightPublisher(at))
        self.arrays = constant_value(self.stream.spaces(timeout_s=TIMEOUT_S), 1.0)

    def start(self, slot: int, incarnation: int = 1) -> Process:
        at = self.broker.endpoints.worker
        return self._stack.enter_context(worker_process(self.run_dir, at, slot, incarnation, self.sections))

    def update(self) -> list[ChunkBatch]:
        """The batches of the next round."""
        self.weights.publish(self.arrays)
        return gather(self.stream, self.steps, NEVER)


@pytest.fixture
def stack() -> Any:
    with ExitStack() as stack:
        yield stack


@pytest.mark.chaos
def test_each_worker_ships_its_share_and_waits(tmp_path: Path, stack: ExitStack) -> None:
    """Two workers of 4 envs share 250 steps: slot 0 ships 128, slot 1 ships 124. Brokers restart."""
    fleet = Fleet(tmp_path, stack, 2, steps=250)
    for turn in range(1, 7):
        if turn in (3, 5):
            fleet.broker.stop()
            fleet.broker = stack.enter_context(BrokerThread(tmp_path, workers=2, lease_s=2.0))
        batches = fleet.update()
        assert [(batch.steps, batch.slot, batch.seq) for batch in batches] == [(128, 0, turn), (124, 1, turn)]
        assert all(set(batch.columns["weights_seq"].tolist()) == {turn} for batch in batches)
        assert fleet.stream.next(0.2) is None, "all wait for the next version"
    assert fleet.stream.lag == 0.0
    for worker in fleet.workers:
        worker.signal(signal.SIGTERM)
    for worker in fleet.workers:
        fleet.stream.next(0.1)
        assert worker.wait() == 0, worker.log.read_text()


@pytest.mark.processes
def test_two_versions_a_round_leave_at_most_two_rounds_of_lag(tmp_path: Path, stack: ExitStack) -> None:
    """Each version begins a round, and workers ship up to two rounds ahead of a commit."""
    fleet, lags = Fleet(tmp_path, stack, 2), []
    for _ in range(12):
        fleet.weights.publish(fleet.arrays)
        lags += [int(batch.lag.max()) for batch in fleet.update()]
    assert max(lags) <= 4, lags


@pytest.mark.chaos
def test_a_worker_that_dies_does_not_stall_the_others(tmp_path: Path, stack: ExitStack) -> None:
    """The round waits for a killed worker, then gives its share to the other. Its next life gets shares again."""
    slow = {"env": "support.envs.troubled:Slow", "env_config": {"step_s": 0.005}}
    fleet = Fleet(tmp_path, stack, 2, **slow)
    fleet.update()
    fleet.weights.publish(fleet.arrays)
    fleet.workers[1].signal(signal.SIGKILL)
    batches = gather(fleet.stream, 256, NEVER)
    assert 128 < sum(batch.steps for batch in batches if batch.slot == 0) <= 256
    assert {batch.slot for batch in fleet.update()} == {0}
    fleet.start(1, incarnation=2)
    wait_until(lambda: {batch.slot for batch in fleet.update()} == {0, 1}, "rounds of both workers")


@pytest.mark.long
def test_without_steps_per_update_each_worker_ships_one_fragment_a_round(tmp_path: Path, stack: ExitStack) -> None:
    broker = stack.enter_context(BrokerThread(tmp_path, workers=1))
    stack.enter_context(worker_process(tmp_path, broker.endpoints.worker, 0, 1, {"sampling": SAMPLING}))
    stream = stack.enter_context(EpisodeStream(broker.endpoints.learner, synchronous=True))
    weights = stack.enter_context(WeightPublisher(broker.endpoints.learner))
    arrays = constant_value(stream.spaces(timeout_s=TIMEOUT_S), 1.0)
    for seq in range(1, 4):
        weights.publish(arrays)
        batch = stream.next(TIMEOUT_S)
        assert batch is not None
        assert (batch.steps, batch.seq) == (4 * 32, seq)
        assert stream.next(0.2) is None


def test_synchronous_sampling_refuses_random_actions_before_the_first_weights() -> None:
    sections = {"sampling": {"synchronous": True}, "worker": {"random_actions_before_weights": True}}
    with pytest.raises(ConfigError, match="synchronous = true"):
        build_config(sections)


# -- the rounds alone -------------------------------------------------------------------------------------------------


def _workers(count: int) -> list[Source]:
    return [Source(slot, 1, introduced=True, num_envs=4, cut_steps=64) for slot in range(count)]


def _shares(rounds: Rounds, workers: list[Source]) -> list[int]:
    return [rounds.share(worker) for worker in workers]


def _makes(worker: Source, steps: int, frozen: int = 0) -> None:
    worker.totals = WorkerTotals(stepped=steps, discarded={"frozen": frozen} if frozen else {})


def _ship(rounds: Rounds, worker: Source, steps: int, version: tuple[int, int]) -> None:
    told = BatchHeader(
        fleet_id="f", slot=worker.slot, incarnation=1, seq=1, steps=steps, chunks=1, totals=WorkerTotals()
    )
    rounds.accepted(worker, StoredBatch(1, steps, 1, 1, [b""], 0, 0.0, version), told)


def test_a_live_worker_without_steps_gets_no_share_until_it_makes_a_step() -> None:
    rounds, workers = Rounds(True, 3, lease_s=2.0), _workers(3)
    rounds.ask(True, 120)
    assert rounds.advance((1, 1), workers, 0, 0.0)
    assert _shares(rounds, workers) == [40, 40, 40]
    for worker in workers[:2]:
        _ship(rounds, worker, 40, (1, 1))
    assert rounds.waiting_for() == "worker 2"
    _makes(workers[2], 4)
    assert not rounds.advance((1, 1), workers, 0, 5.9), "it has made steps"
    assert not rounds.advance((1, 1), workers, 0, 11.8)
    assert rounds.advance((1, 1), workers, 0, 12.0)
    assert _shares(rounds, workers) == [60, 60, 0]
    assert rounds.advance((1, 2), workers, 0, 13.0)
    assert _shares(rounds, workers) == [60, 60, 0]
    _makes(workers[2], 44)
    assert rounds.advance((1, 3), workers, 0, 14.0)
    assert _shares(rounds, workers) == [40, 40, 40]


def test_a_worker_of_frozen_modules_alone_does_not_hold_up_a_round(caplog: pytest.LogCaptureFixture) -> None:
    """Its steps stay with it. A worker whose trained module plays now and then keeps its share."""
    caplog.set_level("INFO", "headrace.broker.batches.rounds")
    rounds, workers = Rounds(True, 3, lease_s=2.0), _workers(3)
    rounds.ask(True, 120)
    assert rounds.advance((1, 1), workers, 0, 0.0)
    for second in range(1, 6):
        _makes(workers[0], 10 * second, frozen=10 * second - second % 2)
        _makes(workers[1], 10 * second, frozen=9 * second)
        assert not rounds.advance((1, 1), workers, 0, float(second))
    _ship(rounds, workers[1], 40, (1, 1))
    _ship(rounds, workers[2], 40, (1, 1))
    assert rounds.waiting_for() == "worker 0 (no step is of learner.policies_to_train)"
    _makes(workers[0], 90, frozen=90)
    assert rounds.advance((1, 1), workers, 0, 9.0)
    assert _shares(rounds, workers) == [0, 60, 60]
    assert "40 steps of worker 0 go to other workers" in caplog.text


def test_a_round_says_for_which_workers_it_waits_and_nothing_once_it_is_complete(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "headrace.broker.batches.rounds")
    rounds, workers = Rounds(True, 2, lease_s=2.0), _workers(2)
    rounds.advance((1, 1), workers, 0, 0.0)
    _ship(rounds, workers[0], 64, (1, 1))
    _makes(workers[1], 4)
    for second in (5.0, 9.0, 11.0, 12.0):
        rounds.advance((1, 1), workers, 0, second)
        _makes(workers[1], int(second))
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["waiting for worker 1"]
    _ship(rounds, workers[1], 64, (1, 1))
    rounds.advance((1, 1), workers, 0, 40.0)
    assert len(caplog.records) == 1, "the learner may take its time"


def test_the_first_round_waits_for_all_workers_of_the_config_for_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headrace.broker.batches.rounds")
    rounds, workers = Rounds(True, 3, lease_s=2.0), _workers(2)
    workers[1].introduced = False
    for second in range(60):
        assert not rounds.advance((1, 1), workers, 0, float(second))
    assert "waiting for 1 of 3 workers to connect" in caplog.text
    assert not rounds.advance((1, 1), workers, 0, 61.0)
    workers[1].introduced = True
    assert rounds.advance((1, 1), workers, 0, 62.0)
    assert _shares(rounds, workers) == [64, 64]


def test_a_restarted_worker_gets_the_rest_of_its_share() -> None:
    rounds, workers = Rounds(True, 2, lease_s=2.0), _workers(2)
    rounds.ask(True, 128)
    rounds.advance((1, 1), workers, 0, 0.0)
    _ship(rounds, workers[1], 40, (1, 1))
    after = Source(1, 2, introduced=True, num_envs=4, cut_steps=64)
    assert not rounds.advance((1, 1), [workers[0], after], 0, 1.0)
    assert _shares(rounds, [workers[0], after]) == [64, 24]


def test_a_workers_claim_of_shipped_steps_is_capped_at_its_share() -> None:
    """A peer may send any number. The claim must not become a number that no message can carry."""
    rounds, workers = Rounds(True, 1, lease_s=2.0), _workers(1)
    rounds.advance((1, 1), workers, 0, 0.0)
    rounds.learn(workers[0], (1, 1), (1 << 63) - 1)
    assert rounds.share(workers[0]) == 64


def test_the_step_count_of_other_workers_is_constant_within_a_round() -> None:
    """A module's schedule may use it: it must not depend on timing."""
    rounds, workers = Rounds(True, 2, lease_s=2.0), _workers(2)
    rounds.advance((1, 1), workers, 100, 0.0)
    assert rounds.steps_elsewhere(workers[0], 164) == 100
    rounds.advance((1, 2), workers, 228, 1.0)
    assert rounds.steps_elsewhere(workers[0], 300) == 228
