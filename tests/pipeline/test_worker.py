"""The worker with real envs and a real policy: labels, oversize batches, stops and crashes."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.accounts.ledger import add_up
from headrace.schemas.accounts.recorder import read_recorder
from headrace.schemas.errors import ExitCode, RefusedError, UnreachableError
from headrace.schemas.messages.weights import weights_digest
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.workers.fleet import user_side
from support.pipeline.delivery import BrokerThread, Process, StartBroker, Witness, worker_process
from support.pipeline.worker_threads import (
    AT_RANDOM,
    SAMPLING,
    WorkerThread,
    accepted,
    closed_row,
    constant_value,
    drain,
    report_death,
)
from support.waiting import TIMEOUT_S, wait_until


def test_the_version_label_on_data_matches_the_weights_in_use(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Under each version the policy's value is a constant of its own, through a learner's restart as well."""
    value_of: dict[tuple[int, int], float] = {}
    digest_of: dict[tuple[int, int], str] = {}
    labels: list[tuple[int, int]] = []

    def learn(batches: int) -> None:
        with EpisodeStream(broker.endpoints.learner) as stream, WeightPublisher(broker.endpoints.learner) as weights:
            spaces = stream.spaces()
            for number in range(batches):
                value = float(len(value_of) + 1)
                arrays = constant_value(spaces, value)
                version = (weights.epoch, weights.publish(arrays))
                value_of[version], digest_of[version] = value, weights_digest(arrays)
                batch = stream.next(TIMEOUT_S)
                assert batch is not None, f"no batch after publishing number {number}"
                for chunk in batch:
                    assert np.all(np.diff(chunk.weights_seq) >= 0)
                    for seq, seen in zip(chunk.weights_seq.tolist(), chunk.columns["values"], strict=True):
                        assert seen == value_of[batch.learner_epoch, seq]
                if batch.steps:
                    seqs = batch.columns["weights_seq"]
                    labels.extend((batch.learner_epoch, int(seq)) for seq in (seqs.min(), seqs.max()))
                    assert batch.weights_digest == digest_of[labels[-1]]

    sections = {"sampling": SAMPLING, "worker": {"window_batches": 2}, "learner": {"steps_per_update": 64}}
    with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections):
        learn(12)
        learn(12)
    assert labels == sorted(labels)
    assert {epoch for epoch, _ in labels} == {1, 2}


@pytest.mark.long
def test_new_weights_apply_within_a_fragment_and_the_last_version_stays_in_use(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = {"env": "support.envs.troubled:Slow", "env_config": {"step_s": 0.02}, "rollout_fragment_length": 50}
    sections = {"sampling": {**SAMPLING, **slow, "num_envs": 1}}
    with (
        EpisodeStream(broker.endpoints.learner) as stream,
        WeightPublisher(broker.endpoints.learner) as weights,
        WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections),
    ):
        arrays = constant_value(stream.spaces(), 1.0)

        def seqs(patience_s: float) -> set[int]:
            batch = stream.next(patience_s)
            return set(batch.columns["weights_seq"].tolist()) if batch is not None else set()

        def changed_in_the_midst_of_a_fragment() -> bool:
            weights.publish(arrays)
            return len(seqs(0.1)) > 1

        wait_until(changed_in_the_midst_of_a_fragment, "a fragment of several versions")
        wait_until(lambda: seqs(100.0) == {weights.seq}, "a fragment of the last version alone")
        assert [seqs(100.0) for _ in range(3)] == [{weights.seq}] * 3


def test_a_policy_that_fails_by_what_an_env_has_set_goes_on_without_it(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(user_side, "LOOK_INTERVAL_S", 1e9)  # the policy is the first to notice
    sections = {"sampling": {**SAMPLING, "env": "support.envs.fleet:strict_numbers"}}
    with (
        EpisodeStream(broker.endpoints.learner) as stream,
        WeightPublisher(broker.endpoints.learner) as weights,
        WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections) as worker,
    ):
        arrays = constant_value(stream.spaces(), 1.0)
        arrays["head.bias"][0] = 1000.0  # the probability of the other action underflows
        weights.publish(arrays)
        seen: list[Any] = []

        def has_gone_on() -> bool:
            worker.check()
            if (batch := stream.next(0.3)) is not None:
                seen.append(batch)
            return sum(batch.steps for batch in seen) >= 300

        wait_until(has_gone_on, "steps after the failure")
    assert "FloatingPointError" in caplog.text
    assert "an env had set numpy's reaction to errors (np.seterr), which is put back; going on" in caplog.text


