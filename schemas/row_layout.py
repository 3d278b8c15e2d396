"""Arrays that lie alike in many small messages: all are read at once, and no manifest is gone through twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.manifest import OWN_FRAME_BYTES, pack
from headrace.schemas.wire import Buffer, MessageKind, check_payload, encode_packed

Row = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Dtype and shape of each array, by name."""


class RowLayout:
    """Where `pack` puts the arrays of one row, all of them in one frame."""

    def __init__(self, row: Row, manifest: list[list[Any]], row_bytes: int) -> None:
        self._manifest = [[name, dtype, list(shape), frame, offset] for name, dtype, shape, frame, offset in manifest]
        """As JSON has it."""
        self._sizes = [row_bytes]
        self._names = list(row)
        offsets = [offset for *_, offset in manifest]
        form = {"names": self._names, "formats": list(row.values()), "offsets": offsets, "itemsize": row_bytes}
        self._dtype = np.dtype(form)  # type: ignore[call-overload]

    def payload_of(self, header: Mapping[str, Any], frames: Sequence[Buffer]) -> Buffer | None:
        """The payload of a message, of which `decode_header` gave `header`, for `read`; None if it lies in another way.

        Raises `DecodeError` for one that is not what was sent.
        """
        payload = header.get("payload")
        if payload is None or payload.get("arrays") != self._manifest or payload["sizes"] != self._sizes:
            return None
        check_payload(payload, frames)
        return frames[2]

    def read(self, frames: Sequence[Buffer]) -> dict[str, NDArray[Any]]:
        """The arrays of messages that lie so, (messages, *shape), read-only; `frames` is the payload of each."""
        rows = np.frombuffer(frames[0] if len(frames) == 1 else b"".join(frames), self._dtype)
        return {name: rows[name] for name in self._names}

    def encode(self, kind: MessageKind, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> list[Buffer]:
        """`wire.encode`, of arrays with the dtypes and shapes of the row. Raises as it does."""
        if len(self._names) == 1:
            payload = arrays[self._names[0]].tobytes().ljust(self._sizes[0], b"\0")
        else:
            row = np.zeros((), self._dtype)
            for name in self._names:
                row[name] = arrays[name]
            payload = row.tobytes()
        return encode_packed(kind, header, [payload], self._manifest)


def row_layout_of(row: Row) -> RowLayout | None:
    """None for a large one, which is not worth a copy, and where there is nothing in one of the arrays."""
    arrays = {name: np.zeros(shape, dtype) for name, (dtype, shape) in row.items()}
    frames, manifest = pack(arrays)
    if len(frames) != 1 or len(frames[0]) >= OWN_FRAME_BYTES or not all(array.nbytes for array in arrays.values()):
        return None
    return RowLayout(row, manifest, len(frames[0]))
