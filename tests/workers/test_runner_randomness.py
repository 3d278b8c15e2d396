"""Seeds, episode ids and noise: different in each env, worker and life, and equal in every repetition of a run."""

from __future__ import annotations

import random
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from headrace.schemas.chunks.spaces import Spaces
from headrace.workers import EnvContext
from headrace.workers.envs.actions import RandomActions
from headrace.workers.envs.bounds import ActionBounds
from headrace.workers.envs.spaces import convert
from headrace.workers.randomness.seeds import EnvSeeds, NoiseBlocks, SeedTree
from support.envs.toy import Counting, Walk, runner


def _episodes(**settings: Any) -> list[Any]:
    with runner(num_envs=3, env_config={"length": 2}, **settings) as sampler:
        calls = [{"num_timesteps": 30}, {"num_episodes": 5}] * 3
        return [chunk for size in calls for chunk in sampler.sample(**size) if len(chunk)]


def _told(chunks: list[Any]) -> list[Any]:
    return [(c.episode_id, c.seed, c.actions.tolist()) for c in chunks]


def test_no_two_episodes_of_a_fleet_share_a_seed_or_an_id() -> None:
    """This holds in another incarnation, and where `num_episodes` resets the envs first."""
    lives = [(w, i) for w in range(3) for i in range(2)]
    chunks = [c for w, i in lives for c in _episodes(worker_index=w, incarnation=i)]
    episodes = {c.episode_id: c.seed for c in chunks}
    assert len(episodes) > 300
    assert len(set(episodes.values())) == len(episodes)


def test_the_seed_of_a_chunk_is_the_seed_of_its_envs_reset() -> None:
    seen: list[Any] = []

    def create(context: Any) -> Counting:
        env = Counting(context)
        env.seeds = seen
        return env

    with runner(create, env_config={"length": 2}) as sampler:
        told = [c.seed for c in sampler.sample(num_timesteps=20)]
    assert seen[:10] == told


def test_same_seed_and_run_repeat_to_the_bit_and_other_runs_have_other_ids() -> None:
    a, b, other = _episodes(run_uid="a"), _episodes(run_uid="a"), _episodes(run_uid="b")
    assert _told(a) == _told(b)
    assert [c.seed for c in a] == [c.seed for c in other]
    assert {c.episode_id for c in a}.isdisjoint(c.episode_id for c in other)
    assert {c.seed for c in a}.isdisjoint(c.seed for c in _episodes(run_uid="a", seed=None))
    unnamed = [{c.episode_id for c in _episodes(run_uid="")} for _ in range(2)]
    assert unnamed[0].isdisjoint(unnamed[1])


@pytest.mark.parametrize("random_actions", [False, True])
def test_the_actions_of_an_env_do_not_depend_on_the_width_of_its_vector(random_actions: bool) -> None:
    """Random numbers belong to the env. (BLAS may round a policy otherwise at another width: compare actions.)"""
    lives = []
    for width in (1, 5):
        with runner(Walk, num_envs=width, env_config={}) as sampler:
            batch = sampler.sample(num_timesteps=60 * width, random_actions=random_actions)
            lives.append([(c.seed, c.actions.tolist()) for c in batch if c.env_index == 0])
    assert lives[0] == lives[1]


def test_sampling_leaves_global_random_state_unchanged() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    _episodes()
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_env_seeds_keep_below_their_limit() -> None:
    seeds = EnvSeeds(SeedTree(0, 0, 0, 1).resets[0], 2**32 - 1)
    drawn = [seeds.next() for _ in range(1000)]
    assert max(drawn) < 2**32
    assert max(drawn) > 2**31
    assert len(set(drawn)) == 1000


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_noise_of_an_env_comes_from_its_own_stream(kind: Any) -> None:
    narrow, wide = (NoiseBlocks(SeedTree(3, 0, 0, width).policy, 2, kind) for width in (1, 4))
    rows = [(narrow.next()[0].copy(), wide.next()[0].copy()) for _ in range(200)]
    for a, b in rows:
        np.testing.assert_array_equal(a, b)
    assert len({row[0][0] for row in rows}) > 190