@pytest.mark.parametrize(("env", "length"), [("CartPole-v1", 256), ("support.envs.pictures:Pictures", 16)])
def test_a_batch_too_large_for_the_broker_goes_in_parts_and_too_large_a_chunk_is_dropped_as_oversize(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, env: str, length: int
) -> None:
    broker = start_broker(max_batch_bytes=1 << 16)
    sampling = {**SAMPLING, "env": env, "num_envs": 8, "rollout_fragment_length": length}
    with (
        EpisodeStream(broker.endpoints.learner) as stream,
        WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, {**AT_RANDOM, "sampling": sampling}) as worker,
    ):
        taken: list[int] = []

        def has_happened() -> bool:
            taken.append(0 if (batch := stream.next(0.1)) is None else batch.steps)
            return sum(taken) >= 4096 or any("oversize" in row.settled.dropped for row in broker.rows().values())

        wait_until(has_happened, "two cuts, or a dropped chunk")
        worker.stopping.set()
        row = closed_row(broker, take=lambda: stream.next(0.1))
    dropped = row.settled.dropped.get("oversize", (0, 0))[0]
    assert dropped == stream.dropped.get("oversize", 0)
    assert (dropped > 0) == (env != "CartPole-v1")
    assert add_up(broker.rows()).balance() == 0


