"""The chunks that the scripts on transport carry: 64 steps of CartPole, or 64 stacks of four frames."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STEPS, DISTINCT = 64, 4
SIZES = {"small": (((4,), "<f4"), 64), "pixel": (((84, 84, 4), "|u1"), 1)}
"""Name -> ((shape, dtype) of an observation, chunks in a message)."""


def messages(size: str) -> tuple[list[NDArray[np.uint8]], int]:
    """Return a few messages of bytes, which are sent in a cycle, and the number of chunks in each.

    A step has an observation and 28 bytes more: action, reward, version of the weights, and log-probability.
    """
    (shape, dtype), chunks = SIZES[size]
    rows = chunks * (STEPS + 1)
    count = rows * int(np.prod(shape)) * np.dtype(dtype).itemsize + chunks * STEPS * 28
    return [np.random.default_rng(seed).integers(0, 255, count, np.uint8) for seed in range(DISTINCT)], chunks
