"""Tensors as arrays, for code that may not import torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BITS = {
    "bfloat16": "<u2",
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), "|u1"),
}
BIT_DTYPES = {name: np.dtype([(name, bits)]) for name, bits in _BITS.items()}
"""Dtypes of torch that numpy lacks, by name: an array of one holds the bits under that name, with which numpy does not
calculate.
"""
_met: dict[Any, np.dtype[Any]] = {}
"""The dtype of torch -> that of its bits, once `bits_of` has met it."""


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


def wide_array_of(tensor: Any) -> NDArray[Any]:
    """Return the array of `array_of`, float16 as float32 too."""
    found = array_of(tensor)
    return found.astype(np.float32) if found.dtype == np.float16 else found


def bits_of(tensor: Any) -> NDArray[Any]:
    """Return a torch tensor as an array of its own dtype, or one of `BIT_DTYPES`: a view if it is on the CPU.

    Raises as `array_of` does.
    """
    dtype = _met.get(tensor.dtype)
    if dtype is None:
        try:
            found: NDArray[Any] = tensor.numpy(force=True)
            return found
        except TypeError:  # takes longer than the rest
            dtype = BIT_DTYPES.get(dtype_name(tensor.dtype))
            if dtype is None:
                raise
            _met[tensor.dtype] = dtype
    torch: Any = sys.modules["torch"]
    bits = tensor.detach().view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    found = bits.numpy(force=True).view(dtype)
    return found


def tensor_of(array: NDArray[Any]) -> Any:
    """Return an array as a torch tensor of the same memory, which must be writable. Raises as torch does."""
    torch: Any = sys.modules["torch"]
    if not array.dtype.names:
        return torch.from_numpy(array)
    bits = torch.from_numpy(array.view(np.int16 if array.itemsize == 2 else np.uint8))
    return bits.view(getattr(torch, dtype_name(array.dtype), None))  # raises `TypeError` where torch lacks it


def widened(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of one of `BIT_DTYPES` as float32, another one as it is."""
    wide: NDArray[Any] = tensor_of(array).float().numpy() if array.dtype.names else array
    return wide


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of torch or numpy, as "bfloat16"."""
    names = getattr(dtype, "names", None)
    return names[0] if names else str(dtype).removeprefix("torch.")