@pytest.mark.long
def test_the_last_batches_of_a_slow_worker_are_taken_however_late_they_come(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its envs step for longer than a drain waits for a batch. After a single drain its books would stay open."""
    slow = {"env": "support.envs.troubled:Slow", "env_config": {"step_s": 0.5}, "rollout_fragment_length": 1000}
    sections = {**AT_RANDOM, "sampling": {**SAMPLING, **slow, "num_envs": 1}}
    witness = Witness()
    with (
        EpisodeStream(broker.endpoints.learner) as stream,
        WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections) as worker,
    ):
        recorder = tmp_path / "worker-0-1.rec"
        wait_until(lambda: (reading := read_recorder(recorder)) is not None and reading.totals.stepped, "a step")
        worker.stopping.set()
        drain(stream, witness.see_any)
        assert worker.is_alive
        row = closed_row(broker, take=lambda: drain(stream, witness.see_any))
    assert row.totals.stepped == row.settled.committed[0] + sum(row.totals.discarded.values()) > 0
    assert add_up(broker.rows()).balance() == 0


def test_a_worker_with_other_spaces_ends_with_the_brokers_refusal(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start_feeder: Any
) -> None:
    feeder = start_feeder(broker.endpoints.worker, slot=5)
    wait_until(lambda: feeder.session.welcome, "the first worker")
    with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, AT_RANDOM) as worker:
        wait_until(lambda: worker.error, "a refusal")
    assert isinstance(worker.error, RefusedError)
    assert "give every worker the same env" in str(worker.error)


# -- processes --------------------------------------------------------------------------------------------------------


def start_worker(run_dir: Path, broker: BrokerThread, incarnation: int = 1) -> Process:
    return worker_process(run_dir, broker.endpoints.worker, 0, incarnation, AT_RANDOM)


@pytest.mark.chaos
def test_sigterm_drains_and_closes_the_books(broker: BrokerThread, tmp_path: Path) -> None:
    witness = Witness()
    with EpisodeStream(broker.endpoints.learner) as stream, start_worker(tmp_path, broker) as worker:
        wait_until(lambda: stream.next(0.1), "a first batch")
        stream.commit()
        worker.signal(signal.SIGTERM)
        drain(stream, witness.see_any)
        assert worker.wait() == 0, worker.log.read_text()
        row = closed_row(broker, take=lambda: drain(stream, witness.see_any))
    assert row.lost == {}
    assert row.totals.open == 0
    assert row.totals.stepped == row.settled.committed[0] + sum(row.totals.discarded.values())
    assert add_up(broker.rows()).balance() == 0


@pytest.mark.chaos
def test_sigterm_ends_a_worker_that_waits_for_a_broker(tmp_path: Path) -> None:
    """A server at the address takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        mute.settimeout(TIMEOUT_S)
        endpoint = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        with worker_process(tmp_path, endpoint, 0, 1, AT_RANDOM) as worker:
            connection, _ = mute.accept()
            with connection:
                worker.signal(signal.SIGTERM)
                assert worker.wait(30.0) == 0, worker.log.read_text()


@pytest.mark.chaos
def test_a_worker_ends_without_its_broker_and_its_recorder_keeps_the_books(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = start_broker(lease_s=1.0)
    place = FleetPlace(first.endpoints.worker, patience_s=1.0)
    with WorkerThread(monkeypatch, first.endpoints.worker, tmp_path, AT_RANDOM, place) as worker:
        wait_until(lambda: accepted(first, 1) > 2, "three batches")
        first.stop()
        wait_until(lambda: worker.error, "the end of the worker")
    assert isinstance(worker.error, UnreachableError)
    assert worker.error.endpoint == first.endpoints.worker
    reading = read_recorder(tmp_path / "worker-0-1.rec")
    assert reading is not None
    second = start_broker()
    with EpisodeStream(second.endpoints.learner):  # without a learner, a new broker waits for its word first
        report_death(second, tmp_path, 1, "worker_killed")
    row = second.rows()[(0, 1)]
    assert row.totals.stepped == reading.totals.stepped > 0
    assert add_up(second.rows()).balance() == 0


@pytest.mark.chaos
def test_after_sigkill_the_recorder_makes_the_books_balance(broker: BrokerThread, tmp_path: Path) -> None:
    witness = Witness()
    with EpisodeStream(broker.endpoints.learner) as stream, start_worker(tmp_path, broker) as worker:
        wait_until(lambda: stream.next(0.1) and accepted(broker, 1) > 5, "six batches")
        worker.signal(signal.SIGKILL)
        assert worker.wait() == -signal.SIGKILL
        report_death(broker, tmp_path, 1, "worker_killed")
        row = closed_row(broker, take=lambda: drain(stream, witness.see_any))
        assert set(witness.markers.values()) == {"worker_killed"}
    reading = read_recorder(tmp_path / "worker-0-1.rec")
    assert reading is not None
    assert row.totals.stepped == reading.totals.stepped
    assert add_up(broker.rows()).balance() == 0


@pytest.mark.chaos
def test_a_zombie_worker_is_fenced_and_its_remaining_steps_are_counted(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker(lease_s=1.0)
    witness = Witness()
    with EpisodeStream(broker.endpoints.learner) as stream, start_worker(tmp_path, broker) as zombie:
        wait_until(lambda: stream.next(0.1) and accepted(broker, 1) > 2, "three batches")

        def stops_between_two_cuts() -> bool:
            zombie.signal(signal.SIGSTOP)
            reading = read_recorder(tmp_path / "worker-0-1.rec")
            if reading is not None and reading.totals.open:
                return True
            zombie.signal(signal.SIGCONT)
            return False

        wait_until(stops_between_two_cuts, "a stop with steps that are not cut yet")
        wait_until(lambda: not broker.ask(lambda b: b.core.live()), "the end of its lease")
        with start_worker(tmp_path, broker, 2) as replacement:
            wait_until(lambda: stream.next(0.1) and accepted(broker, 2) > 0, "a batch of the replacement")
            zombie.signal(signal.SIGCONT)
            assert zombie.wait() == ExitCode.FENCED, zombie.log.read_text()
            assert "has a newer incarnation than 1" in zombie.log.read_text()
            report_death(broker, tmp_path, 1, "fenced")
            replacement.signal(signal.SIGTERM)
            drain(stream, witness.see_any)
            assert replacement.wait() == 0
        row = closed_row(broker, 1, take=lambda: drain(stream, witness.see_any))
        closed_row(broker, 2, take=lambda: drain(stream, witness.see_any))
    assert row.totals.discarded.get("fenced", 0) + row.lost.get("fenced", (0, 0))[0] > 0
    assert set(row.lost) <= {"fenced"}
    assert add_up(broker.rows()).balance() == 0
