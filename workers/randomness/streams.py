"""Saves and restores random streams as arrays, so that a restored runner continues the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import StateError

_LOW = (1 << 64) - 1


def read_streams(streams: Sequence[np.random.Generator]) -> NDArray[np.uint64]:
    """Return uint64 (streams, 6): high and low half of state and increment, and the half word PCG64 may hold back."""
    rows = []
    for stream in streams:
        known: Any = stream.bit_generator.state
        words, inc = known["state"]["state"], known["state"]["inc"]
        rows.append((words >> 64, words & _LOW, inc >> 64, inc & _LOW, known["has_uint32"], known["uinteger"]))
    return np.array(rows, np.uint64)


def write_streams(streams: Sequence[np.random.Generator], rows: NDArray[np.uint64]) -> None:
    """Set `streams` to the state of `read_streams`."""
    for stream, row in zip(streams, rows.tolist(), strict=True):
        stream.bit_generator.state = {
            "bit_generator": "PCG64",
            "state": {"state": row[0] << 64 | row[1], "inc": row[2] << 64 | row[3]},
            "has_uint32": row[4],
            "uinteger": row[5],
        }


def check_array(state: Any, name: str, array: str, dtype: Any, shape: tuple[int | None, ...]) -> NDArray[Any]:
    """Return `state[array]` if it has this dtype and shape, where None is any number; else raise `StateError`."""
    found = state.get(array) if isinstance(state, Mapping) else None
    if (
        isinstance(found, np.ndarray)
        and found.dtype == dtype
        and len(found.shape) == len(shape)
        and all(wanted in (None, seen) for wanted, seen in zip(shape, found.shape, strict=True))
    ):
        return found
    seen = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else repr(found)
    raise StateError(
        f"random_streams/{name}/{array} should be {np.dtype(dtype)} {shape}, got {seen:.80}: the state is of a runner "
        "with another module or other spaces"
    )
