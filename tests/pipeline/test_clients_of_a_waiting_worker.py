"""A worker that waits takes no steps from its clients. Their errors name the reason; they continue when it does."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.errors import UnreachableError
from headrace.workers.modules import actor_critic
from headrace.workers.serving.client import PolicyClient
from support.pipeline.delivery import BrokerThread, worker_process
from support.pipeline.worker_threads import SAMPLING, in_run
from support.waiting import TIMEOUT_S

pytestmark = pytest.mark.processes
SEEN = np.zeros(4, np.float32)


def _heartbeat_over_http(port: int) -> Any:
    """Return the answer to a heartbeat, parsed."""
    told: Any = None
    for method, path in (("PUT", ""), ("POST", "/heartbeat")):
        url = f"http://127.0.0.1:{port}/v1/sessions/other{path}"
        request = urllib.request.Request(url, method=method, headers={"Headrace-Client": "secret"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            told = json.load(answer)
    return told


def _play(client: PolicyClient, episode: str) -> None:
    """More steps than two batches of four hold."""
    for _ in range(20):
        client.get_action(episode, SEEN)
        client.log_returns(episode, 1.0)


@pytest.mark.thorough
def test_client_errors_and_heartbeats_name_the_reason_why_the_worker_waits(
    broker: BrokerThread, free_port: int, tmp_path: Path
) -> None:
    fleet, address = in_run(tmp_path, "clients")
    sections: dict[str, Any] = {
        "fleet": fleet,
        "sampling": {**SAMPLING, "num_envs": 1, "rollout_fragment_length": 4},
        "serving": {"enabled": True, "http_port": free_port},
        "worker": {"window_batches": 2},
        "learner": {"enabled": False},
    }
    with (
        EpisodeStream(broker.endpoints.learner, auto_commit=False) as stream,
        WeightPublisher(broker.endpoints.learner) as weights,
        worker_process(tmp_path, broker.endpoints.worker, 0, 1, sections) as worker,
        PolicyClient(address, timeout_s=2.0, connect_timeout_s=TIMEOUT_S) as client,
    ):
        episode = client.start_episode()
        with pytest.raises(
            UnreachableError, match=r"waits for the first weights \(held up by: learner\); repeat the call"
        ):
            client.get_action(episode, SEEN)
        weights.publish(actor_critic(stream.spaces()).state_dict())
        why = r"within 2 s: its worker waits for room in the window \(held up by: learner\)"
        with pytest.raises(UnreachableError, match=why):
            _play(client, episode)
        assert _heartbeat_over_http(free_port) == {"waiting_for": "room in the window (held up by: learner)"}
        taken = 0
        while taken < 8:
            batch = stream.next(20.0)
            assert batch is not None
            taken += batch.steps
        stream.commit()
        client.get_action(episode, SEEN)
        assert _heartbeat_over_http(free_port) == {}
        worker.popen.kill()
        worker.popen.wait(20.0)
        with pytest.raises(UnreachableError, match="no policy server answers"):
            client.get_action(episode, SEEN)
