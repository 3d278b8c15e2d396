"""A small message joined into one frame decodes to the same message as in several frames."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.wire import MessageKind, decode, encode
from headrace.workers.serving.single_frame import LARGEST, join_frames, split_frame

HEADER = {"session": "s", "token": "t", "step": 3}


@given(sizes=st.lists(st.integers(0, 40), max_size=3), text=st.text(max_size=30))
def test_a_joined_message_decodes_like_its_separate_frames(sizes: list[int], text: str) -> None:
    arrays = {f"obs/{place}": np.arange(size, dtype=np.float32) for place, size in enumerate(sizes)}
    frames = encode(MessageKind.EPISODE_STEP, {**HEADER, "text": text}, arrays)
    message, told = decode(frames), decode(split_frame([bytes(frame) for frame in join_frames(frames)]))
    assert (told.kind, told.header) == (message.kind, message.header)
    assert {name: array.tolist() for name, array in told.arrays.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


def test_a_large_message_keeps_its_frames() -> None:
    frames = encode(MessageKind.EPISODE_STEP, HEADER, {"obs": np.zeros(LARGEST, np.uint8)})
    assert join_frames(frames) == frames
    assert split_frame([bytes(frame) for frame in frames]) == frames


@given(cut=st.integers(0, 300), byte=st.integers(0, 255))
def test_a_truncated_or_altered_joined_message_is_refused(cut: int, byte: int) -> None:
    (joined,) = join_frames(encode(MessageKind.EPISODE_STEP, HEADER, {"obs": np.ones(4, np.float32)}))
    joined = bytes(joined)
    cut %= len(joined)
    for damaged in (joined[:cut], joined[:cut] + bytes([joined[cut] ^ (byte or 1)]) + joined[cut + 1 :]):
        with pytest.raises(DecodeError):
            decode(split_frame([damaged]))


def test_a_header_longer_than_its_frame_is_refused() -> None:
    with pytest.raises(DecodeError, match="would end at byte 4294967315 of 20"):
        split_frame([b"HDRC" + bytes(12) + b"\xff" * 4])
