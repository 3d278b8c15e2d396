"""A client that acts by itself for several agents: its chunks are the worker's own, each taken once, none left open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.schemas.chunk import ChunkEnd, EpisodeChunk
from headrace.schemas.episode_errors import EpisodeAbortedError
from headrace.schemas.errors import DecodeError
from headrace.schemas.serving_errors import BadRequestError
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner
from headrace.workers.connectors import FrameStack
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.shipped_episodes import ShippedEpisodes
from support.serving.harbours import PAIR as ENV
from support.serving.harbours import Harbour, acting, assert_alike, external, harbour
from support.waiting import wait_until

PAIR: dict[str, Any] = {"policies": {"short": None, "long": None}, "missing_final_observation": "repeat"}
QUICK: dict[str, Any] = {**PAIR, "external_fragment_max_age_s": 0.1}


def play(client: Any, steps: int, episodes: int = 3, **of_episode: Any) -> None:
    """Agent "long" comes late, pauses, and is done before the end; the second episode has actions of the client's."""
    for number in range(episodes):
        rows = np.random.default_rng(number).uniform(-0.05, 0.05, (steps + 1, 2, 4)).astype(np.float32)
        episode = client.start_episode(**of_episode)
        for t, (short, long) in enumerate(rows[:-1]):
            seen = {"short": short, "long": long} if 2 <= t < steps - 2 and t % 5 else {"short": short}
            if number == 1 and t % 3 == 0:
                client.log_action(episode, seen, dict.fromkeys(seen, t % 2))
            else:
                assert client.get_action(episode, seen).keys() == seen.keys()
            client.log_returns(episode, {"short": 1.0, "long": 0.5 * (t > 2)}, {"short": {"t": t}})
        client.end_episode(episode, {"short": rows[-1][0]}, truncated=number == 2)


def by_part(chunks: list[EpisodeChunk]) -> list[list[EpisodeChunk]]:
    """Each agent's of each episode, episodes in the order in which they began."""
    begun: dict[str, int] = {}
    found: dict[tuple[int, str], list[EpisodeChunk]] = {}
    for chunk in chunks:
        number = begun.setdefault(chunk.episode_id, len(begun))
        found.setdefault((number, chunk.agent_id), []).append(chunk)
    return [found[part] for part in sorted(found)]


def test_chunks_are_the_same_to_the_bit_whoever_infers() -> None:
    with harbour(**PAIR) as there, PolicyClient(there.endpoint, timeout_s=30) as client:
        play(client, 45)
    with harbour(**PAIR) as here, acting(here.endpoint, **PAIR) as client:
        play(client, 45)
    served, acted = by_part(there.chunks), by_part(here.chunks)
    assert len(served) == len(acted) == 6
    assert max(map(len, served)) > 1, "some episode is cut"
    for ours, theirs in zip(acted, served, strict=True):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_alike(a, b)
    for name in ("stepped", "env_steps", "env_steps_delivered", "episodes", "discarded"):
        assert getattr(here.runner.totals, name) == getattr(there.runner.totals, name), name
    report, other = here.runner.get_metrics(), there.runner.get_metrics()
    for name in ("num_episodes_lifetime", "episode_return_mean", "episode_len_mean", "agent_episode_returns_mean"):
        assert report[name] == other[name], name


def test_who_vanishes_leaves_a_marker_for_each_agent() -> None:
    with harbour(**QUICK) as there, acting(there.endpoint, **QUICK) as client:
        episode = client.start_episode()
        seen = {"short": np.zeros(4), "long": np.zeros(4)}
        for _ in range(3):
            client.get_action(episode, seen)
        wait_until(lambda: {chunk.agent_id for chunk in there.chunks} == {"short", "long"}, what="chunks of both")
        dispatcher: Any = there.runner.env.server.dispatcher
        dispatcher.post(lambda sessions, now: sessions._close(client._link.session, "client_lost"))
        wait_until(lambda: len(markers(there)) == 2, what="the markers")
        assert {marker.end_reason for marker in markers(there)} == {"client_lost"}
        with pytest.raises(EpisodeAbortedError):
            wait_until(lambda: client.get_action(episode, seen) is None, what="the end of the episode")
        play(client, 8, 1)
    assert client.failure is None
    assert {marker.module_id for marker in markers(there)} == {"short", "long"}


def markers(there: Harbour) -> list[EpisodeChunk]:
    return [chunk for chunk in there.chunks if chunk.end is ChunkEnd.ABORTED]


def test_episodes_that_are_not_to_be_trained_on_are_only_counted() -> None:
    with harbour(**PAIR) as there:
        with acting(there.endpoint, **PAIR) as client:
            play(client, 10, 3, training_enabled=False)
        steps = client._runner.totals.stepped
    assert there.runner.totals.discarded == {"training_disabled": steps}
    assert there.runner.totals.env_steps == there.runner.totals.env_steps_discarded == 30
    assert there.runner.get_metrics()["num_untrained_episodes_lifetime"] == 3


def test_env_steps_that_do_not_rise_from_the_start_of_a_chunk_are_refused() -> None:
    with MultiAgentEnvRunner(EnvRunnerConfig(env=ENV, num_envs=1, rollout_fragment_length=8, **PAIR)) as runner:
        batch = runner.sample_fragment().batches["short"]
    for at, wrong in ((0, 1), (3, 2), (7, (1 << 63) - 1)):
        env_t = np.arange(8)
        env_t[at] = wrong
        with pytest.raises(BadRequestError, match="should rise from its start, 0"):
            ShippedEpisodes(1).take("a client", replace(batch, columns={**batch.columns, "env_t": env_t}))
    assert len(ShippedEpisodes(1).take("a client", batch)) == len(batch)


def test_the_columns_that_are_expected_of_each_module_are_those_of_its_own_batches() -> None:
    policies = {"short": "headrace.workers.modules:lstm_actor_critic", "long": None}
    settings: dict[str, Any] = {"policies": policies, "env_to_module": [FrameStack], "episode_lookback_horizon": 2}
    with MultiAgentEnvRunner(EnvRunnerConfig(env=ENV, num_envs=2, rollout_fragment_length=8, **settings)) as runner:
        columns, batches = runner.policy_columns(), runner.sample_fragment().batches
    assert columns.keys() == batches.keys() == {"short", "long"}
    for module_id, batch in batches.items():
        columns[module_id].check(external(batch))
    with pytest.raises(DecodeError, match="column 'state_in/"):
        columns["short"].check(external(batches["long"]))
