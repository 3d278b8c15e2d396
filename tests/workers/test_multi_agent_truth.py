"""Chunks add up to the env's own record, wherever fragments are cut and however agents come, pause or leave."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk, to_episode
from support.envs.toy_agents import check_books, multi_runner, scheduled

pytestmark = pytest.mark.long

Lives = dict[tuple[int, int, str], list[EpisodeChunk]]


def _gather(lives: Lives, chunks: Any) -> None:
    for chunk in chunks:
        lives[chunk.env_index, chunk.seed, chunk.agent_id].append(chunk)


def _check_agent(agent: str, truth: dict[str, Any], chunks: list[EpisodeChunk]) -> None:
    assert [c.chunk_index for c in chunks] == list(range(len(chunks)))
    whole = to_episode(chunks)
    assert whole.is_done
    assert whole.actions.tolist() == truth["actions"][agent]
    assert whole.env_t.tolist() == truth["acted_at"][agent]
    assert whole.rewards.sum() == whole.episode_return == truth["rewards"][agent]
    seen = truth["seen"][agent]
    if len(seen) == len(whole):  # terminated without an observation: the one acted upon is repeated
        assert whole.is_terminated
        seen = [*seen, seen[-1]]
    np.testing.assert_array_equal(whole.obs, np.array(seen))
    assert all(c.t_start == c.env_t[0] for c in chunks if len(c))


def _check(truth: list[dict[str, Any]], lives: Lives) -> tuple[int, float]:
    """Compare all finished episodes; gives their number, and the rewards of agents that never acted."""
    finished, lost = 0, 0.0
    for episode in truth:
        if not episode["over"]:
            continue
        finished += 1
        for agent in episode["rewards"].keys() | episode["actions"].keys():
            if episode["actions"][agent]:
                _check_agent(agent, episode, lives[episode["env"], episode["seed"], agent])
            else:
                assert (episode["env"], episode["seed"], agent) not in lives
                lost += episode["rewards"][agent]
    return finished, lost


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_envs", "length"), [(1, 1), (1, 7), (3, 2), (8, 5)])
@pytest.mark.parametrize("policies", [{"shared": None}, {"even": None, "odd": None}])
def test_chunks_add_up_to_the_envs_own_record(num_envs: int, length: int, seed: int, policies: dict[str, None]) -> None:
    truth: list[dict[str, Any]] = []
    lives: Lives = defaultdict(list)

    def mapping(agent: str, episode_id: str) -> str:
        names = list(policies)
        return names[(int(agent[1:]) + int(episode_id, 16)) % len(names)]

    env = scheduled(truth, agents=2 + seed)
    settings = {"policies": policies, "policy_mapping_fn": mapping, "rollout_fragment_length": length, "seed": seed}
    with multi_runner(env, num_envs=num_envs, **settings) as sampler:
        while sampler.totals.episodes < 100:
            _gather(lives, sampler.sample_fragment())
            check_books(sampler)
        finished, lost = _check(truth, lives)
        metrics = sampler.get_metrics()
    assert finished == metrics["num_episodes"] == sampler.totals.episodes
    assert sampler.totals.env_failures == 0
    assert sampler.totals.discarded == {}
    assert metrics["agent_rewards_lost_lifetime"] == lost
    assert metrics["num_env_steps_sampled"] == sampler.totals.env_steps == sum(e["t"] for e in truth)
    assert sum(metrics["num_actions_by_agent"].values()) == sampler.totals.delivered


def test_agent_steps_count_observations_and_actions_are_counted_separately() -> None:
    truth: list[dict[str, Any]] = []
    with multi_runner(scheduled(truth), num_envs=2) as sampler:
        sampler.sample(num_episodes=60)
        metrics = sampler.get_metrics()
    observed: dict[str, int] = defaultdict(int)
    acted: dict[str, int] = defaultdict(int)
    delivered = [episode for episode in truth if episode["over"]]
    for episode in delivered:
        for agent, times in episode["acted_at"].items():
            acted[agent] += len(times)
            observed[agent] += len(episode["seen"][agent]) - (episode["seen"][agent][0][0] == 0)
    assert metrics["num_actions_by_agent"] == acted
    assert metrics["num_agent_steps_sampled"] == observed != acted
    assert metrics["num_module_steps_sampled"] == {"shared": sum(observed.values())}


def test_complete_episodes_mode_gives_whole_episodes_and_loses_no_step() -> None:
    truth: list[dict[str, Any]] = []
    lives: Lives = defaultdict(list)
    settings = {"batch_mode": "complete_episodes", "rollout_fragment_length": 4}
    with multi_runner(scheduled(truth), num_envs=3, **settings) as sampler:
        while sampler.totals.episodes < 200:
            chunks = sampler.sample_fragment()
            assert all(c.is_done and c.chunk_index == 0 for c in chunks)
            _gather(lives, chunks)
            check_books(sampler)
    finished, _ = _check(truth, lives)
    assert finished == sampler.totals.episodes
    assert sampler.totals.discarded == {}


@pytest.mark.parametrize("length", [3, 9])
def test_env_failures_cost_open_chunks_only_and_end_partly_sent_episodes(length: int) -> None:
    truth: list[dict[str, Any]] = []
    lives: Lives = defaultdict(list)
    env = scheduled(truth, fails=0.02)
    settings = {"rollout_fragment_length": length, "env_restart_attempts": 10**5}
    with multi_runner(env, num_envs=4, **settings) as sampler:
        while sampler.totals.episodes < 150:
            _gather(lives, sampler.sample_fragment())
            check_books(sampler)
        _gather(lives, sampler.sample(num_episodes=1, end_markers=True))
        check_books(sampler)
        assert sampler.totals.env_failures > 20
        assert set(sampler.totals.discarded) == {"env_exception", "reset"}
    _check(truth, lives)
    ends = [chunks[-1].end for chunks in lives.values()]
    assert ChunkEnd.ONGOING not in ends
    for chunks in lives.values():
        assert all(c.end is ChunkEnd.ONGOING for c in chunks[:-1])
        to_episode(chunks)
