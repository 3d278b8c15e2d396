"""The worker with real envs and a real policy: labels, oversize batches, leaving, and dying in every way."""

from __future__ import annotations

import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.learner_stub.module import build_module
from headrace.schemas.config import ModuleSection
from headrace.schemas.config_loading import build_config
from headrace.schemas.errors import ExitCode, HeadraceError, RefusedError
from headrace.schemas.ledger import LedgerRow, add_up
from headrace.schemas.messages import Obituary, SupervisorHello
from headrace.schemas.recorder import read_recorder
from headrace.schemas.spaces import Spaces
from headrace.schemas.weights import weights_digest
from headrace.workers.fleet import worker as worker_module
from support.pipeline.parties import FLEET, BrokerThread, Process, RawPeer, StartBroker, Witness, until, worker_process

SAMPLING: dict[str, Any] = {"env": "CartPole-v1", "num_envs": 2, "rollout_fragment_length": 16, "seed": 1}
AT_RANDOM = {"sampling": SAMPLING, "worker": {"random_actions_before_weights": True, "drain_timeout_s": 5.0}}


class WorkerThread:
    """`run_worker` in a thread, stopped by an event instead of SIGTERM."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, endpoint: str, recorders: Path, sections: dict[str, Any]
    ) -> None:
        self.stopping = threading.Event()
        self.error: HeadraceError | None = None
        monkeypatch.setattr(worker_module, "stop_signals", lambda: nullcontext(self.stopping))
        self._arguments: dict[str, Any] = {"endpoint": endpoint, "fleet_id": FLEET, "recorder_dir": recorders}
        self._config = build_config(sections)
        self._thread = threading.Thread(target=self._run, name="worker")

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def check(self) -> None:
        """Raise what has ended it, if something has."""
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            worker_module.run_worker(self._config, slot=0, incarnation=1, **self._arguments)
        except HeadraceError as error:
            self.error = error

    def __enter__(self) -> WorkerThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._thread.join(60.0)


def drain(stream: EpisodeStream, witness: Witness) -> None:
    """Take what is there."""
    while (batch := stream.next(0.3)) is not None:
        witness.see_any(batch)


def closed_row(broker: BrokerThread, incarnation: int = 1) -> LedgerRow:
    """The row of slot 0, once its books are closed and nothing is held; it must add up."""

    def find() -> LedgerRow | None:
        row = broker.rows().get((0, incarnation))
        return row if row is not None and row.closed and row.held == (0, 0) else None

    until(find, f"closed books of incarnation {incarnation}")
    row = broker.rows()[(0, incarnation)]
    assert not list(row.problems())
    return row


def constant_value(spaces: Spaces, value: float) -> dict[str, NDArray[Any]]:
    """Weights under which the policy's value is `value` everywhere, and its actions are even."""
    state = build_module(ModuleSection(), spaces).state_dict()
    arrays = {name: np.zeros(tuple(tensor.shape), np.float32) for name, tensor in state.items()}
    arrays["head.bias"][-1] = value
    return arrays


def test_the_label_on_data_is_that_of_the_weights_in_use(
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
                batch = stream.next(100.0)
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


def test_a_batch_too_large_for_the_broker_is_dropped_by_name_and_its_episodes_are_ended(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broker = start_broker(max_batch_bytes=1 << 16)
    sections = {**AT_RANDOM, "sampling": {**SAMPLING, "num_envs": 8, "rollout_fragment_length": 256}}
    with (
        EpisodeStream(broker.endpoints.learner) as stream,
        WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections) as worker,
    ):
        until(lambda: [r for r in broker.rows().values() if "oversize" in r.settled.dropped], "an oversize batch")
        worker.stopping.set()
        drain(stream, Witness())
        row = closed_row(broker)
        drain(stream, Witness())
    assert row.settled.dropped["oversize"][0] == stream.dropped["oversize"] >= 2048
    assert add_up(broker.rows()).balance() == 0


def test_other_spaces_end_the_worker_with_an_error(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start_feeder: Any
) -> None:
    feeder = start_feeder(broker.endpoints.worker, slot=5)
    until(lambda: feeder.session.welcome, "the first worker")
    with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, AT_RANDOM) as worker:
        until(lambda: worker.error, "a refusal")
    assert isinstance(worker.error, RefusedError)
    assert "give every worker the same env" in str(worker.error)


