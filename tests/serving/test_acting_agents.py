"""An acting client of several agents: the worker takes each chunk once, and no episode stays open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk
from headrace.schemas.errors import DecodeError
from headrace.schemas.errors.episodes import EpisodeAbortedError
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner
from headrace.workers.connectors import FrameStack
from support.serving.acting_clients import PAIR, PAIR_ENV, ServingRunner, acting, external, play_pair, serving_runner
from support.waiting import wait_until

QUICK: dict[str, Any] = {**PAIR, "external_fragment_max_age_s": 0.1}


def test_a_lost_client_leaves_an_aborted_marker_for_each_agent() -> None:
    with serving_runner(**QUICK) as there, acting(there.endpoint, **QUICK) as client:
        episode = client.start_episode()
        seen = {"short": np.zeros(4), "long": np.zeros(4)}
        for _ in range(3):
            client.get_action(episode, seen)
        wait_until(lambda: {chunk.agent_id for chunk in there.chunks} == {"short", "long"}, what="chunks of both")
        dispatcher: Any = there.runner.env.dispatcher
        dispatcher.post(lambda sessions, now: sessions._close(client._acting._link.session, "client_lost"))
        wait_until(lambda: len(markers(there)) == 2, what="the markers")
        assert {marker.end_reason for marker in markers(there)} == {"client_lost"}
        with pytest.raises(EpisodeAbortedError):
            wait_until(lambda: client.get_action(episode, seen) is None, what="the end of the episode")
        play_pair(client, 8, 1)
    assert client.failure is None
    assert {marker.module_id for marker in markers(there)} == {"short", "long"}


def markers(there: ServingRunner) -> list[EpisodeChunk]:
    return [chunk for chunk in there.chunks if chunk.end is ChunkEnd.ABORTED]


def test_steps_of_untrained_episodes_are_counted_as_discarded() -> None:
    with serving_runner(**PAIR) as there:
        with acting(there.endpoint, **PAIR) as client:
            play_pair(client, 10, 3, training_enabled=False)
        steps = client._acting._runner.totals.stepped
    assert there.runner.totals.discarded == {"training_disabled": steps}
    assert there.runner.totals.env_steps == there.runner.totals.env_steps_discarded == 30
    assert there.runner.get_metrics()["num_untrained_episodes_lifetime"] == 3


def test_policy_columns_accept_batches_of_their_own_module_only() -> None:
    policies = {"short": "headrace.workers.modules:lstm_actor_critic", "long": None}
    settings: dict[str, Any] = {"policies": policies, "env_to_module": [FrameStack], "episode_lookback_horizon": 2}
    with MultiAgentEnvRunner(
        EnvRunnerConfig(env=PAIR_ENV, num_envs=2, rollout_fragment_length=8, **settings)
    ) as runner:
        columns, batches = runner.policy_columns(), runner.sample_fragment().batches
    assert columns.keys() == batches.keys() == {"short", "long"}
    for module_id, batch in batches.items():
        columns[module_id].check(external(batch))
    with pytest.raises(DecodeError, match="column 'state_in/"):
        columns["short"].check(external(batches["long"]))
