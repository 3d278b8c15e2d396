"""A chunk carries the steps just before it, as far as the horizon reaches and the episode is old enough."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch, encode_batch
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk, to_episode
from headrace.schemas.errors import DecodeError, ModuleError
from headrace.workers.modules import actor_critic
from support.decode_batch import decode_batch
from support.envs.toy import Counting, Walk, runner
from support.envs.toy_agents import multi_runner, scheduled

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=10)
HORIZONS = st.integers(1, 12)


class Nested(Walk):
    """Observations and actions of several leaves."""

    observation_space = gym.spaces.Dict(
        {"at": Walk.observation_space, "pair": gym.spaces.Tuple((gym.spaces.Discrete(9),) * 2)}
    )
    action_space = gym.spaces.Tuple((Walk.action_space, gym.spaces.Discrete(2)))

    def observe(self) -> Any:
        return {"at": super().observe(), "pair": (self.t % 9, (self.t + 1) % 9)}

    def step(self, action: Any) -> Any:
        return super().step(action[0])


def over_the_wire(batch: ChunkBatch) -> ChunkBatch:
    header = BatchHeader(
        fleet_id="f", slot=0, incarnation=0, seq=1, steps=batch.steps, chunks=len(batch), agents=list(batch.agents),
        modules=list(batch.modules), reasons=list(batch.reasons), totals=WorkerTotals(),
    )  # fmt: skip
    frames = [bytes(frame) for frame in encode_batch(batch, header)]
    return decode_batch(frames, batch.observation_space, batch.action_space)[1]


def check_episodes(chunks: list[EpisodeChunk], horizon: int) -> int:
    """Each lookback is the horizon long or as long as the agent's past, and repeats it; gives the rows looked back."""
    by_agent: dict[tuple[str, str], list[EpisodeChunk]] = defaultdict(list)
    for chunk in chunks:
        by_agent[chunk.episode_id, chunk.agent_id].append(chunk)
    rows = 0
    for parts in by_agent.values():
        before = 0
        for part in sorted(parts, key=lambda chunk: chunk.chunk_index):
            looked_back = 0 if part.lookback is None else len(part.lookback)
            assert looked_back == (min(horizon, before) if len(part) else 0)
            before, rows = before + len(part), rows + looked_back
        assert to_episode(parts).lookback is None  # and it compares every row
    return rows


@pytest.mark.thorough
@given(sizes=SIZES, horizon=HORIZONS, num_envs=st.sampled_from([1, 3]), env=st.sampled_from([Walk, Nested]))
@settings(max_examples=60)
def test_lookback_repeats_the_steps_before_wherever_episodes_are_cut(
    sizes: list[int], horizon: int, num_envs: int, env: Any
) -> None:
    chunks: list[EpisodeChunk] = []
    with runner(env, num_envs=num_envs, episode_lookback_horizon=horizon) as sampler:
        for size in [*sizes, 60, 60]:
            batch = sampler.sample(num_timesteps=size * num_envs)
            assert isinstance(batch, ChunkBatch)
            chunks += over_the_wire(batch)
    assert check_episodes(chunks, horizon) > 0


@given(sizes=SIZES, horizon=HORIZONS)
@settings(max_examples=25)
def test_chunks_with_lookback_join_to_the_episode_sampled_whole(sizes: list[int], horizon: int) -> None:
    chunks: list[EpisodeChunk] = []
    with runner(Walk, episode_lookback_horizon=horizon) as sampler:
        for size in [*sizes, 400]:
            chunks += sampler.sample(num_timesteps=size)
    with runner(Walk, episode_lookback_horizon=horizon) as sampler:
        whole = sampler.sample(num_episodes=1)[0]
    joined = to_episode([chunk for chunk in chunks if chunk.episode_id == whole.episode_id])
    assert whole.lookback is None
    for name in ("obs", "actions", "rewards", "weights_seq", "env_t"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))


@pytest.mark.long
@given(sizes=SIZES, horizon=HORIZONS, num_envs=st.sampled_from([1, 3]))
@settings(max_examples=60)
def test_an_agent_looks_back_on_its_own_steps(sizes: list[int], horizon: int, num_envs: int) -> None:
    chunks: list[EpisodeChunk] = []
    env = scheduled([], agents=3, fails=0.01)
    with multi_runner(env, num_envs=num_envs, episode_lookback_horizon=horizon) as sampler:
        for size in [*sizes, 40, 40]:
            for batch in sampler.sample(num_timesteps=size * num_envs).batches.values():  # type: ignore[attr-defined]
                chunks += over_the_wire(batch)
    check_episodes(chunks, horizon)