# -- processes --------------------------------------------------------------------------------------------------------


def start_worker(run_dir: Path, broker: BrokerThread, incarnation: int = 1) -> Process:
    return worker_process(run_dir, broker.endpoints.worker, 0, incarnation, AT_RANDOM)


def report_death(broker: BrokerThread, run_dir: Path, incarnation: int, reason: str) -> None:
    """What a supervisor does: read the recorder, and tell the broker until it answers."""
    reading = read_recorder(run_dir / f"worker-0-{incarnation}.rec")
    assert reading is not None
    words = Obituary(
        slot=0,
        incarnation=incarnation,
        totals=reading.totals,
        settled=reading.settled,
        window=reading.window,
        reason=reason,
    )
    with RawPeer(broker.endpoints.worker) as peer:
        peer.send(SupervisorHello(fleet_id=FLEET, token="s").frames())
        peer.send(words.frames())
        until(lambda: broker.rows()[(0, incarnation)].closed, "closed books")


def accepted(broker: BrokerThread, incarnation: int) -> int:
    row = broker.rows().get((0, incarnation))
    return row.totals.seq if row is not None else 0


@pytest.mark.chaos
def test_sigterm_drains_and_closes_the_books(broker: BrokerThread, tmp_path: Path) -> None:
    witness = Witness()
    with EpisodeStream(broker.endpoints.learner) as stream, start_worker(tmp_path, broker) as worker:
        until(lambda: stream.next(0.1), "a first batch")
        stream.commit()
        worker.signal(signal.SIGTERM)
        drain(stream, witness)
        assert worker.wait() == 0, worker.log.read_text()
        drain(stream, witness)
        row = closed_row(broker)
    assert row.lost == {}
    assert row.totals.open == 0
    assert row.totals.stepped == row.settled.committed[0] + sum(row.totals.discarded.values())
    assert add_up(broker.rows()).balance() == 0


@pytest.mark.chaos
def test_after_sigkill_the_recorder_makes_the_books_balance(broker: BrokerThread, tmp_path: Path) -> None:
    witness = Witness()
    with EpisodeStream(broker.endpoints.learner) as stream, start_worker(tmp_path, broker) as worker:
        until(lambda: stream.next(0.1) and accepted(broker, 1) > 5, "six batches")
        worker.signal(signal.SIGKILL)
        assert worker.wait() == -signal.SIGKILL
        report_death(broker, tmp_path, 1, "worker_killed")
        drain(stream, witness)
        row = closed_row(broker)
        assert set(witness.markers.values()) == {"worker_killed"}
    reading = read_recorder(tmp_path / "worker-0-1.rec")
    assert reading is not None
    assert row.totals.stepped == reading.totals.stepped
    assert add_up(broker.rows()).balance() == 0


@pytest.mark.chaos
def test_a_zombie_is_fenced_and_what_it_had_left_is_counted(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = start_broker(lease_s=1.0)
    witness = Witness()
    with EpisodeStream(broker.endpoints.learner) as stream, start_worker(tmp_path, broker) as zombie:
        until(lambda: stream.next(0.1) and accepted(broker, 1) > 2, "three batches")
        zombie.signal(signal.SIGSTOP)
        until(lambda: not broker.ask(lambda b: b.core.live()), "the end of its lease")
        with start_worker(tmp_path, broker, 2) as replacement:
            until(lambda: stream.next(0.1) and accepted(broker, 2) > 0, "a batch of the replacement")
            zombie.signal(signal.SIGCONT)
            assert zombie.wait() == ExitCode.FENCED, zombie.log.read_text()
            assert "has a newer incarnation than 1" in zombie.log.read_text()
            report_death(broker, tmp_path, 1, "fenced")
            replacement.signal(signal.SIGTERM)
            drain(stream, witness)
            assert replacement.wait() == 0
            drain(stream, witness)
        row = closed_row(broker, 1)
        closed_row(broker, 2)
    assert row.totals.discarded.get("fenced", 0) + row.lost.get("fenced", (0, 0))[0] > 0
    assert set(row.lost) <= {"fenced"}
    assert add_up(broker.rows()).balance() == 0
