"""The size of a sample, and the episodes that `sample` continues or resets."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from headrace.schemas.errors import ModuleError
from headrace.workers.policy.module_weights import read_weights
from support.envs.toy import Counting, check_books, runner


def _steps(chunks: Any) -> int:
    return sum(len(chunk) for chunk in chunks)


def test_finished_episodes_come_first() -> None:
    with runner(num_envs=3, env_config={"lengths": {0: 100, 1: 3, 2: 4}}) as sampler:
        done = [chunk.is_done for chunk in sampler.sample(num_timesteps=18)]
    assert done == sorted(done, reverse=True)
    assert 0 < sum(done) < len(done)


@pytest.mark.parametrize("horizon", [0, 2])
def test_each_chunk_of_a_batch_stands_in_the_columns_at_its_offsets(horizon: int) -> None:
    with runner(num_envs=3, env_config={"lengths": {0: 100, 1: 3, 2: 4}}, episode_lookback_horizon=horizon) as sampler:
        for _ in range(3):
            for batch in (sampler.sample(num_timesteps=18), sampler.sample_fragment()):
                for i, chunk in enumerate(batch):
                    steps = slice(batch.offsets[i], batch.offsets[i + 1])
                    np.testing.assert_array_equal(batch.columns["rewards"][steps], chunk.rewards)
                    np.testing.assert_array_equal(batch.columns["logp"][steps], chunk.columns["logp"])
                    rows = slice(batch.obs_offsets[i], batch.obs_offsets[i + 1])
                    np.testing.assert_array_equal(batch.obs[rows], chunk.obs)
                    before = slice(batch.lookback_offsets[i], batch.lookback_offsets[i + 1])
                    if chunk.lookback is not None:
                        np.testing.assert_array_equal(batch.lookback["obs"][before], chunk.lookback.obs)
                np.testing.assert_array_equal(batch.transitions().rewards, np.concatenate([c.rewards for c in batch]))


@pytest.mark.parametrize("num_envs", [1, 4])
def test_num_episodes_gives_whole_episodes_only(num_envs: int) -> None:
    with runner(num_envs=num_envs, env_config={"lengths": {0: 3, 1: 4, 2: 7, 3: 50}}) as sampler:
        for m in (1, 3, 9):
            chunks = sampler.sample(num_episodes=m)
            assert m <= len(chunks) <= m + num_envs - 1
            assert all(c.is_done and c.t_start == 0 and c.chunk_index == 0 for c in chunks)
            check_books(sampler)


def test_a_runner_is_told_in_one_line() -> None:
    with runner(num_envs=2) as sampler:
        sampler.sample(num_timesteps=6)
        assert re.fullmatch(r"<SingleAgentEnvRunner 0: 2 envs of .*, 6 steps, weights \(0, 0\)>", repr(sampler))
    assert repr(sampler).endswith(", 6 steps, stopped>")


def test_num_episodes_resets_no_env_beyond_the_last_episode() -> None:
    seeds: list[int] = []
    with runner(lambda context: _recorded(seeds, context)) as sampler:
        sampler.sample(num_episodes=3)
    assert len(seeds) == 3


def _recorded(seeds: list[int], context: Any) -> Counting:
    env = Counting(context)
    env.seeds = seeds  # type: ignore[assignment]
    return env


def test_num_timesteps_after_num_episodes_resets_open_episodes() -> None:
    with runner(num_envs=2, env_config={"lengths": {0: 3, 1: 9}}) as sampler:
        sampler.sample(num_episodes=1)
        assert all(c.t_start == 0 and c.chunk_index == 0 for c in sampler.sample(num_timesteps=2))
        assert sampler.totals.discarded == {"reset": 3}
        check_books(sampler)


def test_a_complete_fragment_keeps_unfinished_episodes_for_the_next_fragment() -> None:
    settings = {"num_envs": 2, "batch_mode": "complete_episodes", "rollout_fragment_length": 4}
    with runner(env_config={"lengths": {0: 3, 1: 20}}, **settings) as sampler:
        for _ in range(9):
            batch = sampler.sample_fragment()
            assert all(c.is_done and c.t_start == 0 for c in batch)
            for c in batch:
                np.testing.assert_array_equal(c.obs[:, 0], np.arange(len(c) + 1))
                np.testing.assert_array_equal(c.rewards, np.arange(1, len(c) + 1))
            check_books(sampler)
    assert sampler.totals.discarded == {}
    assert sampler.totals.episodes == sampler.get_metrics()["num_episodes"]


def test_random_actions_need_no_module_and_are_marked_in_chunks() -> None:
    def no_policy(spaces: Any) -> Any:
        raise NotImplementedError

    with runner(module=no_policy, num_envs=2) as sampler:
        assert sampler.module is None
        for size in ({"num_timesteps": 8}, {"num_episodes": 3}):
            for chunk in sampler.sample(random_actions=True, **size):
                if len(chunk):
                    assert chunk.random_actions
                    assert chunk.columns == {}
                    assert chunk.weights_seq.tolist() == [0] * len(chunk)
        with pytest.raises(ModuleError, match="random_actions=True"):
            sampler.sample(num_timesteps=1)


def test_explore_defaults_to_the_config_and_off_takes_the_most_likely_action() -> None:
    with runner("CartPole-v1", num_envs=4, explore=False) as sampler:
        chunks = sampler.sample(num_timesteps=64)
        for chunk in chunks:
            assert not chunk.explore
            np.testing.assert_array_equal(chunk.actions, chunk.columns["action_dist_inputs"].argmax(1))
        assert all(c.explore for c in sampler.sample(num_timesteps=8, explore=True))


def test_every_step_has_the_version_of_the_weights_that_chose_its_action() -> None:
    with runner(num_envs=2, rollout_fragment_length=6, env_config={"length": 50}) as sampler:
        assert sampler.module is not None
        weights = read_weights(sampler.module)
        polls = 0

        def on_poll() -> None:
            nonlocal polls
            polls += 1
            if polls == 4:
                sampler.set_weights(weights, seq=9)

        for chunk in sampler.sample_fragment(on_poll):
            assert chunk.weights_seq.tolist() == [0, 0, 0, 0, 9, 9]
        assert polls == 6


def test_another_learners_epoch_ends_the_fragment() -> None:
    with runner(rollout_fragment_length=6, env_config={"length": 50}) as sampler:
        assert sampler.module is not None
        weights = read_weights(sampler.module)
        batch = sampler.sample_fragment(lambda: sampler.set_weights(weights, 1, learner_epoch=2, digest="d"))
        assert (batch.steps, batch.learner_epoch, batch.weights_digest) == (1, 0, "")
        assert sampler.weights_version == (2, 1)
        batch = sampler.sample_fragment()
        assert (batch.steps, batch.learner_epoch, batch.weights_digest) == (6, 2, "d")
