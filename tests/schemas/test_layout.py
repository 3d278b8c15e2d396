"""A layout writes and reads arrays that many messages have alike, with the bytes of each message's own manifest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.manifest import ALLOWED_DTYPES
from headrace.schemas.frames.wire import MessageKind, decode_arrays, decode_header, encode
from headrace.workers.serving.row_layout import RowLayout, row_layout_of

KIND = MessageKind.EPISODE_STEP
SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)
ROWS = st.dictionaries(
    st.sampled_from(["obs", "obs/a", "obs/b/0"]),
    st.tuples(st.sampled_from(sorted(ALLOWED_DTYPES)).map(np.dtype), SHAPES),
    min_size=1,
)


def arrays_of(row: Any, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Any bytes at all, but that bools are 0 or 1."""
    found = {}
    for name, (dtype, shape) in row.items():
        size = int(np.prod(shape, dtype=int)) * dtype.itemsize
        raw = rng.integers(0, 2 if dtype.kind == "b" else 256, size, np.uint8)
        found[name] = raw.view(dtype).reshape(shape)
    return found


def of(row: Any) -> RowLayout:
    layout = row_layout_of(row)
    assert layout is not None
    return layout


@given(ROWS, st.integers(1, 4), st.integers(0, 2**32))
def test_a_layout_writes_the_same_bytes_and_reads_the_same_arrays(row: Any, count: int, seed: int) -> None:
    layout, rng = of(row), np.random.default_rng(seed)
    payloads, expected = [], []
    for number in range(count):
        arrays = arrays_of(row, rng)
        frames = layout.encode(KIND, {"n": number}, arrays)
        assert list(map(bytes, frames)) == list(map(bytes, encode(KIND, {"n": number}, arrays)))
        _, header = decode_header(frames)
        payloads.append(layout.payload_of(header, frames))
        expected.append(decode_arrays(header, frames))
    assert None not in payloads
    columns = layout.read([payload for payload in payloads if payload is not None])
    for number, arrays in enumerate(expected):
        for name, array in arrays.items():
            assert columns[name][number].tobytes() == array.tobytes()
            assert (columns[name].dtype, columns[name].shape[1:]) == (array.dtype, array.shape)
            assert not columns[name].flags.writeable


@pytest.mark.parametrize(
    "row",
    [
        {"obs": (np.dtype("<f4"), (0, 3))},
        {"obs": (np.dtype("<f4"), (200, 200))},
        {"obs": (np.dtype("<f4"), (4,)), "obs/large": (np.dtype("|u1"), (1 << 16,))},
        {},
    ],
)
def test_large_or_empty_arrays_have_no_layout(row: Any) -> None:
    assert row_layout_of(row) is None


def test_a_layout_leaves_messages_of_other_arrays_to_their_manifest() -> None:
    layout = of({"obs": (np.dtype("<f4"), (2,))})
    obs = np.ones(2, np.float32)
    for arrays in ({}, {"obs": obs.astype(np.float64)}, {"obs": obs[:1]}, {"obs": obs, "more": obs}, {"other": obs}):
        frames = encode(KIND, {}, arrays)
        assert layout.payload_of(decode_header(frames)[1], frames) is None


def test_a_payload_without_padding_is_left_to_its_manifest() -> None:
    layout, obs = of({"obs": (np.dtype("<f4"), (2,))}), np.ones(2, np.float32)
    tag, body, payload = encode(KIND, {}, {"obs": obs})
    _, header = decode_header([tag, body, payload])
    header["payload"]["sizes"] = [8]
    assert layout.payload_of(header, [tag, body, bytes(payload)[:8]]) is None


def test_a_payload_that_was_changed_on_its_way_is_refused() -> None:
    layout, obs = of({"obs": (np.dtype("<f4"), (2,))}), np.ones(2, np.float32)
    tag, body, payload = encode(KIND, {}, {"obs": obs})
    _, header = decode_header([tag, body, payload])
    with pytest.raises(DecodeError, match="checksum"):
        layout.payload_of(header, [tag, body, bytes(len(payload))])
