"""Acting clients with several agents, at a real worker and broker: the learner gets their steps like any others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.accounts.ledger import add_up
from headrace.workers import EnvRunnerConfig
from headrace.workers.modules import actor_critic
from headrace.workers.serving.acting import ActingClient
from support.pipeline.delivery import BrokerThread
from support.pipeline.several_agents import AgentWitness
from support.pipeline.worker_threads import WorkerThread, closed_row, drain, in_run
from support.waiting import TIMEOUT_S

SAMPLING: dict[str, Any] = {"num_envs": 4, "policies": {"short": {}, "long": {}}, "external_fragment_max_age_s": 0.2}
ENV = "headrace.workers.agents.examples:two_carts"


def play(client: ActingClient, steps: int, *, ends: bool = True) -> None:
    """Agent "long" is done halfway."""
    episode = client.start_episode()
    for t in range(steps):
        seen = {"short": np.zeros(4)} | ({"long": np.full(4, 0.1)} if t <= steps // 2 else {})
        client.get_action(episode, seen)
        client.log_returns(episode, dict.fromkeys(seen, 1.0), None, {"long": True} if t == steps // 2 else None)
    if ends:
        client.end_episode(episode, {"short": np.zeros(4)})


def test_each_client_step_reaches_the_learner_once_or_is_counted_as_discarded(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fleet, address = in_run(tmp_path, "clients")
    sections = {
        "fleet": fleet,
        "sampling": {"env": ENV, **SAMPLING},
        "serving": {"enabled": True, "client_inference": True},
        "worker": {"window_batches": 64},  # nothing is taken while the client plays
    }
    witness = AgentWitness()
    with (
        EpisodeStream(broker.endpoints.learner) as stream,
        WeightPublisher(broker.endpoints.learner) as weights,
        WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections) as worker,
    ):
        spaces = stream.module_spaces(timeout_s=TIMEOUT_S)
        weights.publish({module_id: actor_critic(own).state_dict() for module_id, own in spaces.items()})
        with ActingClient(address, EnvRunnerConfig(seed=1, **SAMPLING)) as client:
            for steps in (30, 50, 20):
                play(client, steps)
            play(client, 10, ends=False)
        totals = client._acting._runner.totals
        drain(stream, witness.see)
        worker.stopping.set()
        row = closed_row(broker, take=lambda: drain(stream, witness.see))
    assert client.failure is None
    assert worker.error is None
    assert not witness.open_episodes()
    assert dict(witness.steps) == row.totals.module_steps
    assert (row.totals.stepped, row.totals.env_steps) == (totals.stepped, totals.env_steps)
    assert row.settled.committed[0] == totals.stepped - sum(totals.discarded.values())
    assert row.totals.episodes == 3
    assert add_up(broker.rows()).balance() == 0
