"""A recording of a live stream read back: its batches, and the PPO update that they make, are equal to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install 'headrace[record]'")

from headrace.deploy.annexes.recording import recording_loop
from headrace.deploy.annexes.recording.recording_folder import RecordingFolder, numbered
from headrace.deploy.annexes.recording.recording_loop import Recording
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.learner_stub.reference.ppo import PPO
from headrace.learner_stub.rollouts.module import build_module
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import RunDirError
from headrace.schemas.settings.config import LearnerSection, ModuleSection
from support.pipeline.delivery import BrokerThread, StartBroker
from support.pipeline.same_batches import contents
from support.pipeline.worker_threads import SAMPLING, WorkerThread
from support.waiting import TIMEOUT_S

BATCHES = 40

Train = Callable[[ChunkBatch | None], Any]
Record = Callable[..., tuple[list[ChunkBatch], list[ChunkBatch]]]


def recorded(batch: ChunkBatch, *without: str) -> dict[str, Any]:
    """Return the contents of a batch that a recording keeps. It has no counts of episodes."""
    return contents(batch, without=["episode_ends", *without])


def test_a_recording_without_a_batch_so_far_is_an_empty_stream(tmp_path: Path) -> None:
    with RecordingFolder(tmp_path / "recording"), EpisodeStream.of(tmp_path / "recording") as stream:
        assert list(stream) == []
        for ask in (stream.spaces, stream.episodes):  # type: ignore[attr-defined]
            with pytest.raises(RunDirError, match="recording has no batch yet"):
                ask()


class Learner:
    """PPO from the same weights each time, an update for each four batches."""

    def __init__(self, spaces: Spaces) -> None:
        self._ppo = PPO(build_module(ModuleSection(), spaces), LearnerSection(epochs=2, minibatch_size=32))
        self._batches: list[ChunkBatch] = []
        self.states = [self._state()]
        """The weights and the state of the optimizer, at first and after each update."""

    def see(self, batch: ChunkBatch | None) -> Any:
        """Train on the batch once there are four. Return new weights."""
        if batch is not None:
            self._batches.append(batch)
        if 0 < len(self._batches) < 4:
            return None
        if self._batches:
            self._ppo.update(self._batches)
            self._batches = []
            self.states.append(self._state())
        return self._ppo.weights()

    def _state(self) -> Any:
        state, arrays = self._ppo.get_state()
        return state, {name: array.tobytes() for name, array in arrays.items()}


@pytest.fixture
def broker(start_broker: StartBroker) -> BrokerThread:
    """A broker whose workers wait for the group "record"."""
    return start_broker(consumer_groups={"record": "wait"})


@pytest.fixture
def record(broker: BrokerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """`record(sections, path, begin)`: what the recorder of a fleet of one worker was handed, and what its learner was.

    `begin(spaces)` returns a function that is called with None, and then with each batch of the learner. It returns
    weights to publish, or None.
    """

    def run(
        sections: dict[str, Any], path: Path, begin: Callable[[Spaces], Train] = lambda spaces: lambda batch: None
    ) -> tuple[list[ChunkBatch], list[ChunkBatch]]:
        monkeypatch.setattr(recording_loop, "FLUSH_BATCHES", 7)
        endpoint, stopping = broker.endpoints.learner, threading.Event()
        handed: list[ChunkBatch] = []
        trained: list[ChunkBatch] = []
        with (
            EpisodeStream(endpoint) as train_on,
            WeightPublisher(endpoint) as weights,
            EpisodeStream(endpoint, group="record", auto_commit=False) as stream,
            RecordingFolder(path) as folder,
            WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path / "recorders", sections),
        ):
            train = begin(next(iter(train_on.module_spaces(timeout_s=TIMEOUT_S).values())))
            if (first := train(None)) is not None:
                weights.publish(first)
            take = stream.next

            def next_of_both(timeout_s: float) -> ChunkBatch | None:
                if (own := train_on.next(0.02)) is not None:
                    trained.append(own)
                    if (newer := train(own)) is not None:
                        weights.publish(newer)
                if (batch := take(timeout_s)) is not None:
                    handed.append(batch)
                if min(len(handed), len(trained)) >= BATCHES:
                    stopping.set()
                return batch

            monkeypatch.setattr(stream, "next", next_of_both)
            Recording(stream, folder).run(stopping)
        return handed, trained

    return run


FLEETS = {
    "one agent": {"env": "support.envs.counting:Unsound"},
    "several agents": {
        "env": "support.pipeline.several_agents:ComeAndGo",
        "policies": {"one": {}, "two": {}},
        "policy_mapping_fn": "support.pipeline.several_agents:by_episode",
    },
    "a picture in a dict": {"env": "support.envs.scene:Scene", "episode_lookback_horizon": 3},
}


@pytest.mark.parametrize("kind", FLEETS)
def test_each_batch_of_a_live_group_comes_back_to_the_bit(record: Record, tmp_path: Path, kind: str) -> None:
    sampling = {"num_envs": 3, "rollout_fragment_length": 8, "seed": 1, "env_restart_attempts": 1000, **FLEETS[kind]}
    path = tmp_path / "recording"
    handed, _ = record({"sampling": sampling, "worker": {"random_actions_before_weights": True}}, path)
    back = list(EpisodeStream.of(path))
    assert [recorded(batch) for batch in back] == [recorded(batch) for batch in handed]
    assert len(back) >= BATCHES
    assert max(numbered(path, "batches")) > 3
    assert {chunk.end for batch in back for chunk in batch} >= {ChunkEnd.ABORTED, ChunkEnd.TERMINATED}
    assert len({batch.modules[0] for batch in back}) == (2 if kind == "several agents" else 1)
    if kind == "a picture in a dict":
        assert any(batch.infos for batch in back)
        assert any(chunk.lookback for batch in back for chunk in batch)


def test_a_learner_of_the_recording_takes_the_same_steps_as_the_live_one(record: Record, tmp_path: Path) -> None:
    path, learners = tmp_path / "recording", list[Learner]()

    def begin(spaces: Spaces) -> Train:
        learners.append(Learner(spaces))
        return learners[0].see

    handed, trained = record({"sampling": SAMPLING}, path, begin)
    with EpisodeStream.of(path) as stream:
        later = Learner(stream.spaces())
        back = [batch for batch in stream if later.see(batch) or True]
    assert [recorded(batch) for batch in back] == [recorded(batch) for batch in handed]
    assert len({batch.newest for batch in back}) > 1
    for own, live in zip(back, trained, strict=False):
        assert recorded(own, "newest") == recorded(live, "newest")
    updates = min(len(later.states), len(learners[0].states))
    assert updates > BATCHES // 4
    assert later.states[:updates] == learners[0].states[:updates]
    assert len({version for batch in back for version in batch.columns["weights_seq"].tolist()}) > 1
