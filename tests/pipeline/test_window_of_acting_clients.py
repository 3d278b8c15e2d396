"""Acting clients fill a window as a worker's own envs do, and neither learner nor worker waits forever."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.learner_stub.reference.training import gather
from headrace.learner_stub.streaming import stall_detector
from headrace.schemas.accounts.ledger import add_up
from headrace.schemas.errors.episodes import EpisodeAbortedError, EpisodesClosedError
from headrace.workers import EnvRunnerConfig
from headrace.workers.modules import actor_critic
from headrace.workers.serving.acting import ActingClient
from support.pipeline.delivery import BrokerThread
from support.pipeline.worker_threads import WorkerThread, closed_row, in_run
from support.waiting import TIMEOUT_S

NUM_ENVS, FRAGMENT, WINDOW = 2, 8, 3
SAMPLING = {"num_envs": NUM_ENVS, "rollout_fragment_length": FRAGMENT}
UPDATE = WINDOW * NUM_ENVS * FRAGMENT
SEEN = np.zeros(4, np.float32)


def play(client: ActingClient, enough: threading.Event) -> None:
    """One long episode, alone: the client's batches are smaller than the worker's own would be."""
    episode = client.start_episode()
    while not enough.is_set():
        try:
            client.get_action(episode, SEEN)
        except (EpisodeAbortedError, EpisodesClosedError):  # the client was closed
            return


@pytest.mark.long
def test_a_learner_trains_though_a_window_of_client_chunks_is_below_an_update(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stall_detector, "STARVED_S", 1.0)  # five heartbeats of these brokers
    fleet, address = in_run(tmp_path, "clients")
    sections = {
        "fleet": fleet,
        "sampling": {"env": "CartPole-v1", **SAMPLING},
        "serving": {"enabled": True, "client_inference": True},
        "learner": {"steps_per_update": UPDATE},
        "worker": {"window_batches": WINDOW},
    }
    enough, too_late = threading.Event(), threading.Event()
    deadline = threading.Timer(60.0, too_late.set)
    deadline.start()
    with (
        EpisodeStream(broker.endpoints.learner, auto_commit=False) as stream,
        WeightPublisher(broker.endpoints.learner) as weights,
        WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections) as worker,
    ):
        weights.publish(actor_critic(stream.spaces(timeout_s=TIMEOUT_S)).state_dict())
        with ActingClient(address, EnvRunnerConfig(**SAMPLING)) as client:
            player = threading.Thread(target=play, args=(client, enough))
            player.start()
            for _ in range(2):
                assert sum(batch.steps for batch in gather(stream, UPDATE, too_late)) > 0
                stream.commit()
                assert not too_late.is_set(), "the learner waited for steps that could not come"
            enough.set()
            while player.is_alive():
                stream.next(0.1)
                stream.commit()
        while stream.next(0.5) is not None:
            stream.commit()
        worker.stopping.set()
        closed_row(broker, take=lambda: stream.next(0.1) and stream.commit())
    deadline.cancel()
    worker.check()
    assert add_up(broker.rows()).balance() == 0
