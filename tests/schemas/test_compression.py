"""Compressed payloads: equal to the bit once they are read, and lies about them are found."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.errors import DecodeError
from headrace.schemas.frames import compression
from headrace.schemas.frames.compression import LZ4, readable_encodings
from headrace.schemas.frames.wire import (
    OWN_FRAME_BYTES,
    MessageKind,
    WireLimits,
    decode,
    decode_header,
    decompressed,
    encode,
    encode_packed,
    is_compressed,
)
from headrace.schemas.peers.advertised import is_own_address

RANDOM = np.random.default_rng(0)
PIXELS = np.repeat(RANDOM.integers(0, 255, (64, 84), np.uint8), 84, 1)
NOISE = RANDOM.integers(0, 255, 2 * OWN_FRAME_BYTES, np.uint8)


def payload_of(frames: list[Any]) -> dict[str, Any]:
    payload: dict[str, Any] = decode_header(frames)[1]["payload"]
    return payload


def test_arrays_are_equal_to_the_bit_and_pixels_take_a_fraction() -> None:
    arrays = {"pixels": PIXELS, "noise": NOISE, "few": np.arange(5)}
    plain, small = (
        encode(MessageKind.BATCH, {"a": 1}, arrays),
        encode(MessageKind.BATCH, {"a": 1}, arrays, compressed=True),
    )
    read = decode(small)
    assert read.header["a"] == 1
    for name, array in arrays.items():
        assert read.arrays[name].dtype == array.dtype
        assert read.arrays[name].tobytes() == array.tobytes()
        assert not read.arrays[name].flags.writeable
    assert payload_of(small)["raw_sizes"] == [0, PIXELS.nbytes, 0], "small frames and noise stay as they are"
    assert len(small[3]) * 10 < len(plain[3])
    assert [bytes(frame) for frame in decompressed(small)] == [bytes(frame) for frame in plain]


def test_a_message_that_does_not_compress_is_sent_plain() -> None:
    plain = encode(MessageKind.BATCH, {}, {"noise": NOISE})
    assert encode(MessageKind.BATCH, {}, {"noise": NOISE}, compressed=True) == plain
    assert not is_compressed(decode_header(plain)[1])
    assert decompressed(plain) == plain
    unreadable = [*plain[:1], b"no JSON", *plain[2:]]
    assert decompressed(unreadable) == unreadable, "the header of a plain batch is not read again"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9000)), min_size=1, max_size=5))
def test_any_arrays_survive_compression(told: list[tuple[int, int]]) -> None:
    kinds = (np.zeros, np.arange, lambda n: np.tile(np.arange(7.0), n // 7 + 1), RANDOM.random)
    arrays = {f"a{i}": np.asarray(kinds[kind](n)) for i, (kind, n) in enumerate(told)}
    read = decode(encode(MessageKind.BATCH, {}, arrays, compressed=True)).arrays
    assert {name: array.tobytes() for name, array in read.items()} == {n: a.tobytes() for n, a in arrays.items()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"raw_sizes": [PIXELS.nbytes - 1]}, "bad_encoding"),
        ({"raw_sizes": [PIXELS.nbytes + 1]}, "bad_encoding"),
        ({"raw_sizes": [-1]}, "bad_encoding"),
        ({"raw_sizes": [True]}, "bad_encoding"),
        ({"raw_sizes": []}, "bad_encoding"),
        ({"raw_sizes": None}, "bad_encoding"),
        ({"raw_sizes": [0]}, "bad_shape"),
        ({"raw_sizes": [1 << 40]}, "payload_too_large"),
        ({"encoding": "zip"}, "bad_encoding"),
        ({"encoding": [[]]}, "bad_encoding"),
    ],
)
def test_a_lie_about_the_encoding_is_a_decode_error(change: dict[str, Any], reason: str) -> None:
    frames = encode(MessageKind.BATCH, {}, {"pixels": PIXELS}, compressed=True)
    payload = payload_of(frames)
    told = {"encoding": LZ4, "raw_sizes": payload["raw_sizes"], **change}
    lie = encode_packed(MessageKind.BATCH, {}, frames[2:], payload["arrays"], told)
    with pytest.raises(DecodeError) as caught:
        decode(lie)
    assert caught.value.reason == reason


def test_bytes_that_are_no_lz4_block_are_a_decode_error() -> None:
    manifest = payload_of(encode(MessageKind.BATCH, {}, {"pixels": PIXELS}))["arrays"]
    told = {"encoding": LZ4, "raw_sizes": [PIXELS.nbytes]}
    with pytest.raises(DecodeError, match="no lz4 block"):
        decode(encode_packed(MessageKind.BATCH, {}, [b"\xff" * 5000], manifest, told))


def test_a_small_message_cannot_unpack_to_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = encode(MessageKind.BATCH, {}, {"zeros": np.zeros(1 << 20)}, compressed=True)
    assert sum(map(len, frames)) < 100_000
    assert decode(frames, WireLimits(payload_bytes=8 << 20)).arrays["zeros"].nbytes == 8 << 20
    monkeypatch.setattr(compression, "_decompress", lambda frame, size: pytest.fail("it was unpacked first"))
    with pytest.raises(DecodeError) as caught:
        decode(frames, WireLimits(payload_bytes=(8 << 20) - 1))
    assert caught.value.reason == "payload_too_large"


def test_without_lz4_no_encoding_is_offered_and_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = encode(MessageKind.BATCH, {}, {"pixels": PIXELS}, compressed=True)
    monkeypatch.setattr(compression, "lz4", None)
    assert readable_encodings() == []
    with pytest.raises(DecodeError, match=r"pip install headrace\[lz4\]"):
        decode(frames)


def test_is_own_address_accepts_only_addresses_of_this_machine() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        own = probe.getsockname()[0]
    for endpoint in ("ipc:///tmp/x", "tcp://127.0.0.1:5", "tcp://[::1]:5", "tcp://localhost:5", f"tcp://{own}:5"):
        assert is_own_address(endpoint), endpoint
    for endpoint in ("tcp://192.0.2.1:5", "tcp://[2001:db8::1]:5", "tcp://no.such.host.invalid:5"):
        assert not is_own_address(endpoint), endpoint
