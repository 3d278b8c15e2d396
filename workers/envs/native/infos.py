"""Turns a vector's infos, which are arrays with a mask beside each or without one, into one dict for each env."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from operator import eq
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FINALS = ("final_obs", "final_info")  # read by `final_infos` and `vector_step.py`: they belong to the step before


def infos_by_lane(infos: Mapping[str, Any], width: int) -> dict[int, dict[str, Any]]:
    """Return the infos that lanes have, each as gymnasium's `DictInfoToList` reads it.

    Values may be views of the vector's arrays. Rows are of all `width` lanes in order, or of those in "env_id".
    """
    lanes = lanes_of_rows(infos, width)
    return {lanes[row]: info for row, info in _by_row(infos, len(lanes)).items()}


def final_infos(infos: Mapping[str, Any], width: int) -> dict[int, dict[str, Any]]:
    """Return the last infos of episodes whose lanes the vector has reset in the step that ended them.

    Entries that a vector's wrappers add for such a lane stay in the info of its reset, because they cannot be told
    apart.
    """
    finals = infos.get("final_info", {})
    if isinstance(finals, Mapping):
        return infos_by_lane(finals, width)
    rows = enumerate(finals if has_rows(finals, width) else ())
    return {lane: dict(info) for lane, info in rows if isinstance(info, Mapping)}


def without_rows(infos: Mapping[str, Any], width: int) -> list[str]:
    """Return the keys of values that no lane gets, because they, or their masks, do not have a row for each."""
    return list(_without_rows(infos, len(lanes_of_rows(infos, width))))


def as_numpy(value: Any) -> Any:
    """Return the value with numpy arrays in place of its torch tensors, each copied once if it is on a GPU."""
    if isinstance(value, Mapping):
        return {key: as_numpy(part) for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)([as_numpy(part) for part in value])
    if not is_tensor(value):
        return value
    value = value.detach().cpu()
    return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()  # numpy has no bfloat16


def is_tensor(value: Any) -> bool:
    """Return whether `value` is a torch tensor, without an import of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def has_rows(values: Any, rows: int) -> bool:
    """Return whether `values` is an array or a list with a row for each env."""
    if isinstance(values, np.ndarray):
        return bool(values.shape[:1] == (rows,))
    return isinstance(values, list | tuple) and len(values) == rows


def lanes_of_rows(infos: Mapping[str, Any], width: int) -> Sequence[int]:
    """Return the lane of each row: those in "env_id" if it names lanes, as EnvPool's does; else all, in order.

    An "env_id" with a mask names none: it is what each env of one of gymnasium's vectors tells of itself.
    """
    ids = infos.get("env_id")
    if isinstance(ids, np.ndarray):
        ids = ids.tolist() if ids.ndim == 1 and ids.dtype.kind in "iu" else None
    if isinstance(ids, list | tuple) and "_env_id" not in infos and {*map(type, ids)} <= {int, np.int32, np.int64}:
        lanes = [*map(int, ids)]
        if len({*lanes} & {*range(width)}) == len(lanes):
            return lanes
    return range(width)


def moved(infos: Mapping[str, Any], width: int) -> NDArray[np.intp] | None:
    """Return the lane of each row where "env_id" names all lanes in another order; else None."""
    lanes = lanes_of_rows(infos, width)
    return None if len(lanes) < width or all(map(eq, lanes, range(width))) else np.array(lanes)


def in_order_of(rows: Sequence[int], value: Any, *, nested: bool = False) -> Any:
    """Return infos, or one value of them, whose rows are put into the order `rows`.

    nested: a tuple holds parts of observations, and not rows.
    """
    if isinstance(value, Mapping):
        return {key: in_order_of(rows, part, nested=nested or key == "final_obs") for key, part in value.items()}
    if nested and isinstance(value, tuple):
        return tuple(in_order_of(rows, part, nested=True) for part in value)
    if not has_rows(value, len(rows)):
        return value
    return value[rows] if isinstance(value, np.ndarray) else [value[row] for row in rows]


def _by_row(infos: Mapping[str, Any], rows: int) -> dict[int, dict[str, Any]]:
    own: dict[int, dict[str, Any]] = {}
    for key, values in _told(infos):
        marked = _marked(infos, key, rows)
        if marked is None:
            continue
        some = range(rows) if marked is True else np.flatnonzero(marked).tolist()
        if isinstance(values, Mapping):
            parts = _by_row(values, rows)
            values = {row: parts.get(row, {}) for row in some if row in parts or marked is not True}
            some = list(values)
        for row in some:
            own.setdefault(row, {})[key] = values[row]
    return own


def _without_rows(infos: Mapping[str, Any], rows: int) -> Iterator[str]:
    for key, values in _told(infos):
        if _marked(infos, key, rows) is None:
            yield str(key)
        elif isinstance(values, Mapping):
            yield from (f"{key}.{part}" for part in _without_rows(values, rows))


def _told(infos: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    return ((key, values) for key, values in infos.items() if not str(key).startswith("_") and key not in _FINALS)


def _marked(infos: Mapping[str, Any], key: Any, rows: int) -> Any:
    """Return the mask of a value, True for all rows; None if the value or its mask does not have a row for each."""
    if not isinstance(infos[key], Mapping) and not has_rows(infos[key], rows):
        return None
    mask = infos.get(f"_{key}", True)
    if isinstance(mask, np.ndarray):
        return mask if mask.shape == (rows,) and mask.dtype.kind in "biu" else None
    return mask if mask is True or (has_rows(mask, rows) and {*map(type, mask)} <= {bool, np.bool_, int}) else None
