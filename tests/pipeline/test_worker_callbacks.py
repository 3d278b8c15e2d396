"""Callbacks in a worker: they get each sent chunk, and a callback that raises ends the worker with closed books."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.learner_stub import EpisodeStream
from headrace.schemas.errors import CallbackError, EnvRestartBudgetError, ExitCode
from headrace.workers.envs import restarts
from support.pipeline import worker_callbacks
from support.pipeline.delivery import BrokerThread, Witness
from support.pipeline.worker_threads import AT_RANDOM, SAMPLING, WorkerThread, closed_row, drain
from support.waiting import TIMEOUT_S, wait_until


def _config(callback: str, **sampling: Any) -> dict[str, Any]:
    return {
        **AT_RANDOM,
        "sampling": {**SAMPLING, "callbacks": [f"support.pipeline.worker_callbacks:{callback}"], **sampling},
    }


def test_the_callback_gets_every_chunk_that_was_sent(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker_callbacks.sent.clear()
    received = []
    with EpisodeStream(broker.endpoints.learner) as stream:
        with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path / "recorders", _config("Sent")) as worker:
            for _ in range(3):
                batch = stream.next(TIMEOUT_S)
                assert batch is not None
                received += [(c.episode_id, c.chunk_index, len(c)) for c in batch]
        assert worker.error is None
        while (batch := stream.next(0.3)) is not None:
            received += [(c.episode_id, c.chunk_index, len(c)) for c in batch]
    assert sorted(received) == sorted(worker_callbacks.sent)
    assert received[-1][2] == 0  # the marker of an unfinished episode, sent while leaving


@pytest.mark.parametrize(
    ("callback", "event", "steps"), [("SampleRaises", "on_sample_end", 96), ("ChunkRaises", "on_chunk_sent", 32)]
)
def test_a_callback_that_raises_ends_the_worker_and_no_step_is_lost(
    callback: str, event: str, steps: int, broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with EpisodeStream(broker.endpoints.learner) as stream:
        with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path / "recorders", _config(callback)) as worker:
            wait_until(lambda: worker.error, "the worker's error")
        assert isinstance(worker.error, CallbackError)
        assert (worker.error.event, worker.error.exit_code) == (event, ExitCode.CALLBACK)
        witness = Witness()
        row = closed_row(broker, take=lambda: drain(stream, witness.see_any))
    assert row.totals.stepped == row.accepted[0] == steps
    assert not row.totals.discarded


def test_episodes_that_a_callback_fails_are_counted_in_the_books(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", 0.0)
    config = _config("StepRaises", env_restart_attempts=2)
    with EpisodeStream(broker.endpoints.learner) as stream:
        with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path / "recorders", config) as worker:
            wait_until(lambda: worker.error, "the worker's error")
        assert isinstance(worker.error, EnvRestartBudgetError)
        witness = Witness()
        row = closed_row(broker, take=lambda: drain(stream, witness.see_any))
    assert row.totals.discarded["callback_exception"] == 18  # two envs, three attempts each
