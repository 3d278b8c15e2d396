"""The manifest: where the arrays of a message lie in its frames, as its header says it. `wire.py` draws the layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.basics.tensor_array import BIT_DTYPES
from headrace.schemas.errors import DecodeError, EncodeError


@dataclass(frozen=True, slots=True)
class WireLimits:
    """The most that a receiver accepts, checked before it allocates anything. Senders know it too. Sizes in bytes."""

    header_bytes: int = 1 << 20
    payload_bytes: int = 256 << 20
    infos_bytes: int = 8 << 20
    frames: int = 64
    arrays: int = 4096
    dims: int = 8
    header_depth: int = 64
    names: int = 8192
    """Names of one object of the header."""


DEFAULT_LIMITS = WireLimits()

WEIGHTS_LIMITS = WireLimits(header_bytes=16 << 20, payload_bytes=4 << 30, arrays=65_536)
"""Those of a WEIGHTS message, whose header has a row for each tensor."""

_ALIGN = 64
OWN_FRAME_BYTES = 64 * 1024
"""From this size on an array gets a frame of its own. pyzmq copies below it too, since a copy is then cheaper."""

ALLOWED_DTYPES = frozenset(("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"))
_DTYPES: dict[str, np.dtype[Any]] = {dtype: np.dtype(dtype) for dtype in ALLOWED_DTYPES}
_WEIGHT_DTYPES = _DTYPES | BIT_DTYPES
"""The dtypes of arrays in a WEIGHTS message."""

_CODES = {dtype: code for code, dtype in _WEIGHT_DTYPES.items()}

_OWN_FRAMES = DEFAULT_LIMITS.frames - 3
"""Large arrays beyond this number join the small ones, at the price of a copy: `WireLimits` bounds the frames."""

Buffer = bytes | bytearray | memoryview
"""One frame. A memoryview is contiguous and of bytes, as `zmq.Frame.buffer` is."""


def pack(arrays: Mapping[str, NDArray[Any]]) -> tuple[list[Buffer], list[list[Any]]]:
    """Lay arrays out in frames. Return (frames, manifest rows [name, dtype, shape, frame, offset]).

    A small array is copied once. A large one is not copied if it is contiguous and little-endian.
    """
    joined, own, manifest = lay_out(arrays)
    return [*([b"".join(joined)] if joined else []), *own], manifest


def lay_out(arrays: Mapping[str, NDArray[Any]]) -> tuple[list[Any], list[Buffer], list[list[Any]]]:
    """Return (parts of the first frame, other frames, manifest rows). There is no first frame without parts."""
    joined: list[Any] = []
    joined_bytes = 0
    own: list[Buffer] = []
    manifest: list[list[Any]] = []
    for name, array in arrays.items():
        code = _CODES.get(array.dtype)
        if code is None or array.ndim > DEFAULT_LIMITS.dims:
            array = as_sent(name, array)
            code = _CODES[array.dtype]
        nbytes = array.nbytes
        if nbytes >= OWN_FRAME_BYTES and len(own) < _OWN_FRAMES:
            own.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            manifest.append([name, code, array.shape, -len(own), 0])
        else:
            manifest.append([name, code, array.shape, 0, joined_bytes])
            joined.append(array if array.flags.c_contiguous else array.tobytes())
            if padding := -nbytes % _ALIGN:
                joined.append(bytes(padding))
            joined_bytes += nbytes + padding
    for row in manifest if own else ():
        if row[3] < 0:
            row[3] = bool(joined) - row[3] - 1
    return joined, own, manifest


def as_sent(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return an array with the bytes that go on the wire: itself if it is little-endian, else a copy.

    Raises `EncodeError` for a dtype, or a number of axes, that may not go on the wire.
    """
    if array.dtype not in _CODES:
        dtype = array.dtype.newbyteorder("<")
        if dtype not in _CODES:
            raise EncodeError(f"array {name!r} has dtype {array.dtype}, which may not go on the wire")
        array = array.astype(dtype)
    if array.ndim > DEFAULT_LIMITS.dims:
        raise EncodeError(f"array {name!r} has {array.ndim} axes; {DEFAULT_LIMITS.dims} are allowed")
    return array


def view(
    row: Any, frames: Sequence[Buffer], limits: WireLimits, *, of_weights: bool = False
) -> tuple[str, NDArray[Any]]:
    """Return one manifest row as a read-only array over its frame. Raises `DecodeError`.

    Weights may have the dtypes of `BIT_DTYPES` too.

    Rows may share bytes, since they are read-only. A value of the wrong type is never printed: a list nested a
    thousand deep has no repr, only a RecursionError.
    """
    if not isinstance(row, list) or len(row) != 5:
        raise DecodeError("bad_manifest", "a row is not [name, dtype, shape, frame, offset]")
    name, dtype, shape, frame, offset = row
    if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(shape, list):
        raise DecodeError("bad_manifest", "a row has a name, dtype or shape of the wrong JSON type")
    known = (_WEIGHT_DTYPES if of_weights else _DTYPES).get(dtype)
    if known is None:
        raise DecodeError("bad_dtype", f"array {name!r:.80} has dtype {dtype!r:.40}, which is not allowed")
    if len(shape) > limits.dims:
        raise DecodeError("bad_shape", f"array {name!r:.80} has a shape that is not at most {limits.dims} sizes")
    count = 1
    for n in shape:
        if type(n) is not int or not 0 <= n < 1 << 48:
            raise DecodeError("bad_shape", f"array {name!r:.80} has a shape that is not at most {limits.dims} sizes")
        count *= n
    if type(frame) is not int or type(offset) is not int or not 0 <= frame < len(frames) - 2 or offset < 0:
        raise DecodeError("bad_manifest", f"array {name!r:.80} lies in no frame that was received")
    nbytes = count * known.itemsize
    source = frames[2 + frame]
    if offset + nbytes > len(source):
        raise DecodeError("bad_shape", f"array {name!r:.80} needs {nbytes} bytes at {offset}, of {len(source)}")
    if count == 0:
        if math.prod(n for n in shape if n) >= 1 << 40:
            raise DecodeError("bad_shape", f"empty array {name!r:.80} claims shape {shape!r:.80}")
        array: NDArray[Any] = np.empty(shape, known)
    else:
        array = np.ndarray(shape, known, source, offset)
    array.setflags(write=False)
    return name, array
