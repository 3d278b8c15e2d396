"""The bounds of a Box, element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.spaces import Box, leaf_size


def box_bounds(leaf: Box) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lowest and highest value of each element: float64 of the leaf's shape, infinite where there is none."""
    return _row(leaf, leaf.low, -np.inf), _row(leaf, leaf.high, np.inf)


def _row(leaf: Box, bound: Any, absent: float) -> NDArray[np.float64]:
    flat = bound if isinstance(bound, tuple) else [bound] * leaf_size(leaf)
    return np.array([absent if b is None else b for b in flat], np.float64).reshape(leaf.shape)
