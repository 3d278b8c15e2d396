"""The content of a chunk: the right rows, the true final observation, infos, and no needless copy."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from headrace.schemas.accounts.ledger import Discard, WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader, encode_batch
from headrace.schemas.chunks.chunk import ChunkEnd
from support.decode_batch import decode_batch
from support.envs.toy import Counting, Walk, check_books, runner


def test_each_chunk_has_the_rows_of_its_own_episode() -> None:
    with runner(num_envs=4, env_config={"lengths": {0: 1, 1: 3, 2: 7, 3: 30}}, rollout_fragment_length=10) as sampler:
        for _ in range(6):
            for c in sampler.sample_fragment():
                np.testing.assert_array_equal(c.obs[:, 0], np.arange(c.t_start, c.t_start + len(c) + 1))
                assert set(c.obs[:, 1]) == {c.env_index}
                np.testing.assert_array_equal(c.rewards, c.obs[1:, 0])
                assert c.episode_length == c.t_start + len(c)
                assert c.episode_return == sum(range(c.episode_length + 1))
            check_books(sampler)


def test_final_observation_is_the_envs_own_and_not_the_next_resets() -> None:
    with runner(env_config={"length": 3}) as sampler:
        for chunk in sampler.sample(num_timesteps=12):
            assert chunk.obs[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("truncate", [True, False])
def test_truncation_is_not_termination(truncate: bool) -> None:
    with runner(env_config={"length": 3, "truncate": truncate}) as sampler:
        (chunk,) = sampler.sample(num_episodes=1)
    assert chunk.end is (ChunkEnd.TRUNCATED if truncate else ChunkEnd.TERMINATED)


def test_a_time_limit_truncates_unless_the_env_terminates_at_the_same_step() -> None:
    with runner(lambda context: gym.wrappers.TimeLimit(Counting({"length": 4}), 3)) as sampler:
        assert sampler.sample(num_episodes=1)[0].is_truncated
    with runner(lambda context: gym.wrappers.TimeLimit(Counting({"length": 3}), 3)) as sampler:
        assert sampler.sample(num_episodes=1)[0].is_terminated


def test_numpy_bools_are_bools() -> None:
    class NumpyBools(Counting):
        def step(self, action: Any) -> Any:
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, np.float32(reward), np.bool_(terminated), np.bool_(truncated), info

    with runner(NumpyBools, env_config={"length": 3}) as sampler:
        assert [c.end for c in sampler.sample(num_timesteps=5)] == [ChunkEnd.TERMINATED, ChunkEnd.ONGOING]


def test_a_full_fragment_without_an_end_is_not_copied() -> None:
    with runner(Walk, num_envs=3, rollout_fragment_length=8, env_config={}) as sampler:
        sampler.sample(num_timesteps=1)
        batch = sampler.sample_fragment()
        while any(c.is_done for c in batch):
            batch = sampler.sample_fragment()
    assert batch.arrays["obs"].base is not None
    assert batch.arrays["obs"].base.shape == (3, 9, 3)
    assert batch.columns["rewards"].base.shape == (3, 8)


def test_an_env_that_reuses_its_arrays_changes_nothing_recorded() -> None:
    class Reusing(Counting):
        action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

        def observe(self) -> Any:
            if not hasattr(self, "buffer"):
                self.buffer = np.zeros(2, np.float32)
            self.buffer[:] = (self.t, self.index)
            return self.buffer

        def step(self, action: Any) -> Any:
            action[:] = 99.0
            return super().step(action)

    with runner(Reusing, num_envs=2) as sampler:
        for c in sampler.sample(num_timesteps=16):
            np.testing.assert_array_equal(c.obs[:, 0], np.arange(c.t_start, c.t_start + len(c) + 1))
            assert np.abs(c.actions).max() < 90
            assert np.abs(c.columns["actions_for_env"]).max() <= 1


class Informing(Counting):
    """Infos at reset and at even steps."""

    def reset(self, **kwargs: Any) -> Any:
        obs, _ = super().reset(**kwargs)
        return obs, {"born": True}

    def step(self, action: Any) -> Any:
        *answer, _ = super().step(action)
        return (*answer, {"t": self.t} if self.t % 2 == 0 else {})


def test_an_episode_that_begins_at_a_cut_keeps_the_infos_of_its_reset() -> None:
    with runner(Informing, env_config={"length": 3}) as sampler:
        sampler.sample(num_timesteps=3)
        (begun,) = sampler.sample(num_timesteps=1)
    assert begun.infos == [{"born": True}, {}]


def test_infos_stay_with_their_observations_across_a_cut() -> None:
    with runner(Informing, env_config={"length": 5}) as sampler:
        first, second = (sampler.sample(num_timesteps=n)[0] for n in (2, 3))
    assert first.infos == [{"born": True}, {}, {"t": 2}]
    assert second.infos == [{"t": 2}, {}, {"t": 4}, {}]
    with runner(Informing, env_config={"length": 5}, infos="none") as sampler:
        assert sampler.sample(num_timesteps=4)[0].infos == []


def test_batches_go_through_the_codec_unchanged() -> None:
    with runner(Informing, num_envs=3, env_config={"lengths": {0: 2, 1: 5, 2: 100}}) as sampler:
        sampler.sample(num_timesteps=12)
        batch = sampler.sample(num_timesteps=3, force_reset=True)
    header = BatchHeader(
        fleet_id="f", slot=0, incarnation=0, seq=1, steps=batch.steps, chunks=len(batch), reasons=list(batch.reasons),
        totals=WorkerTotals(),
    )  # fmt: skip
    _, decoded = decode_batch(encode_batch(batch, header), batch.observation_space, batch.action_space)
    assert sorted(map(repr, decoded)) == sorted(map(repr, batch))
    by_key = {(c.episode_id, c.chunk_index): c for c in decoded}
    for chunk in batch:
        other = by_key[chunk.episode_id, chunk.chunk_index]
        assert (chunk.end_reason, chunk.seed, chunk.infos) == (other.end_reason, other.seed, other.infos)
        np.testing.assert_array_equal(chunk.obs, other.obs)


def test_discard_open_delivers_finished_episodes_and_marks_the_open_ones() -> None:
    with runner(num_envs=2, env_config={"lengths": {0: 3, 1: 50}}) as sampler:
        sampler.sample(num_timesteps=4)

        class Stop(Exception):
            pass

        def stop() -> None:
            raise Stop

        with pytest.raises(Stop):
            sampler.sample_fragment(stop)
        chunks = sampler.discard_open(Discard.SHUTDOWN)
        assert [(c.end, len(c)) for c in chunks] == [(ChunkEnd.TERMINATED, 1), (ChunkEnd.ABORTED, 0)]
        assert chunks[1].end_reason == "shutdown"
        assert sampler.totals.discarded == {"shutdown": 1}
        assert sampler.totals.open == 0
        check_books(sampler)
        assert len(sampler.discard_open(Discard.SHUTDOWN)) == 0


def test_totals_are_true_at_every_poll() -> None:
    with runner(Walk, num_envs=3, rollout_fragment_length=20, env_config={}) as sampler:
        polls = 0

        def on_poll() -> None:
            nonlocal polls
            polls += 1
            assert sampler.totals.stepped == 3 * polls
            check_books(sampler)

        for _ in range(3):
            sampler.sample_fragment(on_poll)
            assert sampler.totals.open == 0
