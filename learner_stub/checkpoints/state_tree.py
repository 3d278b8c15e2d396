"""Converts a learner's own values to named arrays and JSON, and back, without running any code from them.

Values are tensors, arrays, numbers, text, bools, None, and dicts, lists and tuples of these. So the state of any torch
optimizer or scheduler fits, and those of random generators of torch, numpy and Python.

    {"_tensor": name}, {"_array": name}   the array of that name
    {"_items": [[key, value], ...]}       a dict with keys that are no text, or that look like one of these
    {"_tuple": [...]}                     a tuple
    {"_number": text}                     an integer beyond 64 bits, or a float that is not finite
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.basics.printable import brief
from headrace.schemas.basics.tensor_array import array_of
from headrace.schemas.errors import DecodeError, EncodeError

_DEEPEST = 64
_MARKS = frozenset(("_tensor", "_array", "_items", "_tuple", "_number"))
_LARGEST_DIGITS = 1000
_LARGEST_BITS = 3300
"""Those of an int that has no more digits."""


def pack(value: Any, prefix: str) -> tuple[Any, dict[str, NDArray[Any]]]:
    """Return (JSON, arrays by name) for `value`. Names of arrays begin with `prefix`. Arrays are not copied.

    Raises `EncodeError` naming a value that no file can hold.
    """
    packer = _Packer(prefix)
    return packer.pack(value, "", 0), packer.arrays


def unpack(tree: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Return the value that `pack` took, with arrays and tensors of its own. Raises `DecodeError`."""
    return _unpack(tree, arrays, 0)


class _Packer:
    """Gathers the arrays of one value."""

    def __init__(self, prefix: str) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}
        self._prefix = prefix

    def pack(self, value: Any, path: str, depth: int) -> Any:
        if depth > _DEEPEST:
            raise EncodeError(f"the state is nested deeper than {_DEEPEST} levels at {path[:80]!r}")
        if isinstance(value, torch.Tensor):
            try:
                return {"_tensor": self._keep(array_of(value))}
            except (TypeError, RuntimeError) as error:
                raise EncodeError(f"the tensor at {path.strip('/')[:80]!r} cannot be saved: {error}") from error
        if isinstance(value, np.ndarray) and not np.ma.is_masked(value):
            return {"_array": self._keep(value)}
        if isinstance(value, Mapping):
            return self._pack_dict(value, path, depth)
        if isinstance(value, list | tuple):
            parts = [self.pack(part, f"{path}/{i}", depth + 1) for i, part in enumerate(value)]
            return parts if isinstance(value, list) else {"_tuple": parts}
        return _pack_plain(value.item() if isinstance(value, np.generic) else value, path)

    def _pack_dict(self, value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
        items = [
            [key, self.pack(part, f"{path}/{key if isinstance(key, str) else brief(key)}", depth + 1)]
            for key, part in value.items()
        ]
        if all(isinstance(key, str) and key not in _MARKS for key, _ in items):
            return dict(items)
        return {"_items": [[_pack_plain(key, path), part] for key, part in items]}

    def _keep(self, array: NDArray[Any]) -> str:
        name = f"{self._prefix}{len(self.arrays)}"
        self.arrays[name] = array
        return name


def _pack_plain(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and value.bit_length() <= _LARGEST_BITS:
        return value if -(1 << 63) <= value < 1 << 63 else {"_number": str(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"_number": str(value)}
    raise EncodeError(
        f"the state has a {type(value).__name__} at {path.strip('/')[:80]!r}, which cannot be saved; give tensors, "
        f"arrays, numbers of at most {_LARGEST_BITS} bits, text, and dicts, lists and tuples of these"
    )


def _unpack(tree: Any, arrays: Mapping[str, NDArray[Any]], depth: int) -> Any:
    if depth > _DEEPEST:
        raise DecodeError("bad_state", f"nested deeper than {_DEEPEST} levels")
    if isinstance(tree, list):
        return [_unpack(part, arrays, depth + 1) for part in tree]
    if not isinstance(tree, dict):
        return tree
    mark = next(iter(tree)) if len(tree) == 1 else ""
    if mark not in _MARKS:
        return {key: _unpack(part, arrays, depth + 1) for key, part in tree.items()}
    inner = tree[mark]
    try:
        if mark == "_number":
            return _number(inner)
        if mark == "_tuple":
            return tuple(_unpack(part, arrays, depth + 1) for part in inner)
        if mark == "_items":
            return {_unpack(key, arrays, depth + 1): _unpack(part, arrays, depth + 1) for key, part in inner}
        array = arrays[inner].copy()  # those of a file are read-only
    except (KeyError, TypeError, ValueError) as error:
        raise DecodeError("bad_state", f"{mark!r} holds {inner!r:.80}") from error
    return torch.from_numpy(array) if mark == "_tensor" else array


def _number(text: str) -> int | float:
    if text in ("nan", "inf", "-inf"):
        return float(text)
    if len(text) > _LARGEST_DIGITS:
        raise ValueError("too long")
    return int(text)
