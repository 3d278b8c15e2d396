"""How tests compare two batches: all of them, to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.schemas.chunks.batch import ChunkBatch


def contents(batch: ChunkBatch, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """Each field of a batch: arrays as dtype, shape and bytes, and dicts in their order."""
    fields = (field.name for field in dataclasses.fields(batch) if field.name not in without)
    return {name: _plain(getattr(batch, name)) for name in fields}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return [(key, _plain(own)) for key, own in value.items()]
    return [_plain(own) for own in value] if isinstance(value, list | tuple) else value
