"""A runner's state as named arrays and back, so that a wire message or a file can carry it without code.

A state is a tree of dicts with text keys. Its leaves are arrays, numbers, strings, bools, None, and lists of these.
Each array's name is the path to it, joined by slashes. All the rest is JSON in the array "_state", where {"_array":
name} stands for an array.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from headrace.schemas.errors import DecodeError, EncodeError
from headrace.schemas.frames.wire import ALLOWED_DTYPES, DEFAULT_LIMITS

_TREE = "_state"
_ARRAY = "_array"


def state_to_arrays(state: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return arrays from which `arrays_to_state` rebuilds `state`. Arrays of `state` are not copied.

    Raises `EncodeError` naming what may not travel: object arrays, other leaves, keys that are not text.
    """
    arrays: dict[str, NDArray[Any]] = {}
    tree = _strip(state, "", arrays)
    try:
        written = orjson.dumps(tree)
    except TypeError as error:
        raise EncodeError(f"the state holds something that is neither an array nor a plain value: {error}") from error
    arrays[_TREE] = np.frombuffer(written, np.uint8)
    return arrays


def arrays_to_state(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Rebuild the state from `arrays`. It keeps them without a copy. Raises `DecodeError`."""
    if _TREE not in arrays or arrays[_TREE].dtype != np.uint8 or arrays[_TREE].ndim != 1:
        raise DecodeError("bad_state", f"there is no byte array {_TREE!r}")
    try:
        tree = orjson.loads(arrays[_TREE].tobytes())
    except orjson.JSONDecodeError as error:
        raise DecodeError("bad_state", f"{_TREE!r} is no JSON: {error}") from error
    if not isinstance(tree, dict):
        raise DecodeError("bad_state", f"{_TREE!r} is a {type(tree).__name__}, not a dict")
    state = _fill(tree, arrays, DEFAULT_LIMITS.header_depth)
    if not isinstance(state, dict):
        raise DecodeError("bad_state", "the state is a single array")
    return state


def _strip(value: Any, path: str, arrays: dict[str, NDArray[Any]]) -> Any:
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str) or key == _ARRAY]:
            raise EncodeError(f"the state's {path or 'root'} has the key {strange[0]!r:.40}; use other text")
        return {key: _strip(sub, f"{path}/{key}" if path else key, arrays) for key, sub in value.items()}
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.str not in ALLOWED_DTYPES:
        raise EncodeError(f"the state's {path} has dtype {value.dtype}, which may not travel")
    if path in arrays or path == _TREE:
        raise EncodeError(f"two arrays of the state are called {path!r}; use keys without slashes")
    arrays[path] = value
    return {_ARRAY: path}


def _fill(value: Any, arrays: Mapping[str, NDArray[Any]], left: int) -> Any:
    if not isinstance(value, dict):
        return value
    if left == 0:
        raise DecodeError("bad_state", f"nested deeper than {DEFAULT_LIMITS.header_depth} levels")
    if _ARRAY not in value:
        return {key: _fill(sub, arrays, left - 1) for key, sub in value.items()}
    name = value[_ARRAY]
    if not isinstance(name, str) or name not in arrays:
        raise DecodeError("bad_state", f"array {name!r:.80} is named but missing")
    return arrays[name]
