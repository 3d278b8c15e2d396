"""Turns gymnasium's spaces into Headrace's own, which travel as data, and back."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Dict, Discrete, MultiBinary, MultiDiscrete, Space, Spaces, Tuple
from headrace.schemas.errors import EnvContractError
from headrace.schemas.frames.wire import ALLOWED_DTYPES
from headrace.workers.envs.bounds import bounded_box

_WRAPPERS = {
    "MissionSpace": "give a function that wraps the env in minigrid.wrappers.ImgObsWrapper, which leaves the mission "
    "out, or in minigrid.wrappers.FlatObsWrapper, which encodes it"
}
"""Kind of space that no column can hold -> what to do about it."""


def spaces_of(env: Any, prefix: str = "") -> Spaces:
    """Return both spaces of an env, or of each env of a native vector, where `prefix` is "single_".

    Raises `EnvContractError` for a kind that no column can hold.
    """
    return Spaces(
        observation=convert(getattr(env, f"{prefix}observation_space", None), "observation space"),
        action=convert(getattr(env, f"{prefix}action_space", None), "action space"),
    )


def convert(space: Any, where: str) -> Space:
    """Return a Box, Discrete, MultiDiscrete or MultiBinary, or a Dict or Tuple of them, as data.

    `where` names the space in errors.
    """
    match space:
        case gym.spaces.Box() | gym.spaces.MultiDiscrete() | gym.spaces.MultiBinary() if 0 in space.shape:
            raise EnvContractError(
                f"shape of {where}", str(space.shape), "of one element or more (leave an empty one out)"
            )
        case gym.spaces.Dict() | gym.spaces.Tuple() if not len(space.spaces):
            raise EnvContractError(where, f"an empty {type(space).__name__}", "of one space or more (leave it out)")
        case gym.spaces.Box():
            return bounded_box(space.low, space.high, _dtype(space, where))
        case gym.spaces.Discrete():
            return Discrete(n=int(space.n), start=int(space.start), dtype=_dtype(space, where))
        case gym.spaces.MultiDiscrete():
            nvec, start = _ints(space.nvec), _ints(space.start)
            return MultiDiscrete(nvec=nvec, start=start, shape=space.shape, dtype=_dtype(space, where))
        case gym.spaces.MultiBinary():
            return MultiBinary(shape=space.shape, dtype=_dtype(space, where))
        case gym.spaces.Dict():
            return Dict(spaces={_key(k, where): convert(s, f"{where}[{k!r}]") for k, s in space.spaces.items()})
        case gym.spaces.Tuple():
            return Tuple(spaces=tuple(convert(s, f"{where}[{i}]") for i, s in enumerate(space.spaces)))
    kind = type(space).__name__
    advice = _WRAPPERS.get(kind, "wrap the env to give one of them")
    expected = f"Box, Discrete, MultiDiscrete, MultiBinary, or Dict or Tuple of these ({advice})"
    raise EnvContractError(where, "None, as if the env did not set it" if space is None else kind, expected)


def _dtype(space: gym.Space[Any], where: str) -> str:
    dtype = np.dtype(space.dtype).newbyteorder("<").str if space.dtype is not None else "none"
    if dtype not in ALLOWED_DTYPES:
        raise EnvContractError(f"dtype of {where}", dtype, f"one of {', '.join(sorted(ALLOWED_DTYPES))}")
    return dtype


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str) or not key or "/" in key:
        raise EnvContractError(f"key of {where}", repr(key), "a non-empty string without '/', which separates columns")
    return key


def _ints(values: NDArray[Any]) -> tuple[int, ...]:
    return tuple(values.ravel().tolist())
