"""Checks of an env's return values. Each raises `EnvContractError`, or returns it, with the value that was seen."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from os import PathLike, fspath
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from headrace.schemas.basics.printable import brief, one_line
from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.info_json import MARK, info_json, is_odd, plain_json, read_info
from headrace.schemas.errors import EnvContractError
from headrace.schemas.frames.manifest import DEFAULT_LIMITS
from headrace.workers.envs.action_masks import MASK, masks_of
from headrace.workers.envs.bounds import LARGEST_REWARD, reward_due, unsound_rewards
from headrace.workers.envs.error_text import message_of

log = logging.getLogger(__name__)

_BOOLS = (bool, np.bool_)
_FLOATS = (float, np.float64)
_TEXT = {str}
_PLAIN = {type(None), bool, int, float, str}
_ATOMS = {*_PLAIN, *(np.dtype(kind).type for kind in "?bhilqBHILQefd")}
INFO_DEPTH = DEFAULT_LIMITS.header_depth - 4
"""Most levels of an info. In a message of an env host, infos of several agents lie four levels deep."""
_CONTAINERS = (dict, list, tuple, Mapping, Set, deque, range)
_MOST_NAMES = 8
NoteLeftOut = Callable[[Sequence[str]], None]
"""Takes what was left out of an info; see `RunnerTotals.note_left_out`."""


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


def told_info(info: Any) -> bytes:
    """Return an info as JSON. What JSON cannot hold is left out, and the JSON names it, for `heard_info`.

    Raises `EnvContractError` for an info that is no dict.
    """
    written = _json_of_atoms(info)
    if written is None:
        copying = _Copying()
        return info_json(copying.of_info(info), copying.left_out)
    return info_json(info) if b"null" in written and is_odd(info) else written


def own_info(note: NoteLeftOut, info: Any) -> dict[str, Any]:
    """Return a copy of an info, which its env cannot change any more: what a process of that env would tell.

    Raises `EnvContractError` for an info that is no dict.
    """
    written = _json_of_atoms(info)
    if written is not None:  # the results of the steps below, in half the time
        if _PLAIN.issuperset(map(type, info.values())):
            return dict(info)
        if not (b"null" in written and is_odd(info)):
            return orjson.loads(written)  # type: ignore[no-any-return]
    if dict.__contains__(info, MARK):
        info = heard_info(note, info)  # a client has written it
    return heard_info(note, orjson.loads(told_info(info)))


def own_masks(note: NoteLeftOut, info: Any) -> dict[str, Any]:
    """Return a copy of the masks in an info, and look at nothing else. Raises as `own_info` does."""
    check_info(info)
    return own_info(note, masks_of(info))


def _json_of_atoms(info: Any) -> bytes | None:
    """Return an info of numbers and texts alone as JSON, null for NaN; None for any other.

    Raises `EnvContractError` for an info that is no dict.
    """
    if not isinstance(info, dict):
        check_info(info)
    try:
        if _ATOMS.issuperset(map(type, info.values())) and _TEXT.issuperset(map(type, info)) and MARK not in info:
            return plain_json(info)
    except BaseException as error:  # noqa: BLE001 - too large an integer, or a user's class of dict
        raise_stop(error)
    return None


def heard_info(note: NoteLeftOut, info: dict[str, Any]) -> dict[str, Any]:
    """Return an info of `told_info` that came as JSON. `note` hears what was left out."""
    if MARK not in info:
        return info
    if isinstance(left_out := info[MARK], list) and left_out:
        note([one_line(f"{name:.200}") for name in left_out[:_MOST_NAMES]])
    return read_info(info)  # type: ignore[no-any-return]


class _Copying:
    """One copy of an info, as `info_json` writes it. `left_out` names what JSON cannot hold.

    The place of a value is a pair: the place of the container around it, None for the info, and the key there.
    """

    def __init__(self) -> None:
        self.left_out: list[str] = []
        self._around = set[int]()
        """Containers around the value that is being copied."""

    def of_info(self, info: dict[Any, Any]) -> dict[Any, Any]:
        """Return a copy of the whole info."""
        try:
            return self._within(info, info, None)  # type: ignore[no-any-return]
        except BaseException as error:  # noqa: BLE001 - a user's class of dict
            self._leave_out(None, error)
            return {}

    def of(self, value: Any, place: Any) -> Any:
        """Return a copy of the value, or raise any error."""
        kind = type(value)
        if kind in _ATOMS:
            if kind is str:
                return _text(value)
            return str(value) if kind is int and not -(2**63) <= value < 2**64 else value
        if isinstance(value, np.ndarray):
            return self._of_array(value, place)
        if isinstance(value, _CONTAINERS):
            return self._within(value, value, place)
        if isinstance(value, Enum):
            return self.of(value.value, place)
        for plain in (str, int, float):
            if isinstance(value, plain):  # of a class of its own
                return self.of(plain(value), place)
        if isinstance(value, np.floating):  # longer than a double
            return float(value)
        if is_dataclass(value) and not isinstance(value, type):
            parts = {one.name: getattr(value, one.name) for one in fields(value) if not one.name.startswith("_")}
            return self._within(value, parts, place)
        if isinstance(value, bytes | bytearray):
            return value.decode(errors="backslashreplace")
        if isinstance(value, PathLike):
            return self.of(fspath(value), place)
        return self._of_other(value, place)

    def _of_array(self, value: NDArray[Any], place: Any) -> Any:
        match value.dtype.kind:
            case "b" | "i" | "u" | "f":
                return value.astype(float if value.dtype.char == "g" else value.dtype.newbyteorder("="), copy=False)
            case "U":
                return np.array(self.of(value.tolist(), place), str)
            case "O" | "S" | "V":
                return self.of(value.tolist(), place)
        if value.dtype.kind == "c":
            raise TypeError("complex numbers")
        return self._of_other(value, place)

    def _of_other(self, value: Any, place: Any) -> Any:
        try:
            return orjson.loads(plain_json(value))  # a date as text, for example
        except TypeError:
            if not hasattr(value, "tolist"):  # as a tensor has
                raise
            return self.of(value.tolist(), place)

    def _within(self, value: Any, parts: Any, place: Any) -> Any:
        if id(value) in self._around:
            raise ValueError("it contains itself")
        if len(self._around) >= INFO_DEPTH:
            raise ValueError(f"nested deeper than {INFO_DEPTH} levels")
        self._around.add(id(value))
        try:
            if isinstance(parts, Mapping):
                return self._of_mapping(parts, place)
            in_order = sorted(parts, key=repr) if isinstance(parts, Set) else parts
            return [self._of_element(part, (place, ...)) for part in in_order]
        finally:
            self._around.discard(id(value))

    def _of_element(self, value: Any, place: Any) -> Any:
        try:
            return self.of(value, place)
        except BaseException as error:  # noqa: BLE001 - a user's class
            self._leave_out(place, error)
            return None

    def _of_mapping(self, value: Mapping[Any, Any], place: Any) -> dict[str, Any]:
        own: dict[str, Any] = {}
        for key, part in value.items():
            try:
                name = _name_of(key)
                if name in own:
                    raise ValueError("two keys that are the same as text")
                if name == MARK and place is None:
                    raise ValueError("a reserved key")
                own[name] = self.of(part, (place, key))
            except BaseException as error:  # noqa: BLE001 - a user's class
                self._leave_out((place, key), error)
                if key == MASK:
                    own[key] = None  # no mask, which is an error where it is read
        return own

    def _leave_out(self, place: Any, error: BaseException) -> None:
        raise_stop(error)
        name = f"{_where(place):.100} ({message_of(error):.100})"
        if name not in self.left_out and len(self.left_out) < _MOST_NAMES:
            self.left_out.append(name)


def _text(value: str) -> str:
    """Return the text, with escapes for lone surrogates."""
    return value if value.isascii() else value.encode(errors="backslashreplace").decode()


def _name_of(key: Any) -> str:
    """Return a key as JSON has it."""
    text = ""
    if not isinstance(key, str):
        with suppress(TypeError):
            (text,) = orjson.loads(plain_json({key: 0}))
    return _text(str(key)) if not text or (text == "null" and key is not None) else text


def _where(place: Any) -> str:
    return "info" if place is None else f"{_where(place[0])}[{'...' if place[1] is ... else brief(place[1], 40)}]"


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
