"""Compressed batches: the learner gets the same batches, also when the worker, the broker or the learner lacks lz4."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.broker.sessions import worker_sessions
from headrace.learner_stub import EpisodeStream
from headrace.learner_stub.streaming import session as learner_session
from headrace.schemas.accounts.ledger import Count
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.errors import ConfigError
from headrace.schemas.frames.wire import Buffer, decode, encode, is_compressed
from support.pipeline.delivery import BrokerThread, Envs, StartBroker, StartFeeder
from support.pipeline.worker_threads import SAMPLING, WorkerThread, closed_row, drain
from support.waiting import TIMEOUT_S, wait_until

BATCHES = 4


class Still(gymnasium.Env[NDArray[np.float32], np.int64]):
    """An env in which nothing changes, so that its batches shrink very far."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(1)  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(4, np.float32), 0.0, False, False, {}


def sections(compression: str) -> dict[str, Any]:
    sampling = {**SAMPLING, "num_envs": 8, "rollout_fragment_length": 64}
    return {"sampling": sampling, "worker": {"random_actions_before_weights": True, "compression": compression}}


def compressed_frames(seq: int, frames: list[Buffer]) -> list[Buffer]:
    message = decode(frames)
    header = {name: value for name, value in message.header.items() if name != "payload"}
    return encode(message.kind, header, message.arrays, compressed=True)


def bytes_shipped(broker: BrokerThread) -> Count | None:
    return broker.ask(lambda it: next((source.figures.beat.bytes_shipped for source in it.core.live()), None))


def first_batches(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, run_dir: Path, compression: str
) -> tuple[list[ChunkBatch], Count]:
    """Return what the learner gets first, and the bytes that the worker says it has shipped. The books balance."""
    run_dir.mkdir()
    broker = start_broker(run_dir)
    with EpisodeStream(broker.endpoints.learner) as stream:
        with WorkerThread(monkeypatch, broker.endpoints.worker, run_dir, sections(compression)) as worker:
            batches = [stream.next(TIMEOUT_S) for _ in range(BATCHES)]
            shipped = wait_until(lambda: (told := bytes_shipped(broker)) and told[1] and told, "the bytes shipped")
        worker.check()
        closed_row(broker, take=lambda: drain(stream, lambda batch: None))
    assert None not in batches
    return [batch for batch in batches if batch is not None], shipped


def test_the_learner_gets_the_same_batches_in_fewer_bytes(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain, plainly = first_batches(start_broker, monkeypatch, tmp_path / "plain", "none")
    packed, packedly = first_batches(start_broker, monkeypatch, tmp_path / "packed", "lz4")
    own, _ = first_batches(start_broker, monkeypatch, tmp_path / "auto", "auto")
    assert plainly[1] > plainly[0], "messages have headers too"
    assert packedly[1] < 0.8 * packedly[0]
    for one, other, third in zip(plain, packed, own, strict=True):
        assert one.arrays.keys() == other.arrays.keys()
        for name, column in one.arrays.items():
            assert column.tobytes() == other.arrays[name].tobytes() == third.arrays[name].tobytes(), name


def test_the_broker_unpacks_batches_for_a_learner_without_lz4(
    broker: BrokerThread, start_feeder: StartFeeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_session, "readable_encodings", list)
    seen = watch_what_arrives(monkeypatch)
    batches = Envs().fragments(6, pixels=5000)
    with EpisodeStream(broker.endpoints.learner) as stream:
        feeder = start_feeder(broker.endpoints.worker, batches, alter=compressed_frames)
        check_all_arrive(stream, batches)
        wait_until(lambda: stream.next(0.1) is None and feeder.all_settled(), "settled batches")
    assert seen == [False] * len(batches)


def test_a_learner_with_lz4_gets_the_batches_compressed(
    broker: BrokerThread, start_feeder: StartFeeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_what_arrives(monkeypatch)
    batches = Envs().fragments(6, pixels=5000)
    with EpisodeStream(broker.endpoints.learner) as stream:
        start_feeder(broker.endpoints.worker, batches, alter=compressed_frames)
        check_all_arrive(stream, batches)
    assert seen == [True] * len(batches)


def test_a_worker_unpacks_its_unsettled_batches_for_a_new_broker_without_lz4(
    start_broker: StartBroker, start_feeder: StartFeeder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    batches = Envs().fragments(6, pixels=5000)
    first = start_broker(tmp_path)
    feeder = start_feeder(first.endpoints.worker, batches, alter=compressed_frames)
    wait_until(lambda: first.held_bytes() > 0 and feeder.all_shipped(), "batches at the first broker")
    first.stop()
    monkeypatch.setattr(worker_sessions, "readable_encodings", list)
    seen = watch_what_arrives(monkeypatch)
    second = start_broker(tmp_path)
    with EpisodeStream(second.endpoints.learner) as stream:
        check_all_arrive(stream, batches)
        wait_until(lambda: stream.next(0.1) is None and feeder.all_settled(), "settled batches")
    assert seen == [False] * len(batches)


def test_batches_with_more_steps_than_bytes_are_accepted(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    still = {**SAMPLING, "env": f"{__name__}:Still", "num_envs": 16, "rollout_fragment_length": 2048}
    settings = {**sections("lz4"), "sampling": still}
    with EpisodeStream(broker.endpoints.learner) as stream:
        with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, settings) as worker:
            batch = stream.next(TIMEOUT_S)
            shipped = wait_until(lambda: (told := bytes_shipped(broker)) and told[1] and told, "the bytes shipped")
        worker.check()
    assert batch is not None
    assert shipped[1] * 4 < shipped[0], "lz4 shrinks them far"
    assert batch.steps > shipped[1] / (shipped[0] / batch.nbytes), "more steps than bytes"


def test_a_worker_with_compression_lz4_but_no_lz4_names_the_package_to_install(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "lz4", None)
    with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections("lz4")) as worker:
        wait_until(lambda: worker.error is not None, "the worker's refusal")
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[lz4\]'"):
        worker.check()


def watch_what_arrives(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets, for each batch at the learner, whether it was compressed."""
    seen: list[bool] = []
    receive = learner_session.LearnerSession.receive_batch

    def note(session: Any, header: Any, unread: Any, now: float) -> None:
        seen.append(is_compressed(unread[0]))
        receive(session, header, unread, now)

    monkeypatch.setattr(learner_session.LearnerSession, "receive_batch", note)
    return seen


def check_all_arrive(stream: EpisodeStream, batches: list[ChunkBatch]) -> None:
    for batch in batches:
        arrived = stream.next(TIMEOUT_S)
        assert arrived is not None
        assert np.array_equal(arrived.columns["pixels"], batch.columns["pixels"])
        assert np.array_equal(arrived.arrays["obs"], batch.arrays["obs"])
