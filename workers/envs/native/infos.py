"""Turns a vector's infos, which are arrays with a mask beside each or without one, into one dict for each env."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_FINALS = ("final_obs", "final_info")  # read by `vector_step.py`: they belong to the step before


def lanes_with_info(infos: Mapping[str, Any], width: int) -> list[int]:
    """Return the lanes that a mask ("_key" beside "key") marks; all lanes if a value has a row for each and no mask."""
    masks = []
    for key, values in infos.items():
        if key.startswith("_") or key in _FINALS:
            continue
        if f"_{key}" in infos:
            masks.append(infos[f"_{key}"])
        elif isinstance(values, Mapping) or _has_rows(values, width):
            return list(range(width))
    return np.flatnonzero(np.logical_or.reduce(masks)).tolist() if masks else []


def without_rows(infos: Mapping[str, Any], width: int) -> list[str]:
    """Return the keys of values that no lane gets, because they have neither a mask nor a row for each lane."""
    return [
        key
        for key, values in infos.items()
        if not key.startswith("_") and f"_{key}" not in infos and not isinstance(values, Mapping)
        if key not in _FINALS and not _has_rows(values, width)
    ]


def info_of(infos: Mapping[str, Any], lane: int, width: int) -> dict[str, Any]:
    """Return one lane's part, as gymnasium's `DictInfoToList` reads it. Rows may be views of the vector's arrays."""
    own: dict[str, Any] = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if key.startswith("_") or key in _FINALS or (mask is not None and not mask[lane]):
            continue
        if isinstance(values, Mapping):
            if (part := info_of(values, lane, width)) or mask is not None:
                own[key] = part
        elif mask is not None or _has_rows(values, width):
            own[key] = values[lane]
    return own


def _has_rows(values: Any, width: int) -> bool:
    if isinstance(values, np.ndarray):
        return bool(values.shape[:1] == (width,))
    return isinstance(values, list | tuple) and len(values) == width
