"""Torch tensors of a batch's arrays, without torch's warning of arrays that must not be written to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from headrace.schemas.chunks.batch import ChunkBatch


def to_torch(data: Any, device: torch.device | str | None = None) -> Any:
    """Return `data` with torch tensors in place of its arrays.

    `data` is a `Transitions`, a `TimeMajor`, a dict or tuple of arrays, or one array. A `ChunkBatch` gives a dict of
    its `columns`. Read-only arrays, as of a received batch, are copied; others share their memory with the tensor,
    unless `device` is another than the CPU.
    """
    if isinstance(data, ChunkBatch):
        data = data.columns
    if isinstance(data, np.ndarray):
        tensor = torch.from_numpy(data if data.flags.writeable else data.copy())
        return tensor if device is None else tensor.to(device)
    if isinstance(data, Mapping):
        return {name: to_torch(part, device) for name, part in data.items()}
    if isinstance(data, tuple):
        return tuple(to_torch(part, device) for part in data)
    if is_dataclass(data) and not isinstance(data, type):
        return replace(data, **{field.name: to_torch(getattr(data, field.name), device) for field in fields(data)})
    raise TypeError(f"{type(data).__name__} has no arrays to turn into tensors; give a batch or a view of one")
