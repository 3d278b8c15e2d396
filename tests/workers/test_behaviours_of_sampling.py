"""Sampling as users of RLlib's runners expect it, in exact numbers: {one agent, two} x {1, 3, 8 envs} x both sizes.

All episodes are `LENGTH` env steps long and all envs begin together, so that every count can be told beforehand.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk
from headrace.schemas.errors import ConfigError
from support.runners.callbacks import Recording
from support.runners.kinds import KINDS, LENGTH, MODES, WIDTHS, Kind, episodes_of, resets_of, whole_polls

# -- which sizes there are --------------------------------------------------------------------------------------------


@KINDS
@WIDTHS
@pytest.mark.parametrize(
    "sizes", [{"num_timesteps": 3, "num_episodes": 3}, {"num_timesteps": -1}, {"num_episodes": -1}]
)
def test_an_invalid_size_is_refused_and_steps_no_env(kind: Kind, num_envs: int, sizes: Any) -> None:
    with kind.runner(num_envs) as sampler:
        with pytest.raises(AssertionError, match=r"num_.*give") as caught:
            sampler.sample(**sizes)
        assert isinstance(caught.value, ConfigError)
        with pytest.raises(TypeError):
            sampler.sample(5)
        assert resets_of(sampler) == sampler.totals.stepped == 0


@KINDS
@WIDTHS
@MODES
def test_a_size_of_zero_gives_no_chunks_and_steps_no_env(kind: Kind, num_envs: int, mode: str) -> None:
    seen = Recording()
    with kind.runner(num_envs, callbacks=[seen]) as sampler:
        sampler.sample(num_timesteps=2 * num_envs)
        told = len(seen.told)
        assert sampler.sample(**{mode: 0}) == []
        assert len(seen.told) == told
        chunks = sampler.sample(num_timesteps=num_envs)
        assert {c.t_start for c in chunks} == {2}


@KINDS
@WIDTHS
def test_without_a_size_the_batch_mode_decides(kind: Kind, num_envs: int) -> None:
    with kind.runner(num_envs, rollout_fragment_length=20) as sampler:
        for _ in range(3):
            assert kind.env_steps(sampler.sample()) == 20 * num_envs
        assert sampler.sample_fragment().steps == 20 * num_envs * kind.agents
    with kind.runner(num_envs, batch_mode="complete_episodes") as sampler:
        for _ in range(2):
            chunks = sampler.sample()
            assert len(episodes_of(chunks)) == num_envs
            assert all(c.is_done and len(c) == LENGTH for c in chunks)


# -- num_timesteps ----------------------------------------------------------------------------------------------------


@KINDS
@WIDTHS
def test_num_timesteps_gives_n_steps_and_less_than_one_poll_more(kind: Kind, num_envs: int) -> None:
    with kind.runner(num_envs) as sampler:
        for n in (1, 2, 7, 8, 9, 24, 100):
            steps = kind.env_steps(sampler.sample(num_timesteps=n))
            assert steps == whole_polls(n, num_envs)
            assert n <= steps <= n + num_envs - 1
            kind.check_books(sampler)
        assert sampler.totals.discarded == {}


@KINDS
@WIDTHS
def test_num_timesteps_goes_on_where_the_last_call_stopped(kind: Kind, num_envs: int) -> None:
    lives: dict[Any, list[EpisodeChunk]] = defaultdict(list)
    with kind.runner(num_envs) as sampler:
        for _ in range(11):
            chunks = sampler.sample(num_timesteps=20 * num_envs)
            done = [c.is_done for c in chunks]
            assert done == sorted(done, reverse=True)
            assert all(len(c) for c in chunks)
            for c in chunks:
                lives[c.env_index, c.agent_id].append(c)
    assert len(lives) == num_envs * kind.agents
    for life in lives.values():
        assert [len(c) for c in life] == [20, 20, 10, 10, 20, 20] * 2 + [20]
        assert [c.t_start for c in life] == [0, 20, 40, 0, 10, 30] * 2 + [0]
        assert [c.chunk_index for c in life] == [0, 1, 2, 0, 1, 2] * 2 + [0]
        assert [c.is_done for c in life] == [False, False, True] * 4 + [False]
        assert len(episodes_of(life)) == 5
        for one, following in itertools.pairwise(life):
            if not one.is_done:
                assert one.episode_id == following.episode_id
                np.testing.assert_array_equal(one.obs[-1], following.obs[0])
            else:
                assert one.obs[-1][0] == one.episode_length == LENGTH
                assert one.episode_return == sum(c.rewards.sum() for c in life if c.episode_id == one.episode_id)
        for one in life:
            np.testing.assert_array_equal(one.env_t, np.arange(one.t_start, one.t_start + len(one)))


@KINDS
@WIDTHS
def test_an_episode_that_ends_with_the_call_leaves_no_empty_chunk(kind: Kind, num_envs: int) -> None:
    with kind.runner(num_envs) as sampler:
        for _ in range(3):
            chunks = sampler.sample(num_timesteps=LENGTH * num_envs)
            assert [(len(c), c.t_start, c.is_done) for c in chunks] == [(LENGTH, 0, True)] * num_envs * kind.agents


# -- num_episodes -----------------------------------------------------------------------------------------------------


@KINDS
@WIDTHS
def test_num_episodes_gives_m_whole_episodes_and_less_than_one_poll_more(kind: Kind, num_envs: int) -> None:
    ids: set[str] = set()
    with kind.runner(num_envs) as sampler:
        for m in (1, 2, 5, 8):
            chunks = sampler.sample(num_episodes=m)
            assert len(episodes_of(chunks)) == whole_polls(m, num_envs)
            assert m <= len(episodes_of(chunks)) <= m + num_envs - 1
            assert {(len(c), c.t_start, c.chunk_index, c.end) for c in chunks} == {(LENGTH, 0, 0, ChunkEnd.TERMINATED)}
            assert not ids & episodes_of(chunks)
            ids |= episodes_of(chunks)
            kind.check_books(sampler)
        assert resets_of(sampler) == len(ids)
        assert sampler.totals.discarded == {}


# -- what is reset, and what becomes of what was going on -------------------------------------------------------------


@KINDS
@WIDTHS
@MODES
def test_episodes_that_a_reset_cuts_off_end_with_aborted_markers(kind: Kind, num_envs: int, mode: str) -> None:
    with kind.runner(num_envs) as sampler:
        begun = sampler.sample(num_timesteps=4 * num_envs)
        size = num_envs if mode == "num_episodes" else 3 * num_envs
        chunks = sampler.sample(**{mode: size}, force_reset=mode == "num_timesteps", end_markers=True)
        anew, markers = [c for c in chunks if len(c)], [c for c in chunks if not len(c)]
        assert not any(map(len, chunks[len(anew) :]))
        assert {(m.episode_id, m.agent_id) for m in markers} == {(c.episode_id, c.agent_id) for c in begun}
        assert {(m.end, m.end_reason, m.chunk_index, m.t_start) for m in markers} == {(ChunkEnd.ABORTED, "reset", 1, 4)}
        assert {m.episode_length for m in markers} == {4}
        assert {(c.t_start, c.chunk_index) for c in anew} == {(0, 0)}
        assert not episodes_of(anew) & episodes_of(begun)
        assert sampler.totals.discarded == {}
        kind.check_books(sampler)


@KINDS
@WIDTHS
def test_num_timesteps_after_num_episodes_starts_new_episodes(kind: Kind, num_envs: int) -> None:
    with kind.runner(num_envs) as sampler:
        whole = sampler.sample(num_episodes=num_envs)
        for t_start in (0, 2, 4):
            chunks = sampler.sample(num_timesteps=2 * num_envs)
            assert {c.t_start for c in chunks} == {t_start}
            assert not episodes_of(chunks) & episodes_of(whole)
        assert resets_of(sampler) == 2 * num_envs


@KINDS
@WIDTHS
@MODES
def test_make_env_ends_open_episodes_and_starts_new_ones(kind: Kind, num_envs: int, mode: str) -> None:
    with kind.runner(num_envs) as sampler:
        size = num_envs if mode == "num_episodes" else 4 * num_envs
        before = sampler.sample(**{mode: size})
        sampler.make_env()
        chunks = sampler.sample(num_timesteps=num_envs, end_markers=True)
        assert {c.t_start for c in chunks if len(c)} == {0}
        assert {c.episode_id for c in chunks if not len(c)} == (
            {*episodes_of(before)} if mode == "num_timesteps" else set()
        )
        assert resets_of(sampler) == num_envs


# -- how actions are chosen -------------------------------------------------------------------------------------------


@KINDS
@WIDTHS
@MODES
def test_every_chunk_records_explore_and_random_actions(kind: Kind, num_envs: int, mode: str) -> None:
    with kind.runner(num_envs, explore=False) as sampler:
        for settings, explore, random_actions in (
            ({}, False, False),
            ({"explore": True}, True, False),
            ({"random_actions": True}, False, True),
        ):
            for c in sampler.sample(**{mode: num_envs}, **settings):
                assert (c.explore, c.random_actions) == (explore, random_actions)
                assert c.weights_seq.tolist() == [0] * len(c)
                assert ("logp" in c.columns) is not random_actions or not len(c)
