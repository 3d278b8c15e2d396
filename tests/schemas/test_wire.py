"""The codec: round trips, no copies of large arrays, checksums, and a named reason for each malformed message."""

from __future__ import annotations

import mmap
import struct
from typing import Any

import hypothesis.extra.numpy as npst
import numpy as np
import orjson
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.errors import DecodeError, EncodeError
from headrace.schemas.frames import wire
from headrace.schemas.frames.wire import (
    ALLOWED_DTYPES,
    DEFAULT_LIMITS,
    OWN_FRAME_BYTES,
    WEIGHTS_LIMITS,
    Buffer,
    MessageKind,
    WireLimits,
    decode,
    decode_header,
    encode,
    read_tag,
)

DTYPES = st.sampled_from(sorted(ALLOWED_DTYPES))
SHAPES = npst.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4)
ARRAYS = st.dictionaries(st.text(max_size=8), st.tuples(DTYPES, SHAPES).flatmap(lambda t: npst.arrays(*t)), max_size=6)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda sub: st.lists(sub, max_size=3) | st.dictionaries(st.text(max_size=5), sub, max_size=3),
    max_leaves=10,
)


def sealed(
    header: Any, *payload: Buffer, kind: int = MessageKind.BATCH, major: int = 1, minor: int = 0
) -> list[Buffer]:
    """Frames with a right checksum around a header of the test's own, by the layout in wire.py's docstring."""
    body = header if isinstance(header, bytes) else orjson.dumps(header)
    head = b"HDRC" + bytes((major, minor, kind, 0))
    return [head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + body)), body, *payload]


def with_arrays(manifest: Any, *payload: bytes) -> list[Buffer]:
    """A message of arrays as `manifest` lists them, all else right."""
    checksum = xxhash.xxh3_64_intdigest(b"".join(payload))
    sizes = [len(frame) for frame in payload]
    return sealed({"payload": {"checksum": checksum, "sizes": sizes, "arrays": manifest}}, *payload)


def reason_of(frames: list[Buffer], limits: WireLimits | None = None) -> str:
    with pytest.raises(DecodeError) as caught:
        decode(frames, limits)
    assert str(caught.value) == f"{caught.value.reason}: {caught.value.detail}"
    assert len(str(caught.value)) < 500
    return caught.value.reason


@settings(max_examples=300)
@given(kind=st.sampled_from(MessageKind), header=st.dictionaries(st.text(max_size=5), JSON, max_size=4), arrays=ARRAYS)
def test_every_message_survives_encoding(kind: MessageKind, header: dict[str, Any], arrays: dict[str, Any]) -> None:
    header.pop("payload", None)
    message = decode([bytes(frame) for frame in encode(kind, header, arrays)])
    assert message.kind is kind
    assert {k: v for k, v in message.header.items() if k != "payload"} == header
    assert list(message.arrays) == list(arrays)
    for name, array in arrays.items():
        assert message.arrays[name].dtype == array.dtype
        assert not message.arrays[name].flags.writeable
        np.testing.assert_array_equal(message.arrays[name], array)


@pytest.mark.parametrize("kind_of_frame", [bytes, bytearray, memoryview])
def test_frames_may_be_bytes_bytearrays_or_memoryviews(kind_of_frame: Any) -> None:
    frames = [kind_of_frame(bytes(f)) for f in encode(MessageKind.BATCH, {"a": 1}, {"x": np.arange(5)})]
    array = decode(frames).arrays["x"]
    assert array.tolist() == [0, 1, 2, 3, 4]
    assert not array.flags.writeable


