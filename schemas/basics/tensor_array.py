"""Tensors as arrays, for code that may not import torch."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray


def array_of(tensor: Any) -> NDArray[Any]:
    """Return a torch tensor of any device as an array. bfloat16, which numpy lacks, becomes float32.

    Raises the `TypeError` or `RuntimeError` of torch for a tensor that numpy cannot hold, as a sparse one.
    """
    try:
        found: NDArray[Any] = tensor.numpy(force=True)
    except TypeError:  # asking for the dtype before takes longer than the call
        if str(tensor.dtype) != "torch.bfloat16":
            raise
        found = tensor.float().numpy(force=True)
    return found
