"""Arrays in memory that two processes share. The memory has no name, so none stays behind after a crash."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Spaces, column_dtype, leaf_shape, leaves

Layout = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Name -> (dtype, shape)."""

_ALIGN = 64
"""In bytes. No two arrays share a cache line."""


def new_memory(name: str) -> int:
    """Return a descriptor of empty anonymous memory, which the caller closes. `name` shows in /proc only."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def map_arrays(descriptor: int, layout: Layout, *, create: bool) -> dict[str, NDArray[Any]]:
    """Return views of the arrays in `layout`, zero at first. The memory lives as long as a view of it.

    Both sides give the same layout. `create` sizes the memory: one side does so, before the other maps it.
    """
    offsets, size = {}, 0
    for name, (dtype, shape) in layout.items():
        offsets[name] = size
        size += -(-dtype.itemsize * math.prod(shape) // _ALIGN) * _ALIGN
    if create:
        os.truncate(descriptor, max(size, 1))
    mapped = mmap.mmap(descriptor, max(size, 1))
    return {
        name: np.frombuffer(mapped, dtype, math.prod(shape), offsets[name]).reshape(shape)
        for name, (dtype, shape) in layout.items()
    }


def columns_layout(spaces: Spaces, width: int) -> Layout:
    """Return the layout of the columns between envs and their driver: one row for each of `width` lanes.

    obs/...      the newest observation of the episode that goes on, or its last
    first/...    the first observation of the next episode
    actions/...  the next action of each lane
    rewards      float64, of the last step
    """
    layout: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {"rewards": (np.dtype(np.float64), (width,))}
    for root, space in (("obs", spaces.observation), ("first", spaces.observation), ("actions", spaces.action)):
        for name, leaf in leaves(space, root):
            layout[name] = (column_dtype(leaf), (width, *leaf_shape(leaf)))
    return layout
