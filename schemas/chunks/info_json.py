r"""Infos as JSON, which has no NaN and no infinities.

An info with such numbers, or of which something was left out, has one more key, `MARK`: the list of what was left out.
In such an info a number that is not finite is the text "\0nan", "\0inf" or "\0-inf", and any other text that begins
with \0 has one \0 more. All other infos are JSON as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import orjson

MARK = "\0"
"""A key that no env's info has: `told_info` leaves it out."""
_NUMBERS = {f"{MARK}{number}": number for number in (math.nan, math.inf, -math.inf)}


def plain_json(value: Any) -> bytes:
    """Return a value as JSON, null for NaN. Raises `TypeError` for what JSON cannot hold."""
    return orjson.dumps(value, default=_listed, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def info_json(info: Mapping[str, Any], left_out: Iterable[str] = ()) -> bytes:
    """Return an info as JSON: lists for tuples and arrays, text for keys. Raises `TypeError` for what JSON cannot hold.

    `left_out` names values that the info had, and is for `read_info`'s caller.
    """
    written = plain_json(info)
    if not left_out and not (b"null" in written and is_odd(info)):
        return written
    return plain_json({MARK: [*left_out], **_spelt(info)})


def infos_json(infos: Mapping[int, Mapping[str, Any]]) -> bytes:
    """Return the infos of a chunk as JSON, by row. Raises `TypeError` as `info_json` does."""
    rows = {str(t): info for t, info in infos.items()}
    written = plain_json(rows)
    return plain_json({t: orjson.Fragment(info_json(rows[t])) for t in rows}) if b"null" in written else written


def read_info(info: Any) -> Any:
    """Return an info, as `info_json` wrote it and orjson reads it, with its numbers that are not finite."""
    if not isinstance(info, dict) or not isinstance(info.get(MARK), list):
        return info
    return {key: _read(part) for key, part in info.items() if key != MARK}


def _listed(value: Any) -> Any:
    """Return an array that orjson does not read, such as one with strides, as a list."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufUO":
        return value.tolist()
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def is_odd(value: Any) -> bool:
    """Return whether a number in the value is not finite."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind not in "biuU" and is_odd(value.tolist())
    if isinstance(value, dict | list | tuple):
        return any(map(is_odd, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float | np.floating) and not math.isfinite(value)


def _spelt(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return value if math.isfinite(value) else f"{MARK}{float(value)}"
    if isinstance(value, str):
        return MARK + value if value.startswith(MARK) else value
    if isinstance(value, dict):
        return {key: _spelt(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return _spelt(value.tolist()) if value.dtype.kind in "fUO" else value
    return [_spelt(part) for part in value] if isinstance(value, list | tuple) else value


def _read(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(MARK):
        return _NUMBERS.get(value, value[1:])
    if isinstance(value, dict):
        return {key: _read(part) for key, part in value.items()}
    return [_read(part) for part in value] if isinstance(value, list) else value
