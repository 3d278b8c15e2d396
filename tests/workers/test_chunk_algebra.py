"""An episode sampled in one piece equals its chunks put together, wherever they were cut."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk, to_episode
from headrace.schemas.errors import ChunkError
from support.envs.counting import NestedCounting
from support.envs.toy import Walk, runner
from support.envs.toy_agents import multi_runner


def _episode(env: Any = NestedCounting, length: int = 20) -> EpisodeChunk:
    with runner(env, env_config={"length": length}) as sampler:
        (chunk,) = sampler.sample(num_episodes=1)
    return chunk


WHOLE = _episode()


def _flat(tree: Any, name: str = "") -> dict[str, Any]:
    if isinstance(tree, dict | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {leaf: array for key, sub in items for leaf, array in _flat(sub, f"{name}/{key}").items()}
    return {name: tree}


def assert_same(ours: EpisodeChunk, theirs: EpisodeChunk) -> None:
    for field in fields(EpisodeChunk):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(mine, dict | tuple | np.ndarray):
            mine, other = _flat(mine), _flat(other)
            assert mine.keys() == other.keys(), field.name
            for name, array in mine.items():
                assert array.dtype == other[name].dtype, field.name
                np.testing.assert_array_equal(array, other[name])
        elif field.name == "episode_return":
            assert mine == pytest.approx(other, rel=1e-12)
        else:
            assert mine == other, field.name


@given(st.sets(st.integers(1, len(WHOLE) - 1)), st.randoms())
@settings(max_examples=200)
def test_a_chunk_cut_anywhere_and_joined_in_any_order_is_the_same(cuts: set[int], random: Any) -> None:
    bounds = [0, *sorted(cuts), len(WHOLE)]
    parts = [WHOLE[a:b] for a, b in pairwise(bounds)]
    assert [p.end for p in parts[:-1]] == [ChunkEnd.ONGOING] * len(cuts)
    assert [p.t_start for p in parts] == bounds[:-1]
    assert [p.episode_length for p in parts] == bounds[1:]
    folded = parts[0]
    for part in parts[1:]:
        folded = to_episode((folded, part))
    assert_same(folded, WHOLE)
    random.shuffle(parts)
    assert_same(to_episode(parts), WHOLE)


@pytest.mark.long
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
@settings(max_examples=40)
def test_an_episode_sampled_in_pieces_equals_the_episode_sampled_whole(sizes: list[int]) -> None:
    chunks: list[EpisodeChunk] = []
    with runner(Walk) as sampler:
        for size in [*sizes, 400]:
            chunks += sampler.sample(num_timesteps=size)
    with runner(Walk) as sampler:
        whole = sampler.sample(num_episodes=1)[0]
    pieces = [chunk for chunk in chunks if chunk.episode_id == whole.episode_id]
    joined = to_episode(pieces)
    assert_same(joined, replace(whole, chunk_index=0))


def test_a_slice_is_a_view_with_the_return_up_to_its_end() -> None:
    part = WHOLE[3:-5]
    assert (len(part), part.t_start, part.end, part.end_reason) == (12, 3, ChunkEnd.ONGOING, None)
    assert part.rewards.base is not None
    assert part.episode_return == sum(range(1, 16))
    assert part.obs["t"].ravel().tolist() == list(range(3, 16))
    assert WHOLE[-2:].is_terminated
    assert WHOLE[:].end is WHOLE.end
    assert part[2:4].env_t.tolist() == [5, 6]


@pytest.mark.parametrize("bad", [slice(3, 3), slice(5, 2), slice(0, 8, 2), slice(99, 100)])
def test_a_slice_without_a_step_or_with_a_stride_is_refused(bad: slice) -> None:
    with pytest.raises(ChunkError, match="no contiguous run of steps"):
        WHOLE[bad]
    with pytest.raises(TypeError, match=r"takes a slice, .* not 3"):
        WHOLE[3]  # type: ignore[index]


@pytest.mark.parametrize("horizon", [0, 3])
@pytest.mark.parametrize(("make", "lasting"), [(runner, {"length": 40}), (multi_runner, {"lengths": [40, 40]})])
def test_joining_policy_and_random_steps_drops_the_policys_columns(
    make: Any, lasting: dict[str, Any], horizon: int
) -> None:
    """The chunks keep these columns and say which steps were random. The episode's `random_actions` is true."""
    with make(seed=1, episode_lookback_horizon=horizon, env_config=lasting) as sampler:
        parts: dict[tuple[str, str], list[EpisodeChunk]] = {}
        for random_actions in (False, False, True, True, False, False):
            for chunk in sampler.sample(num_timesteps=3, random_actions=random_actions):
                parts.setdefault((chunk.episode_id, chunk.agent_id), []).append(chunk)
    for chunks in parts.values():
        assert {"logp" in chunk.columns for chunk in chunks} == {True, False}
        episode = to_episode(chunks)
        assert episode.random_actions
        assert "logp" not in episode.columns
        np.testing.assert_array_equal(episode.rewards, np.concatenate([chunk.rewards for chunk in chunks]))
        assert "logp" in to_episode(chunks[-2:]).columns
        odd = replace(chunks[1], columns={name: c for name, c in chunks[1].columns.items() if name != "logp"})
        with pytest.raises(ChunkError, match=r"differ in 'columns/logp'"):
            to_episode([chunks[0], odd, *chunks[2:]])


