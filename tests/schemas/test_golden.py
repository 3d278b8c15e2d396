"""Encoded samples of this major version of the wire stay readable, and today's code still writes their fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import golden_samples
import numpy as np
import orjson
import pytest

from headrace.schemas.frames.wire import PROTOCOL_MAJOR, PROTOCOL_MINOR, decode, read_tag
from support.decode_batch import decode_batch

FOLDER = Path(golden_samples.__file__).parent
TODAY = dict(golden_samples.golden())


def _expected(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = orjson.loads((FOLDER / f"{name}.json").read_bytes())
    return loaded


def test_each_kind_of_message_and_each_family_of_spaces_has_a_sample() -> None:
    assert {path.stem for path in FOLDER.glob("*.bin")} == set(TODAY), "run python tests/golden/golden_samples.py"


@pytest.mark.parametrize("name", sorted(TODAY))
def test_a_golden_sample_is_read_field_by_field(name: str) -> None:
    frames, expected = golden_samples.read(FOLDER / f"{name}.bin"), _expected(name)
    major, minor = read_tag(frames[0])[1:3]
    assert (major, minor) <= (PROTOCOL_MAJOR, PROTOCOL_MINOR)
    assert major == PROTOCOL_MAJOR
    message = decode(frames)
    assert message.kind.name == expected["kind"]
    assert {k: v for k, v in message.header.items() if k != "payload"} == expected["header"]
    assert message.arrays.keys() == expected["arrays"].keys()
    for array_name, (dtype, shape, values) in expected["arrays"].items():
        array = message.arrays[array_name]
        assert (array.dtype.str, list(array.shape)) == (dtype, shape)
        np.testing.assert_array_equal(array.ravel(), np.asarray(values, dtype))


@pytest.mark.parametrize("name", sorted(TODAY))
def test_todays_encoding_keeps_the_fields_and_arrays_of_the_sample(name: str) -> None:
    """New fields may come in a minor version; an old one may neither go nor change its form."""
    today, expected = golden_samples.describe(TODAY[name]), _expected(name)
    assert today["kind"] == expected["kind"]
    assert today["arrays"] == expected["arrays"]
    assert golden_samples.contains(today["header"], expected["header"]), "a field is gone or has another form"


@pytest.mark.parametrize("family", golden_samples.SPACES)
def test_a_golden_batch_is_iterated_as_chunks(family: str) -> None:
    frames = golden_samples.read(FOLDER / f"batch_{family}.bin")
    header, batch = decode_batch(frames, *golden_samples.SPACES[family])
    assert (header.slot, header.incarnation, header.seq) == (3, 2, 17)
    assert [len(chunk) for chunk in batch] == [3, 0, 2, 1]
    assert [chunk.end.name for chunk in batch] == ["TERMINATED", "ABORTED", "ONGOING", "TRUNCATED"]
    assert [chunk.end_reason for chunk in batch] == [None, "env_exception", None, None]
    assert [chunk.agent_id for chunk in batch] == ["red", "blue", "red", "blue"]
    assert batch[0].episode_id == "80000000000000000000000000000000"


def test_making_golden_samples_adds_missing_samples_and_keeps_old_ones(tmp_path: Path) -> None:
    (tmp_path / "Ack.bin").write_bytes(b"as an old peer sent it")
    golden_samples.add_new(tmp_path)
    assert (tmp_path / "Ack.bin").read_bytes() == b"as an old peer sent it"
    assert {path.stem for path in tmp_path.glob("*.bin")} == set(TODAY)
    assert golden_samples.read(tmp_path / "Bye.bin") == [bytes(frame) for frame in TODAY["Bye"]]
