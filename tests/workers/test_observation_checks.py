"""Observations are written and checked in batches; one bad element refuses the observation of its env."""

from __future__ import annotations

import tracemalloc
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from headrace.schemas.errors import EnvContractError
from headrace.workers.envs.checks import check_rewards
from headrace.workers.envs.native.vector_step import read_step
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.spaces import convert
from headrace.workers.external.calls import RowReader

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
            if lane in bad:
                assert space.contains(kept.astype(space.dtype))
            else:
                np.testing.assert_array_equal(kept, batch[lane])
    assert refused


def test_vectors_of_other_lengths_are_refused_though_they_have_the_right_size_together() -> None:
    observations = Observations(convert(gym.spaces.Box(-1, 1, (4,), np.float32), "observation"), 2, check_bounds=True)
    problems = observations.put(None, [np.zeros(2, np.float32), np.zeros(6, np.float32)])
    assert [lane for lane, _ in problems] == [0, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_the_check_of_large_observations_allocates_no_array_of_their_size(dtype: type) -> None:
    space = gym.spaces.Box(0, 1, (1 << 18,), dtype)
    observations = Observations(convert(space, "observation"), 2, check_bounds=True)
    batch = [np.ones(space.shape, dtype) for _ in range(2)]
    tracemalloc.start()
    try:
        assert observations.put(None, batch) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 16  # numpy 1.26 converts in a buffer of 32 KiB


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


ODD = [
    (gym.spaces.Box(0, 255, (), np.uint8), [300, -1, np.int64(256), np.array(300), 2**70, 3.0, np.nan, "7", 1j]),
    (gym.spaces.Box(-(2**63), 2**63 - 1, (), np.int64), [2**63, np.uint64(2**64 - 1), np.ma.masked]),
    (gym.spaces.Box(0, 2**64 - 1, (), np.uint64), [-1, np.int8(-1)]),
    (gym.spaces.Box(0, 2**53, (), np.int64), [2**53 + 1, -1]),
    (gym.spaces.Discrete(5, dtype=np.uint8), [258, 5, -251]),
    (gym.spaces.Discrete(3, start=-1), [2, -2, 2**32]),
    (
        gym.spaces.Box(-np.inf, np.inf, (), np.float32),
        [1e300, 2**24 + 1, np.float64(-4e38), np.ma.array(1.0, mask=True)],
    ),
    (
        gym.spaces.Box(-np.inf, np.inf, (), np.float64),
        [2**53 + 1, np.int64(-(2**53) - 1), np.uint64(2**64 - 1), True + 0j],
    ),
    (
        gym.spaces.Box(-np.inf, np.inf, (2,), np.float64),
        [
            np.array([0, 2**53 + 1]),
            [0, 2**53 + 1],
            np.ma.array([1.0, 2.0], mask=[False, True]),
            np.array([1.0, 2.0], object),
            np.array([1j, 0]),
            np.array(["1", "2"]),
        ],
    ),
    (gym.spaces.Box(0, 9, (2,), np.int64), [np.ma.array([1, 2], mask=[True, False]), np.array([2.0, 3.0])]),
    (gym.spaces.MultiDiscrete([3, 300]), [np.array([2, 300]), np.array([-1, 0]), np.array([0, 1 << 32])]),
    (gym.spaces.MultiBinary(2), [np.array([0, 257]), np.array([0, 2], np.int8)]),
]
"""A space, and values that no element of it has: numpy would change each of them."""


def refusals(space: gym.Space[Any], values: list[Any]) -> list[int]:
    observations = Observations(convert(space, "observation"), len(values), check_bounds=True)
    return [lane for lane, _ in observations.put(None, values)]


@pytest.mark.filterwarnings("ignore:.*converting a masked element to nan")
@pytest.mark.parametrize(("space", "values"), ODD, ids=str)
def test_a_value_that_the_dtype_or_the_bounds_do_not_hold_is_refused_and_not_cast(
    space: gym.Space[Any], values: list[Any]
) -> None:
    sound = np.array(space.sample())[()]
    nested = gym.spaces.Dict(a=gym.spaces.Tuple([space]))
    reader = RowReader(convert(space, "observation"), "obs", "observation")
    for value in values:
        assert refusals(space, [value]) == [0]
        assert refusals(space, [sound, value, sound]) == [1]
        assert refusals(nested, [{"a": (sound,)}, {"a": (value,)}]) == [1]
        with pytest.raises(EnvContractError):
            reader.read(value)
        if isinstance(value, np.ndarray):
            batch = np.ma.stack([value, value]) if np.ma.is_masked(value) else np.stack([value, value])
            rows = Observations(convert(space, "observation"), 2, check_bounds=True)
            with pytest.raises(EnvContractError):
                raise rows.put_rows(batch)[0][1]


SOUND = [
    (gym.spaces.Box(0, 255, (), np.uint8), [255, np.int64(7), np.array(3, np.uint16), True, np.ma.array(4)]),
    (gym.spaces.Box(-np.inf, np.inf, (), np.float32), [0.1, 2**24, np.inf, np.float64(1e30), np.int16(3), 2**60]),
    (gym.spaces.Box(-np.inf, np.inf, (), np.float64), [2**53, 2**60, -(2**63), 3]),
    (gym.spaces.Box(-np.inf, np.inf, (2,), np.float64), [np.array([1, 2**53]), [1.5, 2], np.ones(2, np.float32)]),
    (gym.spaces.Box(0, 9, (2,), np.int64), [[1, 2], np.array([3, 4], np.int8), np.ma.array([1, 2], mask=False)]),
]


@pytest.mark.parametrize(("space", "values"), SOUND, ids=str)
def test_a_value_of_another_width_that_the_dtype_holds_is_taken(space: gym.Space[Any], values: list[Any]) -> None:
    for value in values:
        observations = Observations(convert(space, "observation"), 2, check_bounds=True)
        assert observations.put(None, [value] * 2) == []
        np.testing.assert_array_equal(observations.columns["obs"], np.array([value] * 2).astype(space.dtype))


@pytest.mark.filterwarnings("ignore:.*converting a masked element to nan")
def test_a_masked_reward_is_refused() -> None:
    odd = [np.ma.masked, np.ma.array(1.0, mask=True), np.ma.array(1, mask=True), 1j, "1", 1e300]
    for reward in odd:
        assert [at for at, _ in check_rewards([1.0, reward], [0, 1], [0, 0])[1]] == [1]
    for rewards in (np.ma.array([1.0, 2.0], mask=[True, False]), np.array([1j, 0])):
        with pytest.raises(EnvContractError, match="Rewards"):
            read_step((np.zeros((2, 1)), rewards, np.zeros(2, bool), np.zeros(2, bool), {}), 2)


def test_the_space_of_a_camera_is_converted_without_an_object_for_each_of_its_numbers() -> None:
    space = gym.spaces.Box(0, 255, (270, 480, 3), np.uint8)
    tracemalloc.start()
    try:
        converted = convert(space, "observation")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (converted.flat_low, converted.flat_high) == (0.0, 255.0)
    assert peak < 2 * space.low.size


def test_a_bad_row_is_the_fault_of_the_env_that_it_belongs_to() -> None:
    seen = Observations(convert(gym.spaces.Box(-np.inf, np.inf, (1,)), "observation"), 3, check_bounds=True)
    ((env, error),) = seen.put_rows(np.array([[5.0], [np.nan], [7.0]], np.float32), np.array([1, 2, 0]))
    assert (env, error.expected) == (2, "free of NaN")
    assert seen.columns["obs"].tolist() == [[7.0], [5.0], [0.0]]
