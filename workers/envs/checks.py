"""Checks of an env's return values. Each raises `EnvContractError`, or returns it, with the value that was seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from headrace.schemas.basics.printable import brief
from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.chunks.batch import info_json
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import EnvContractError
from headrace.schemas.frames.manifest import DEFAULT_LIMITS
from headrace.workers.envs.bounds import LARGEST_REWARD, reward_due, unsound_rewards
from headrace.workers.envs.error_text import message_of

_BOOLS = (bool, np.bool_)
_FLOATS = (float, np.float64)
_TEXT = {str}
_ATOMS = {type(None), bool, int, float, str, *(np.dtype(kind).type for kind in "?bhilqBHILQefd")}
INFO_DEPTH = DEFAULT_LIMITS.header_depth - 4
"""Most levels of an info. In a message of an env host, infos of several agents lie four levels deep."""


def check_rewards(
    rewards: Sequence[Any], lanes: Sequence[int], actions: Sequence[Any]
) -> tuple[NDArray[np.float64], list[tuple[int, EnvContractError]]]:
    """Return rewards as float64, and (position, error) for each bad one. A bad reward becomes 0.

    A good reward is a finite real scalar within `LARGEST_REWARD`.
    """
    if len(rewards) == 1 and type(rewards[0]) in _FLOATS and abs(rewards[0]) <= LARGEST_REWARD:
        return np.array(rewards), []  # the result of the steps below, in half the time
    try:
        array = np.array(rewards)
    except BaseException as error:  # noqa: BLE001 - ragged, or a user's class that is no number
        raise_stop(error)
        return _check_each_reward(rewards, lanes, actions)
    if array.dtype.kind in "fiub" and array.ndim == 1:
        checked = array.astype(np.float64, copy=False)
        if not len(unsound_rewards(checked)):
            return checked, []
    return _check_each_reward(rewards, lanes, actions)


def _check_each_reward(
    rewards: Sequence[Any], lanes: Sequence[int], actions: Sequence[Any]
) -> tuple[NDArray[np.float64], list[tuple[int, EnvContractError]]]:
    checked = np.zeros(len(rewards))
    problems = []
    for position, reward in enumerate(rewards):
        number = _real_scalar(reward)
        if abs(number) <= LARGEST_REWARD:
            checked[position] = number
        else:
            seen = f"{brief(reward)} ({type(reward)}). Actions={actions[lanes[position]]!r:.200}"
            problems.append((position, EnvContractError("Reward", seen, reward_due(number))))
    return checked, problems


def _real_scalar(reward: Any) -> float:
    """Return the number, or NaN for a value that is not a real scalar."""
    if not isinstance(reward, bool | int | float | np.generic | np.ndarray):
        return math.nan
    array = np.asarray(reward)
    return float(array) if array.ndim == 0 and not np.ma.is_masked(reward) and array.dtype.kind in "fiub" else math.nan


def check_info(info: Any) -> None:
    """Raise `EnvContractError` for an info that is no dict."""
    if not isinstance(info, dict):
        raise EnvContractError("info", f"{brief(info)} ({type(info)})", "a dict")


def told_info(info: Any) -> tuple[dict[str, Any], bytes]:
    """Return a copy of an info, which the env cannot change any more, and the info as JSON.

    Raises `EnvContractError` for an info that JSON cannot hold, so that every placement refuses the same ones.
    """
    if not isinstance(info, dict):
        raise EnvContractError("info", f"{brief(info)} ({type(info)})", "a dict")
    try:
        return _read_info(info)
    except BaseException as error:
        raise_stop(error)
        seen = f"{_place_of_bad(info)} ({message_of(error):.200})"
        due = "plain values and arrays, as JSON can hold; an inline env may have others if sampling.infos is none"
        raise EnvContractError("info", seen, due) from error


def own_info(info: Any) -> dict[str, Any]:
    """Return the copy of `told_info`."""
    return told_info(info)[0]


def _read_info(info: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    written = info_json(info)
    if b"null" in written or not (_ATOMS.issuperset(map(type, info.values())) and _TEXT.issuperset(map(type, info))):
        return json_copy(info), written
    return dict(info), written


def json_copy(value: Any, levels: int = INFO_DEPTH) -> Any:
    """Return a copy of a value that orjson has written. Raises `ValueError` for what it has changed in silence."""
    if isinstance(value, dict | list | tuple):
        if not levels:
            raise ValueError(f"nested deeper than {INFO_DEPTH} levels")
        if isinstance(value, dict):
            if not _TEXT.issuperset(map(type, value)):
                json_copy([*value])
                if len(orjson.loads(info_json(dict.fromkeys(value)))) < len(value):
                    raise ValueError("two keys that are the same as text")
            return {key: json_copy(part, levels - 1) for key, part in value.items()}
        own = [json_copy(part, levels - 1) for part in value]
        return own if isinstance(value, list) else tuple(own)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufU":
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise ValueError("a number that is not finite, which JSON does not have")
        return value.copy()
    if isinstance(value, float | np.floating) and not math.isfinite(value):
        raise ValueError(f"{value}, which JSON does not have")
    if type(value) in _ATOMS:
        return value
    if isinstance(value, Enum):
        return json_copy(value.value, levels)
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        return json_copy(value.tolist(), levels)
    # As it arrives from other processes: a date as text, for example.
    read = orjson.loads(info_json(value))
    return json_copy({name: getattr(value, name) for name in read} if is_dataclass(value) else read, levels)


def _place_of_bad(value: Any) -> str:
    """Return which part of an info cannot be sent, and its `repr`."""
    where = "info"
    for _ in range(4):
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, part in parts:
            try:
                _read_info({"": part})
            except BaseException as error:  # noqa: BLE001 - as in `told_info`
                raise_stop(error)
                where, value = f"{where}[{brief(key, 40)}]", part
                break
        else:
            break
    return f"{where} = {brief(value)}"


def end_of(terminated: Any, truncated: Any) -> ChunkEnd:
    """Return the kind of end, ONGOING for none. Terminated wins over truncated: it needs no bootstrapping."""
    if not isinstance(terminated, _BOOLS) or not isinstance(truncated, _BOOLS):
        seen = f"{brief(terminated, 40)} ({type(terminated)}) and {brief(truncated, 40)} ({type(truncated)})"
        raise EnvContractError("terminated and truncated", seen, "bools")
    if terminated:
        return ChunkEnd.TERMINATED
    return ChunkEnd.TRUNCATED if truncated else ChunkEnd.ONGOING


def take_apart(answer: Any, error: BaseException) -> EnvContractError:
    """Return the error for a result of `step` that raised `error` when it was read."""
    if isinstance(error, EnvContractError):
        return error
    count = f"{len(answer)} values, " if isinstance(answer, tuple) else ""
    given = f"{count}{brief(answer, 120)}"
    return EnvContractError("answer of step", given, "(obs, reward, terminated, truncated, info)")


def take_reset_apart(answer: Any) -> tuple[Any, dict[str, Any]]:
    """Return (observation, info) of a reset. Raises `EnvContractError`."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise EnvContractError("answer of reset", brief(answer, 120), "(obs, info)")
    check_info(answer[1])
    return answer[0], answer[1]
