"""Observations are written and checked in batches; one bad element refuses the observation of its env."""

from __future__ import annotations

import tracemalloc
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from headrace.workers.envs.observations import Observations
from headrace.workers.envs.spaces import convert

SHAPE = (3, 5)
SPACES = [
    gym.spaces.Box(-1.0, 1.0, SHAPE, np.float32),
    gym.spaces.Box(-1.0, 1.0, SHAPE, np.float64),
    gym.spaces.Box(0.0, np.inf, SHAPE, np.float32),
    gym.spaces.Box(-np.inf, 0.0, SHAPE, np.float32),
    gym.spaces.Box(-np.inf, np.inf, SHAPE, np.float32),
    gym.spaces.Box(np.linspace(-2, -1, 15, dtype=np.float32).reshape(SHAPE), np.ones(SHAPE, np.float32)),
    gym.spaces.Box(0, 1, SHAPE, np.uint8),
    gym.spaces.Box(-5, 7, SHAPE, np.int64),
    gym.spaces.MultiDiscrete([3, 4, 5], start=[1, 0, 2]),
    gym.spaces.MultiBinary(4),
    gym.spaces.Discrete(3, start=1),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_an_observation_is_refused_if_one_element_is_outside_its_bounds_or_nan(space: gym.Space[Any]) -> None:
    space.seed(0)
    random = np.random.default_rng(0)
    observations = Observations(convert(space, "observation"), 4, check_bounds=True)
    refused = 0
    for _ in range(60):
        batch = [np.array(space.sample()) for _ in range(4)]
        spoilt = [random.integers(4)] if random.random() < 0.5 else []
        for lane in spoilt:
            values = [-2, 8, np.nan, -np.inf, np.inf] if batch[lane].dtype.kind == "f" else [0, 8]
            batch[lane].flat[random.integers(batch[lane].size)] = random.choice(values)
        bad = [lane for lane in range(4) if not space.contains(batch[lane])]
        assert [lane for lane, _ in observations.put(None, batch)] == bad
        refused += len(bad)
        for lane in range(4):
            kept = observations.columns["obs"][lane]
            np.testing.assert_array_equal(kept, 0 if lane in bad else batch[lane])
    assert refused


def test_vectors_of_other_lengths_are_refused_though_they_have_the_right_size_together() -> None:
    observations = Observations(convert(gym.spaces.Box(-1, 1, (4,), np.float32), "observation"), 2, check_bounds=True)
    problems = observations.put(None, [np.zeros(2, np.float32), np.zeros(6, np.float32)])
    assert [lane for lane, _ in problems] == [0, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_the_check_of_large_observations_allocates_no_array_of_their_size(dtype: type) -> None:
    space = gym.spaces.Box(0, 1, (1 << 16,), dtype)
    observations = Observations(convert(space, "observation"), 2, check_bounds=True)
    batch = [np.ones(space.shape, dtype) for _ in range(2)]
    tracemalloc.start()
    try:
        assert observations.put(None, batch) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 14


def test_an_empty_batch_of_observations_is_accepted() -> None:
    observations = Observations(convert(SPACES[0], "observation"), 2, check_bounds=True)
    assert observations.put(np.array([], np.intp), []) == []


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_huge_and_infinite_numbers_of_an_unbounded_space_are_taken_without_a_warning(dtype: Any) -> None:
    """Their squares are infinite, as is the sum of them."""
    huge = np.finfo(dtype).max
    space = convert(gym.spaces.Box(-np.inf, np.inf, (3,), dtype), "")
    for width in (1, 2):
        seen = Observations(space, width, check_bounds=True)
        batch = np.array([[huge, -huge, np.inf]] * width, dtype)
        assert seen.put(None, list(batch)) == []
        np.testing.assert_array_equal(seen.columns["obs"], batch)
        batch[-1, 1] = np.nan
        assert [lane for lane, _ in seen.put(None, list(batch))] == [width - 1]


@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 3), (3, 1)])
def test_an_observation_of_another_shape_is_refused_where_numpy_would_broadcast_it(shape: tuple[int, ...]) -> None:
    space = convert(gym.spaces.Box(-1.0, 1.0, (3,), np.float32), "")
    for width in (1, 2):
        seen = Observations(space, width, check_bounds=True)
        sound, odd = np.zeros(3, np.float32), np.zeros(shape, np.float32)
        assert [lane for lane, _ in seen.put(None, [*[sound] * (width - 1), odd])] == [width - 1]
