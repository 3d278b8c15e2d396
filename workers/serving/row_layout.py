"""A fixed layout of arrays shared by many small messages: they are read at once and their manifest checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.frames.manifest import OWN_FRAME_BYTES, pack
from headrace.schemas.frames.wire import Buffer, MessageKind, check_payload, encode_packed

Row = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Dtype and shape of each array, by name."""


class RowLayout:
    """The places where `pack` puts the arrays of one row, all of them in one frame."""

    def __init__(self, row: Row, manifest: list[list[Any]], row_bytes: int) -> None:
        self._manifest = [[name, dtype, list(shape), frame, offset] for name, dtype, shape, frame, offset in manifest]
        """Manifest of a row, as JSON has it."""
        self._sizes = [row_bytes]
        self._names = list(row)
        offsets = [offset for *_, offset in manifest]
        form = {"names": self._names, "formats": list(row.values()), "offsets": offsets, "itemsize": row_bytes}
        self._dtype = np.dtype(form)  # type: ignore[call-overload]

    def payload_of(self, header: Mapping[str, Any], frames: Sequence[Buffer]) -> Buffer | None:
        """Return the payload of a message for `read`; None if its arrays lie in another way.

        `decode_header` gave `header`. Raises `DecodeError` for a payload that does not match its checksum.
        """
        payload = header.get("payload")
        if payload is None or payload.get("arrays") != self._manifest or payload["sizes"] != self._sizes:
            return None
        check_payload(payload, frames)
        return frames[2]

    def read(self, frames: Sequence[Buffer]) -> dict[str, NDArray[Any]]:
        """Return the arrays of messages of this layout: (messages, *shape), read-only.

        `frames` holds one payload each.
        """
        rows = np.frombuffer(frames[0] if len(frames) == 1 else b"".join(frames), self._dtype)
        return {name: rows[name] for name in self._names}

    def encode(self, kind: MessageKind, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> list[Buffer]:
        """Encode arrays with the dtypes and shapes of the row. Raises as `wire.encode` does."""
        if len(self._names) == 1:
            payload = arrays[self._names[0]].tobytes().ljust(self._sizes[0], b"\0")
        else:
            row = np.zeros((), self._dtype)
            for name in self._names:
                row[name] = arrays[name]
            payload = row.tobytes()
        return encode_packed(kind, header, [payload], self._manifest)


def row_layout_of(row: Row) -> RowLayout | None:
    """Return the layout of a row of arrays.

    None for a large row, which is not worth a copy, and for a row with an empty array.
    """
    arrays = {name: np.zeros(shape, dtype) for name, (dtype, shape) in row.items()}
    frames, manifest = pack(arrays)
    if len(frames) != 1 or len(frames[0]) >= OWN_FRAME_BYTES or not all(array.nbytes for array in arrays.values()):
        return None
    return RowLayout(row, manifest, len(frames[0]))