def test_an_aborted_episode_ends_with_its_marker() -> None:
    with runner(Walk) as sampler:
        (first,) = sampler.sample(num_timesteps=5)
        (second,) = sampler.sample(num_timesteps=5)
        marker = sampler.sample(num_timesteps=5, force_reset=True, end_markers=True)[-1]
    episode = to_episode([marker, second, first])
    assert (len(episode), episode.end, episode.end_reason) == (10, ChunkEnd.ABORTED, "reset")
    assert (len(to_episode([marker])), to_episode([marker]).end) == (0, ChunkEnd.ABORTED)
    with pytest.raises(ChunkError, match="has ended"):
        to_episode((marker, replace(second, chunk_index=9)))


def _spoil(chunk: EpisodeChunk, fault: str) -> EpisodeChunk:
    faults: dict[str, dict[str, Any]] = {
        "episode_id": {"episode_id": "0" * 32},
        "agent_id": {"agent_id": "other"},
        "module_id": {"module_id": "other"},
        "observation": {"obs": {**chunk.obs, "t": chunk.obs["t"] + 1}},
        "column": {"columns": {name: column for name, column in chunk.columns.items() if name != "logp"}},
        "dtype": {"columns": {**chunk.columns, "logp": chunk.columns["logp"].astype(np.float64)}},
    }
    return replace(chunk, **faults[fault])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("episode_id", "differ in episode_id: '.*' and '0000"),
        ("agent_id", "differ in agent_id"),
        ("module_id", "differ in module_id"),
        ("observation", r"'obs/t' is not the same"),
        ("column", "differ in 'columns/logp': .* and absent"),
        ("dtype", "differ in 'columns/logp'"),
    ],
)
def test_joining_chunks_that_do_not_match_names_the_difference(fault: str, message: str) -> None:
    with pytest.raises(ChunkError, match=message):
        to_episode((WHOLE[:7], _spoil(WHOLE[7:], fault)))


def test_joining_chunks_with_a_gap_an_overlap_or_after_the_end_is_refused() -> None:
    with pytest.raises(ChunkError, match=r"a gap .* 7 steps are known of the episode, and 8 lie before"):
        to_episode((WHOLE[:7], WHOLE[8:]))
    with pytest.raises(ChunkError, match="an overlap"):
        to_episode((WHOLE[:7], WHOLE[6:]))
    with pytest.raises(ChunkError, match="has ended"):
        to_episode((WHOLE, replace(WHOLE, t_start=len(WHOLE), episode_length=2 * len(WHOLE))))
    with pytest.raises(ChunkError, match="no chunk"):
        to_episode([])
