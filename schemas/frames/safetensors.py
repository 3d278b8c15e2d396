"""Named arrays and text in one file of the safetensors format, which many programs read. None of its bytes is run.

    length u64le | header, JSON of that length | raw C-contiguous little-endian arrays, without gaps
    header       {"__metadata__": {name: text, ...}, array name: {"dtype": "F32", "shape": [2, 3],
                  "data_offsets": [begin, end]}, ...}; offsets count from the end of the header

The format has no checksum, so the metadata has one under "checksum": xxh3_64, as 16 hexadecimal digits, over the header
without that entry and over the arrays. Wider items come first, so each array lies at a multiple of its item size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from headrace.schemas.errors import DecodeError, EncodeError
from headrace.schemas.frames.manifest import Buffer

_METADATA = "__metadata__"
_CHECKSUM = "checksum"
_ALIGN = 8
_MOST_AXES = 32
MOST_ARRAYS = 1 << 18
"""Four times as many as a version of the weights may have: optimizers keep several for each weight."""
LONGEST_HEADER = 32 << 20
"""Parsed JSON takes about thirty times its bytes at worst."""
_DTYPES = {
    "BOOL": "|b1",
    "I8": "|i1",
    "U8": "|u1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "I64": "<i8",
    "U64": "<u8",
    "F64": "<f8",
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def encode_safetensors(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> list[Buffer]:
    """Return the parts of a file, to be written one after another. Arrays are not copied where that can be avoided.

    Raises `EncodeError` for an array that the format cannot hold.
    """
    if _METADATA in arrays or _CHECKSUM in metadata:
        raise EncodeError(f"the names {_METADATA!r} and {_CHECKSUM!r} have a meaning in a safetensors file")
    if len(arrays) > MOST_ARRAYS:
        raise EncodeError(f"a safetensors file has at most {MOST_ARRAYS:,} arrays, and these are {len(arrays):,}")
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    parts: list[Buffer] = []
    end = 0
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize):
        dtype = array.dtype.newbyteorder("<").str
        if dtype not in _NAMES or np.ma.is_masked(array):
            odd = "masked elements" if np.ma.is_masked(array) else f"dtype {array.dtype}"
            raise EncodeError(f"array {name!r} has {odd}, which a safetensors file cannot hold")
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _NAMES[dtype], "shape": array.shape, "data_offsets": [begin, end]}
        parts.append(np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data)
    header[_METADATA][_CHECKSUM] = _checksum(header, parts)
    body = orjson.dumps(header)
    body += b" " * (-len(body) % _ALIGN)
    if len(body) > LONGEST_HEADER:
        raise EncodeError(f"names and metadata take {len(body):,} bytes, and at most {LONGEST_HEADER:,} are read again")
    return [len(body).to_bytes(8, "little"), body, *parts]


def decode_safetensors(data: Buffer) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return (arrays by name, metadata) of a whole file. The arrays are read-only views of `data`.

    Raises `DecodeError` for a file that is torn, has other bytes than were written, or is of another format. A file
    without a checksum, as other programs write it, is refused too.
    """
    header, payload = _split(memoryview(data))
    metadata = header.get(_METADATA)
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise DecodeError("bad_header", f"it is a safetensors file without {_METADATA} that Headrace wrote")
    if metadata.pop(_CHECKSUM, None) != _checksum(header, [payload]):
        raise DecodeError("bad_checksum", "its bytes do not match their checksum")
    arrays = {name: _view(name, entry, payload) for name, entry in header.items() if name != _METADATA}
    _check_places([header[name]["data_offsets"] for name in arrays], len(payload))
    return arrays, metadata


def _split(data: memoryview) -> tuple[dict[str, Any], memoryview]:
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise DecodeError("bad_header", f"it ends within its header, after {len(data)} bytes")
    if length > LONGEST_HEADER:
        raise DecodeError("bad_header", f"its header has {length:,} bytes, and at most {LONGEST_HEADER:,} are read")
    try:
        header = orjson.loads(data[8 : 8 + length])
    except orjson.JSONDecodeError as error:
        raise DecodeError("bad_header", f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise DecodeError("bad_header", f"its header is a JSON {type(header).__name__}, not an object")
    if len(header) > MOST_ARRAYS + 1:
        raise DecodeError("bad_header", f"it has {len(header):,} entries, and at most {MOST_ARRAYS:,} arrays are read")
    return header, data[8 + length :]


def _view(name: str, entry: Any, payload: memoryview) -> NDArray[Any]:
    try:
        dtype, shape, (begin, end) = np.dtype(_DTYPES[entry["dtype"]]), entry["shape"], entry["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and len(shape) <= _MOST_AXES
        if not sound or end - begin != math.prod(shape) * dtype.itemsize or end > len(payload):
            raise ValueError
        array = np.frombuffer(payload[begin:end], dtype).reshape(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise DecodeError(
            "bad_header", f"array {name!r:.80} has a dtype, shape or offsets that do not fit its bytes"
        ) from error
    array.flags.writeable = False
    return array


def _check_places(places: Sequence[list[int]], end: int) -> None:
    """Raise `DecodeError` unless the arrays lie one after another, from 0 to `end`.

    Otherwise thousands of arrays could share the same bytes, and copies of them would be far larger than the file.
    """
    places = sorted(places)
    if any(before[1] != after[0] for before, after in pairwise([[0, 0], *places, [end, end]])):
        raise DecodeError("bad_header", "its arrays overlap, or leave bytes between them")


def _checksum(header: Mapping[str, Any], parts: list[Any]) -> str:
    """Return the checksum of a header that does not have it yet, and of the arrays after it."""
    checksum = xxhash.xxh3_64(orjson.dumps(header))
    for part in parts:
        checksum.update(part)
    return checksum.hexdigest()