def test_a_large_array_is_sent_and_received_without_a_copy() -> None:
    large, small = np.arange(OWN_FRAME_BYTES // 8), np.arange(3)
    frames = encode(MessageKind.BATCH, {}, {"large": large, "small": small})
    assert [len(f) for f in frames[2:]] == [64, OWN_FRAME_BYTES]
    assert np.shares_memory(np.frombuffer(frames[3], np.uint8), large)
    assert np.shares_memory(decode(frames).arrays["large"], large)


def test_arrays_in_foreign_layouts_arrive_little_endian_and_contiguous() -> None:
    arrays = {"big": np.arange(4, dtype=">i4"), "f": np.asfortranarray(np.eye(3)), "step": np.arange(9)[::-2]}
    received = decode(encode(MessageKind.BATCH, {}, arrays)).arrays
    assert received["big"].dtype.str == "<i4"
    for name, array in arrays.items():
        np.testing.assert_array_equal(received[name], array)
        assert received[name].flags.c_contiguous


def test_no_message_has_more_frames_than_receivers_take() -> None:
    arrays = {f"w{i}": np.full(OWN_FRAME_BYTES, i, np.uint8) for i in range(80)}
    frames = encode(MessageKind.WEIGHTS, {}, arrays)
    assert len(frames) <= DEFAULT_LIMITS.frames
    assert [int(array[0]) for array in decode(frames).arrays.values()] == list(range(80))


@pytest.mark.parametrize(
    ("arrays", "word"),
    [
        ({"x": np.array([object()])}, "object"),
        ({"x": np.array(["text"])}, "may not go on the wire"),
        ({"x": np.zeros(2, [("a", "<i4")])}, "may not go on the wire"),
        ({"x": np.zeros(2, np.complex64)}, "complex64"),
        ({"x": np.zeros((1,) * 9)}, "9 axes"),
        ({str(i): np.zeros(0) for i in range(DEFAULT_LIMITS.arrays + 1)}, "arrays; 4096 are allowed"),
    ],
)
def test_arrays_no_receiver_would_take_are_refused_by_the_sender(arrays: dict[str, Any], word: str) -> None:
    with pytest.raises(EncodeError, match=word):
        encode(MessageKind.BATCH, {}, arrays)


@pytest.mark.parametrize("header", [{"x": object()}, {"x": 2**64}, {"x": "\ud800"}, {"x": "y" * (1 << 20)}])
def test_headers_no_receiver_would_take_are_refused_by_the_sender(header: dict[str, Any]) -> None:
    with pytest.raises(EncodeError, match="header of ACK"):
        encode(MessageKind.ACK, header)


def test_every_single_flipped_bit_is_noticed() -> None:
    arrays = {"x": np.arange(3, dtype="<i2"), "y": np.ones(2, "<f4")}
    frames = [bytearray(f) for f in encode(MessageKind.BATCH, {"slot": 1, "name": "abc"}, arrays)]
    for frame in frames:
        for bit in range(8 * len(frame)):
            frame[bit // 8] ^= 1 << bit % 8
            with pytest.raises(DecodeError):
                decode(frames)
            frame[bit // 8] ^= 1 << bit % 8
    assert decode(frames).arrays["x"].tolist() == [0, 1, 2]


def test_every_truncation_and_every_missing_or_added_frame_is_noticed() -> None:
    frames = encode(MessageKind.BATCH, {"slot": 1}, {"x": np.arange(3), "y": np.zeros(OWN_FRAME_BYTES)})
    for i, frame in enumerate(frames):
        for size in {*range(0, len(frame), max(1, len(frame) // 99)), len(frame) - 1}:
            with pytest.raises(DecodeError):
                decode([*frames[:i], frame[:size], *frames[i + 1 :]])
        with pytest.raises(DecodeError):
            decode([*frames[:i], *frames[i + 1 :]])
        with pytest.raises(DecodeError):
            decode([*frames[:i], b"", *frames[i:]])


def test_frame_0_gives_the_protocol_version_even_of_a_newer_peer() -> None:
    hello = sealed({}, kind=MessageKind.HELLO, major=2, minor=3)
    assert read_tag(hello[0])[:3] == (MessageKind.HELLO, 2, 3)
    assert reason_of(hello) == "version_mismatch"
    assert reason_of(sealed({}, kind=200, major=2)) == "version_mismatch"
    assert decode(sealed({"new": 1}, kind=MessageKind.HELLO, minor=9)).header == {"new": 1}


DEEP = b'{"x":' + b"[" * 1000 + b"]" * 1000 + b"}"
DEEP_ROW = b'{"payload":{"checksum":%d,"sizes":[],"arrays":[%s]}}' % (
    xxhash.xxh3_64_intdigest(b""),
    b"[" * 1000 + b"]" * 1000,
)
X = np.arange(4, dtype="<i8").tobytes()


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "frame_count"),
        ([b""], "frame_count"),
        ([b"", b""], "bad_tag"),
        ([b"GET / HTTP/1.1\r\n", b"{}"], "bad_tag"),
        (sealed({}, kind=0), "unknown_kind"),
        (sealed({}, kind=255), "unknown_kind"),
        (sealed(b""), "bad_header"),
        (sealed(b"[]"), "bad_header"),
        (sealed(b"NaN"), "bad_header"),
        (sealed(b"{}\xff"), "bad_header"),
        (sealed(DEEP), "bad_header"),
        (sealed(DEEP_ROW), "bad_header"),
        (sealed(b'{"x":"' + b"y" * (1 << 20) + b'"}'), "header_too_large"),
        (sealed({}, b"stray"), "payload_sizes"),
        (sealed({"payload": []}, b"x"), "payload_sizes"),
        (sealed({"payload": {"sizes": [2]}}, b"x"), "payload_sizes"),
        (sealed({"payload": {"sizes": [1], "checksum": 0, "arrays": []}}, b"x"), "payload_checksum"),
        (with_arrays(None, X), "bad_manifest"),
        (with_arrays({}, X), "bad_manifest"),
        (with_arrays([7], X), "bad_manifest"),
        (with_arrays([["x", "<i8", [4], 0]], X), "bad_manifest"),
        (with_arrays([[1, "<i8", [4], 0, 0]], X), "bad_manifest"),
        (with_arrays([["x", ["<i8"], [4], 0, 0]], X), "bad_manifest"),
        (with_arrays([["x", "<i8", 4, 0, 0]], X), "bad_manifest"),
        (with_arrays([["x", "<i8", [4], 1, 0]], X), "bad_manifest"),
        (with_arrays([["x", "<i8", [4], -1, 0]], X), "bad_manifest"),
        (with_arrays([["x", "<i8", [4], False, 0]], X), "bad_manifest"),
        (with_arrays([["x", "<i8", [4], 0, -8]], X), "bad_manifest"),
        (with_arrays([["x", "<i8", [4], 0, 0.0]], X), "bad_manifest"),
        (with_arrays([["x", "<i8", [4], 0, 0], ["x", "<i8", [4], 0, 0]], X), "bad_manifest"),
        (with_arrays([["x", "|O", [4], 0, 0]], X), "bad_dtype"),
        (with_arrays([["x", "O", [4], 0, 0]], X), "bad_dtype"),
        (with_arrays([["x", ">i8", [4], 0, 0]], X), "bad_dtype"),
        (with_arrays([["x", "<U4", [1], 0, 0]], X), "bad_dtype"),
        (with_arrays([["x", "i8,i8", [1], 0, 0]], X), "bad_dtype"),
        (with_arrays([["x", "<i8", [5], 0, 0]], X), "bad_shape"),
        (with_arrays([["x", "<i8", [4], 0, 1]], X), "bad_shape"),
        (with_arrays([["x", "<i8", [-1], 0, 0]], X), "bad_shape"),
        (with_arrays([["x", "<i8", [True], 0, 0]], X), "bad_shape"),
        (with_arrays([["x", "<i8", [4.0], 0, 0]], X), "bad_shape"),
        (with_arrays([["x", "<i8", [2**63], 0, 0]], X), "bad_shape"),
        (with_arrays([["x", "<i8", [2**40] * 8, 0, 0]], X), "bad_shape"),
        (with_arrays([["x", "<i8", [1] * 9, 0, 0]], X), "bad_shape"),
        (with_arrays([["x", "<i8", [0, *[2**40] * 7], 0, 0]], X), "bad_shape"),
    ],
)
def test_a_malformed_message_is_refused_with_its_reason(frames: list[Buffer], reason: str) -> None:
    assert reason_of(frames) == reason


def test_caps_hold_before_anything_is_read() -> None:
    frames = encode(MessageKind.BATCH, {}, {"x": np.arange(9), "y": np.zeros(OWN_FRAME_BYTES)})
    assert reason_of(frames, WireLimits(payload_bytes=OWN_FRAME_BYTES)) == "payload_too_large"
    assert reason_of(frames, WireLimits(frames=3)) == "frame_count"
    assert reason_of(frames, WireLimits(arrays=1)) == "bad_manifest"
    assert reason_of(frames, WireLimits(header_bytes=20)) == "header_too_large"


@pytest.mark.parametrize(
    ("kind", "limits"),
    [(MessageKind.WEIGHTS, WEIGHTS_LIMITS), (MessageKind.BATCH, DEFAULT_LIMITS)],
    ids=["weights", "batch"],
)
def test_weights_may_be_larger_than_other_messages(
    kind: MessageKind, limits: WireLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sender and receiver have the same bounds. They look at no byte of what is too large."""
    empty = np.zeros(0, np.uint8)
    many = {f"w{n}": empty for n in range(limits.arrays + 1)}
    with pytest.raises(EncodeError, match=f"{limits.arrays} are allowed"):
        encode(kind, {}, many)
    rows = [[name, "|u1", [0], 0, 0] for name in many]
    nothing = {"checksum": xxhash.xxh3_64_intdigest(b""), "sizes": [0], "arrays": rows}
    assert reason_of(sealed({"payload": nothing}, b"", kind=kind)) == "bad_manifest"
    many.popitem()
    assert len(decode(encode(kind, {}, many)).arrays) == limits.arrays
    monkeypatch.setattr(wire, "_checksum", lambda payload: 0)
    room = mmap.mmap(-1, limits.payload_bytes + 1, mmap.MAP_PRIVATE)  # takes memory where it is read or written
    for nbytes in (limits.payload_bytes, limits.payload_bytes + 1):
        array = np.frombuffer(room, np.uint8, nbytes)
        payload = {"checksum": 0, "sizes": [nbytes], "arrays": [["w", "|u1", [nbytes], 0, 0]]}
        frames = sealed({"payload": payload}, array.data, kind=kind)
        if nbytes > limits.payload_bytes:
            with pytest.raises(EncodeError, match=f"{limits.payload_bytes} are allowed"):
                encode(kind, {}, {"w": array})
            assert reason_of(frames) == "payload_too_large"
        else:
            assert list(map(len, encode(kind, {}, {"w": array}))) == list(map(len, frames))
            assert decode(frames).arrays["w"].nbytes == nbytes


def test_arrays_may_share_bytes_and_be_empty() -> None:
    rows = [
        ["x", "<i8", [4], 0, 0],
        ["y", "<u8", [2, 2], 0, 0],
        ["none", "<f4", [0, 3], 0, 0],
        ["one", "<i8", [], 0, 8],
    ]
    arrays = decode(with_arrays(rows, X)).arrays
    assert arrays["y"].tolist() == [[0, 1], [2, 3]]
    assert arrays["none"].shape == (0, 3)
    assert int(arrays["one"]) == 1


def test_a_forwarder_reads_the_header_without_looking_at_array_bytes() -> None:
    frames = encode(MessageKind.BATCH, {"slot": 4}, {"x": np.arange(9)})
    kind, header = decode_header([*frames[:2], bytes(len(frames[2]))])
    assert (kind, header["slot"]) == (MessageKind.BATCH, 4)
    assert reason_of([*frames[:2], bytes(len(frames[2]))]) == "payload_checksum"