SPACES = [
    gym.spaces.Discrete(3, start=-1),
    gym.spaces.MultiDiscrete([2, 5], start=[1, -2]),
    gym.spaces.MultiBinary((2, 2)),
    gym.spaces.Box(-2.0, 3.0, (2, 3), np.float32),
    gym.spaces.Box(0, 255, (3,), np.uint8),
    gym.spaces.Box(np.array([0.0, -np.inf, -np.inf], np.float32), np.array([np.inf, 1.0, np.inf], np.float32)),
    gym.spaces.Dict({"a": gym.spaces.Discrete(2), "b": gym.spaces.Tuple((gym.spaces.Box(-1.0, 1.0, (2,)),))}),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_random_actions_lie_in_their_space_and_reach_all_of_it(space: gym.Space[Any]) -> None:
    class Judging(Counting):
        action_space = space

        def step(self, action: Any) -> Any:
            assert self.action_space.contains(action), action
            return super().step(action)

    with runner(Judging, restart_failed_sub_environments=False, num_envs=2) as sampler:
        sampler.sample(num_timesteps=40, random_actions=True)
    draw = RandomActions(Spaces(observation=convert(space, ""), action=convert(space, "")).action)
    columns = draw(np.random.default_rng(0).random((4000, draw.noise_size), dtype=np.float32))
    for leaf in columns.values():
        if leaf.dtype.kind in "iu" and leaf.dtype != np.uint8:
            values, counts = np.unique(leaf[:, ...].reshape(4000, -1)[:, 0], return_counts=True)
            assert counts.min() > 0.8 * 4000 / len(values)


def _edges() -> list[gym.Space[Any]]:
    spaces: list[gym.Space[Any]] = [gym.spaces.Box(0, 1, (2,), np.bool_), gym.spaces.MultiBinary(2)]
    for dtype in (np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64):
        whole = np.iinfo(dtype)
        spaces += [gym.spaces.Box(whole.min, whole.max, (2,), dtype), gym.spaces.Box(0, whole.max, (2,), dtype)]
    for dtype in (np.float16, np.float32, np.float64):
        most = np.finfo(dtype).max
        pairs = [(-most, most), (0.0, most), (most / 4 * 3, np.inf), (-np.inf, 0.0), (-np.inf, np.inf)]
        spaces += [gym.spaces.Box(low, high, (2,), dtype) for low, high in pairs]
    return [*spaces, gym.spaces.MultiDiscrete([3, 2], start=[-4, 7])]


@pytest.mark.parametrize("space", _edges(), ids=str)
@pytest.mark.parametrize("way", ["policy", "best", "random"])
def test_actions_at_the_edge_of_a_dtype_lie_in_their_space(space: gym.Space[Any], way: str) -> None:
    seen: list[Any] = []

    class Keeping(Counting):
        action_space = space

        def step(self, action: Any) -> Any:
            assert action.dtype == space.dtype
            assert self.action_space.contains(action), action
            seen.append(action.copy())
            return super().step(action)

    how = {"policy": {}, "best": {"explore": False}, "random": {"random_actions": True}}[way]
    # Deviations above 2 take many actions of the policy to both bounds.
    given = {"module_config": {"log_std": 1.0}} if isinstance(space, gym.spaces.Box) else {}
    with runner(Keeping, restart_failed_sub_environments=False, **given) as sampler:
        sampler.sample(num_timesteps=60, **how)
    actions = np.array(seen, np.float64)
    assert np.isfinite(actions).all()
    corner = isinstance(space, gym.spaces.Box) and bool((~space.bounded_above | ~space.bounded_below).any())
    assert way == "best" or corner or (actions.min(0) < actions.max(0)).all()


def test_the_best_action_in_torch_is_the_one_in_numpy_at_the_edge_of_a_dtype() -> None:
    for space in _edges():
        if isinstance(space, gym.spaces.Box):
            leaf: Any = convert(space, "")
            bounds, actions = ActionBounds(leaf), np.array([[-9.0, 0.0], [0.375, 9.0]])
            if leaf.dtype != "<u8" or hasattr(torch, "uint64"):
                expected = bounds.clip(bounds.unsquash(actions))
                given = bounds.torch_clip(bounds.torch_unsquash(torch.from_numpy(actions)))
                assert given.numpy().tolist() == expected.tolist() == bounds.to_env(actions).tolist(), space


def test_each_env_creator_gets_its_own_seed_derived_from_the_runs_seed() -> None:
    def told(worker_index: int, **settings: Any) -> list[Any]:
        seeds: list[Any] = []

        def create(context: EnvContext) -> Counting:
            seeds.append(context.seed)
            assert context.num_envs == 3
            assert context.at(2).seed == context.seed + 2 - context.vector_index
            return Counting(context)

        with runner(create, worker_index, num_envs=3, **settings) as sampler:
            sampler.make_env()
        return seeds

    assert told(0) == told(0)
    assert len({*told(0), *told(1), *told(0, seed=8)}) == 18
    assert all(0 <= seed < 100 for seed in told(0, max_env_seed=100))
