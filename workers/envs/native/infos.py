"""A vector's infos, in arrays with a mask beside each, as one dict for each env."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def lanes_with_info(infos: Mapping[str, Any]) -> list[int]:
    """Lanes that some mask ("_key" beside "key") names."""
    masks = [infos[f"_{key}"] for key in infos if f"_{key}" in infos]
    return np.flatnonzero(np.logical_or.reduce(masks)).tolist() if masks else []


def info_of(infos: Mapping[str, Any], lane: int, *, within: bool = False) -> dict[str, Any]:
    """One lane's part. What has no mask is the vector's own and nobody's info, but `within` what has one."""
    own = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if within and not key.startswith("_") if mask is None else mask[lane]:
            own[key] = info_of(values, lane, within=True) if isinstance(values, Mapping) else _own(values[lane])
    return own


def _own(value: Any) -> Any:
    """A row is copied, for the vector may write the next one over it."""
    return value.copy() if isinstance(value, np.ndarray) else value
