"""Gymnasium's spaces from Headrace's own. The only schema that imports gymnasium: load it only where it is needed."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from headrace.schemas.chunks.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple, column_dtype


def to_gym(space: Space) -> gym.Space[Any]:
    """Return a gymnasium space equal to the one from which workers made `space`.

    The exception is MultiBinary((n,)), which comes back as MultiBinary(n); gymnasium does not count them as equal.
    """
    match space:
        case Box():
            return gym.spaces.Box(space.low, space.high, space.shape, column_dtype(space).type)
        case Discrete():
            return gym.spaces.Discrete(space.n, start=space.start, dtype=column_dtype(space).type)
        case MultiDiscrete():
            return gym.spaces.MultiDiscrete(space.nvec, dtype=column_dtype(space).type, start=space.start)
        case MultiBinary():
            return gym.spaces.MultiBinary(space.shape[0] if len(space.shape) == 1 else space.shape)
        case Dict():
            return gym.spaces.Dict({key: to_gym(sub) for key, sub in space.spaces.items()})
        case Tuple():
            return gym.spaces.Tuple([to_gym(sub) for sub in space.spaces])


def is_alike(one: gym.Space[Any], other: gym.Space[Any], *, any_bounds: bool) -> bool:
    """Return whether both spaces hold the same values; with `any_bounds`, bounds of floats may differ."""
    match one, other:
        case gym.spaces.Dict(), gym.spaces.Dict():
            return one.keys() == other.keys() and all(is_alike(one[k], other[k], any_bounds=any_bounds) for k in one)
        case gym.spaces.Tuple(), gym.spaces.Tuple():
            pairs = zip(one, other, strict=False)
            return len(one) == len(other) and all(is_alike(*pair, any_bounds=any_bounds) for pair in pairs)
        case gym.spaces.MultiBinary(), gym.spaces.MultiBinary():
            return one.shape == other.shape
        case gym.spaces.Box(), gym.spaces.Box() if any_bounds and one.dtype.kind == "f":
            return one.shape == other.shape and one.dtype == other.dtype
    return one == other