def test_without_a_horizon_there_is_no_lookback_column() -> None:
    with runner(Walk, num_envs=2) as sampler:
        for _ in range(2):
            batch: Any = sampler.sample(num_timesteps=8)
            assert not any(name.startswith("lookback/") for name in batch.arrays)
            assert batch[0].lookback is None


def test_lookback_rows_stand_beside_their_observations() -> None:
    with runner(Counting, env_config={"length": 100}, episode_lookback_horizon=3) as sampler:
        sampler.sample(num_timesteps=5)
        batch: Any = sampler.sample(num_timesteps=2)
        (chunk,) = batch
        assert chunk.lookback.obs[:, 0].tolist() == [2, 3, 4]
        assert chunk.obs[0][0] == 5
        assert chunk.lookback.env_t.tolist() == [2, 3, 4]
        assert set(chunk.lookback.columns) == set(chunk.columns)
        assert chunk[:1].lookback is chunk.lookback
        assert chunk[1:].lookback is None
        assert batch.offsets_of("lookback/logp").tolist() == [0, 3]
        assert batch.select(np.array([True])).arrays["lookback/rewards"].shape == (3,)
        assert len(batch.select(np.array([False])).arrays["lookback/obs"]) == 0


def test_a_chunk_after_steps_of_other_columns_has_no_lookback() -> None:
    with runner(Counting, env_config={"length": 100}, episode_lookback_horizon=3) as sampler:
        sampler.sample(num_timesteps=5, random_actions=True)
        assert sampler.sample(num_timesteps=2)[0].lookback is None
        assert len(sampler.sample(num_timesteps=2)[0].lookback or ()) == 2


def test_an_end_marker_has_no_lookback() -> None:
    with runner(Counting, env_config={"length": 100}, episode_lookback_horizon=3) as sampler:
        sampler.sample(num_timesteps=5)
        batch: Any = sampler.sample(num_timesteps=2, force_reset=True, end_markers=True)
        ends = {chunk.end: chunk.lookback for chunk in over_the_wire(batch)}
        assert ends == {ChunkEnd.ONGOING: None, ChunkEnd.ABORTED: None}


def _without(batch: ChunkBatch) -> None:
    del batch.arrays["lookback/logp"]


def _another(batch: ChunkBatch) -> None:
    batch.arrays["lookback/more"] = batch.arrays["lookback/logp"]


def _wider(batch: ChunkBatch) -> None:
    batch.arrays["lookback/obs"] = batch.arrays["lookback/obs"][:, :1]


def _longer(batch: ChunkBatch) -> None:
    batch.arrays["lookback/obs"] = np.concatenate([batch.arrays["lookback/obs"]] * 2)


def _further_than_the_episode(batch: ChunkBatch) -> None:
    batch.table["episode_length"] = batch.table["length"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without, "bad_column: 'logp' has a column or lookback"),
        (_another, "bad_column: 'more' has a column or lookback"),
        (_wider, "bad_column: lookback of column 'obs' has other rows"),
        (_longer, "bad_column: column 'lookback/obs' has shape"),
        (_further_than_the_episode, "bad_table: a chunk looks back on more steps than lie before it"),
    ],
)
def test_lookback_that_contradicts_its_batch_is_refused(change: Any, message: str) -> None:
    with runner(Walk, episode_lookback_horizon=3) as sampler:
        sampler.sample(num_timesteps=4)
        batch: Any = sampler.sample(num_timesteps=4)
    over_the_wire(batch)
    change(batch)
    with pytest.raises(DecodeError, match=message):
        over_the_wire(batch)


@pytest.mark.parametrize("name", ["lookback/obs", "state_in/h", "obs", "obs/x", "weights_seq", "rewards", "env_t"])
def test_a_module_may_not_return_a_column_with_a_reserved_name(name: str) -> None:
    def build(spaces: Any) -> Any:
        module = actor_critic(spaces)
        known = module.numpy_act()

        def act(columns: Any, noise: Any) -> Any:
            return {**known(columns, noise), name: np.zeros(len(columns["obs"]), np.float32)}

        module.numpy_act = lambda: act
        return module

    with runner(Walk, module=build) as sampler, pytest.raises(ModuleError, match="a name that is the runner's own"):
        sampler.sample(num_timesteps=1)
