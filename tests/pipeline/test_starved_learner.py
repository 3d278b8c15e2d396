"""A learner that waits for more steps than the workers' windows allow trains on the steps it has, without a stall."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from headrace.learner_stub import EpisodeStream
from headrace.learner_stub.reference.training import gather
from headrace.learner_stub.streaming import stall_detector
from headrace.schemas.accounts.ledger import HeldBatch, WorkerTotals, add_up
from headrace.schemas.basics.bounds import WINDOW
from headrace.schemas.messages import WorkerHello
from headrace.schemas.settings.config_loading import build_config
from headrace.workers.envs import restarts
from headrace.workers.fleet.session import WorkerSession
from headrace.workers.fleet.window import SessionLimits, Shipment
from support.pipeline.delivery import FLEET, BrokerThread, Envs, StartFeeder
from support.pipeline.worker_threads import WorkerThread
from support.waiting import wait_until

FRAGMENT, NUM_ENVS = 16, 4
SAMPLING: dict[str, Any] = {
    "env": "support.envs.down:one_of_four",
    "num_envs": NUM_ENVS,
    "rollout_fragment_length": FRAGMENT,
}
NEVER = threading.Event()


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", 600.0)
    monkeypatch.setattr(stall_detector, "STARVED_S", 1.0)  # five heartbeats of these brokers


def _filled(batches: int, steps: int, **limits: Any) -> WorkerSession:
    session = WorkerSession(WorkerHello(fleet_id=FLEET, token="t", slot=0), SessionLimits(**limits))
    for _ in range(batches):
        held = HeldBatch(seq=session.next_seq, steps=steps, chunks=1)
        session.submit(Shipment(held, 1, [b"x"], WorkerTotals()))
    return session


def test_small_batches_fill_a_window_of_steps_up_to_the_recorders_capacity() -> None:
    assert not _filled(4, 64, window_batches=4, window_steps=256).has_room()
    assert _filled(4, 63, window_batches=4, window_steps=256).has_room()
    assert _filled(15, 16, window_batches=4, window_steps=256).has_room()
    assert not _filled(16, 16, window_batches=4, window_steps=256).has_room()
    assert not _filled(WINDOW - 1, 0, window_batches=4, window_steps=256).has_room()
    assert not _filled(4, 16, window_batches=4, window_steps=256, window_bytes=4).has_room()


def test_a_window_counts_steps_of_full_batches_unless_window_batches_is_set() -> None:
    sampling = {"num_envs": 8, "rollout_fragment_length": 64}
    default = build_config({"sampling": sampling})
    assert default.window_steps() == default.window_batches() * 8 * 64
    two = build_config({"sampling": {**sampling, "policies": {"one": {}, "two": {}}}})
    assert two.window_steps() == two.window_batches() // 2 * 8 * 64
    assert build_config({"sampling": sampling, "worker": {"window_batches": 9}}).window_steps() == 0
    assert build_config({"sampling": {**sampling, "batch_mode": "complete_episodes"}}).window_steps() == 0


def test_a_learner_takes_the_batches_it_has_when_all_its_workers_wait_for_it(
    broker: BrokerThread, start_feeder: StartFeeder, caplog: pytest.LogCaptureFixture
) -> None:
    plan = Envs().fragments(9)
    feeders = [start_feeder(broker.endpoints.worker, plan, slot=slot, window=3) for slot in (0, 1)]
    with EpisodeStream(broker.endpoints.learner, auto_commit=False) as stream:
        for turn in (1, 2):
            assert not stream.starved
            assert len(gather(stream, 1_000_000, NEVER)) == 6, f"all that the two may have under way, turn {turn}"
            stream.commit()
            assert not stream.starved, "a commit makes room"
        last = gather(stream, sum(batch.steps for batch in plan[6:]) * 2, NEVER)
        stream.commit()
        wait_until(lambda: all(feeder.all_settled() for feeder in feeders), "all settled")
    assert len(last) == 6
    assert [record.levelname for record in caplog.records if "every worker waits" in record.message] == ["WARNING"] * 2
    assert add_up(broker.rows()).balance() == 0


def test_a_window_exactly_as_large_as_an_update_does_not_starve_the_learner(
    broker: BrokerThread, start_feeder: StartFeeder, caplog: pytest.LogCaptureFixture
) -> None:
    plan = Envs(ends=0.0, fails=0.0).fragments(12)
    feeder = start_feeder(broker.endpoints.worker, plan, window=3)
    with EpisodeStream(broker.endpoints.learner, auto_commit=False) as stream:
        for turn in range(4):
            steps = sum(batch.steps for batch in plan[3 * turn : 3 * turn + 3])
            assert len(gather(stream, steps, NEVER)) == 3
            stream.commit()
        wait_until(feeder.all_settled, "all settled")
    assert "every worker waits" not in caplog.text


@pytest.mark.long
@pytest.mark.parametrize(("window", "steps"), [(None, 2 * NUM_ENVS * FRAGMENT), (2, 2 * FRAGMENT)])
def test_a_worker_whose_envs_are_down_does_not_hold_up_the_learner(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, window: int | None, steps: int
) -> None:
    """Its own window makes room for a whole update's steps; one that was set to less makes updates smaller."""
    update = 2 * NUM_ENVS * FRAGMENT
    sections = {"sampling": SAMPLING, "learner": {"steps_per_update": update}}
    sections["worker"] = {"window_batches": window, "random_actions_before_weights": True}
    with (
        EpisodeStream(broker.endpoints.learner, auto_commit=False) as stream,
        WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections),
    ):
        for _ in range(3):
            assert sum(batch.steps for batch in gather(stream, update, NEVER)) == steps
            stream.commit()
