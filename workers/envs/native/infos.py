"""Turns a vector's infos, which are arrays with a mask beside each, into one dict for each env."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def lanes_with_info(infos: Mapping[str, Any]) -> list[int]:
    """Return the lanes that a mask ("_key" beside "key") marks."""
    masks = [infos[f"_{key}"] for key in infos if f"_{key}" in infos]
    return np.flatnonzero(np.logical_or.reduce(masks)).tolist() if masks else []


def info_of(infos: Mapping[str, Any], lane: int, *, within: bool = False) -> dict[str, Any]:
    """Return one lane's part. Without a mask, keep a key only `within` a masked one: else it is the vector's own."""
    own = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if within and not key.startswith("_") if mask is None else mask[lane]:
            own[key] = info_of(values, lane, within=True) if isinstance(values, Mapping) else _own(values[lane])
    return own


def _own(value: Any) -> Any:
    """Copy a row, because the vector may overwrite it later."""
    return value.copy() if isinstance(value, np.ndarray) else value
